"""A teacher follows its student: inside of a step that is a unit's forward, or between steps.

BYOL, MoCo and DINO move it inside of what is ``training_step`` of Lightning, each in its own way.
The reference is DDP's: one process with the gradients averaged over all ranks' batches.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import product

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import vescale_fsdp
from vescale_fsdp import fully_shard, register_fsdp_forward_method

from ..helpers import averaged_gradients, full_parameters
from ..models import make
from .asking import Answers, Case, Cases, Outcomes, answer, named, sampled

# Inside of a step

Update = Callable[[nn.Module, nn.Module], None]


def by_data(student: nn.Module, teacher: nn.Module) -> None:
    """As MoCo's and lightly's examples."""
    for s, t in zip(student.parameters(), teacher.parameters(), strict=True):
        t.data = t.data * 0.9 + s.data * 0.1


def by_data_in_place(student: nn.Module, teacher: nn.Module) -> None:
    """As DINO's."""
    with torch.no_grad():
        for s, t in zip(student.parameters(), teacher.parameters(), strict=True):
            t.data.mul_(0.9).add_(0.1 * s.detach().data)


@torch.no_grad()
def in_place(student: nn.Module, teacher: nn.Module) -> None:
    for s, t in zip(student.parameters(), teacher.parameters(), strict=True):
        t.mul_(0.9).add_(s, alpha=0.1)


@torch.no_grad()
def by_lists(student: nn.Module, teacher: nn.Module) -> None:
    torch._foreach_lerp_(list(teacher.parameters()), list(student.parameters()), 0.1)


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 5))


class SelfDistillation(nn.Module):
    """A student, a teacher that follows it, a predictor and a scale of the root's own."""

    update: Update

    def __init__(self) -> None:
        super().__init__()
        self.student = network()
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
        self.predictor = nn.Linear(5, 5)
        self.scale = nn.Parameter(torch.ones(5))
        self.slow_scale = nn.Parameter(torch.ones(5), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.predictor(self.student(x)) * self.scale
        return y

    def aim(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            y: Tensor = self.teacher(x) * self.slow_scale
        return y

    def training_step(self, x: Tensor) -> Tensor:
        raise NotImplementedError


class BYOL(SelfDistillation):
    """Moves the teacher first, then compares both views both ways."""

    def training_step(self, x: Tensor) -> Tensor:
        type(self).update(self.student, self.teacher)
        with torch.no_grad():
            self.slow_scale.mul_(0.9).add_(self.scale, alpha=0.1)
        a, b = x, x.flip(0)
        return F.mse_loss(self(a), self.aim(b)) + F.mse_loss(self(b), self.aim(a))


class MoCo(SelfDistillation):
    """The teacher moves between the student's forward and its own."""

    def training_step(self, x: Tensor) -> Tensor:
        query = self(x)
        type(self).update(self.student, self.teacher)
        self.slow_scale.data = self.slow_scale.data * 0.9 + self.scale.data * 0.1
        logits = query @ self.aim(x.flip(0)).T
        return F.cross_entropy(logits, torch.arange(len(x)))


class DINO(SelfDistillation):
    """The teacher runs first, moves, and is seen by the next step only."""

    def training_step(self, x: Tensor) -> Tensor:
        aim = (self.aim(x) / 0.1).softmax(-1)
        loss = -(aim * self(x.flip(0)).log_softmax(-1)).sum(-1).mean()
        type(self).update(self.student, self.teacher)
        with torch.no_grad():
            self.slow_scale.mul_(0.9).add_(0.1 * self.scale.detach())
        return loss


def batch_of(step: int, rank: int) -> Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * step + rank))


def move_inside(
    model_class: type[SelfDistillation],
    update: Update,
    sharding: str | None = None,
    in_flight: int = 2,
) -> None:
    model_class.update = staticmethod(update)  # type: ignore[assignment]
    plain = make(model_class).double()
    model = copy.deepcopy(plain)
    for part in (model.student, model.teacher):
        for layer in part:
            if isinstance(layer, nn.Linear):
                fully_shard(layer, sharding=sharding, in_flight=in_flight)
    fully_shard(model, sharding=sharding, in_flight=in_flight)
    register_fsdp_forward_method(model, "training_step")
    optimizers = [
        torch.optim.SGD([p for p in m.parameters() if p.requires_grad], lr=0.3, momentum=0.9)
        for m in (plain, model)
    ]
    for step in range(5):
        x = batch_of(step, dist.get_rank()).double()
        expected = plain.training_step(x)
        found = model.training_step(x)
        torch.testing.assert_close(found, expected, msg=lambda m, step=step: f"step {step}: {m}")
        expected.backward()
        found.backward()
        gradients = averaged_gradients(plain)
        for name, param in plain.named_parameters():
            param.grad = gradients[name]
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    expected_weights = dict(plain.named_parameters())
    for name, weight in full_parameters(model).items():
        torch.testing.assert_close(weight, expected_weights[name].detach(), msg=name)


# Between steps

MOMENTUM = 0.9


def encoder() -> nn.Module:
    return nn.Sequential(nn.Linear(7, 13), nn.GELU(), nn.Linear(13, 5))


class Byol(nn.Module):
    """As the examples of lightly have it: the student predicts what the teacher sees."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = encoder(), encoder()
        self.predictor = nn.Sequential(nn.Linear(5, 11), nn.ReLU(), nn.Linear(11, 5))
        self.teacher.load_state_dict(self.student.state_dict())
        self.teacher.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            target = self.teacher(x.flip(-1))
        return -F.cosine_similarity(self.predictor(self.student(x)), target).mean()


def pairs(model: Byol) -> tuple[list[Tensor], list[Tensor]]:
    return list(model.teacher.parameters()), list(model.student.parameters())


def follow_by_lerp(model: Byol) -> None:
    teachers, students = pairs(model)
    torch._foreach_lerp_(teachers, students, 1 - MOMENTUM)


def follow_by_foreach(model: Byol) -> None:
    teachers, students = pairs(model)
    torch._foreach_mul_(teachers, MOMENTUM)
    torch._foreach_add_(teachers, students, alpha=1 - MOMENTUM)


def follow_in_a_loop(model: Byol) -> None:
    for teacher, student in zip(*pairs(model), strict=True):
        teacher.mul_(MOMENTUM).add_(student, alpha=1 - MOMENTUM)


def follow_by_data(model: Byol) -> None:
    for teacher, student in zip(*pairs(model), strict=True):
        teacher.data = teacher.data * MOMENTUM + student.data * (1 - MOMENTUM)


def follow_by_data_of_the_student(model: Byol) -> None:
    """The result has the layout of the student, and is moved once more."""
    for teacher, student in zip(*pairs(model), strict=True):
        teacher.data = student.data * (1 - MOMENTUM) + MOMENTUM * teacher.data


def one_unit(model: Byol) -> None:
    fully_shard(model)


def kept_gathered(model: Byol) -> None:
    fully_shard(model, reshard_after_forward=False)


def units_of_layers(model: Byol) -> None:
    for module in (*model.student, *model.teacher):
        if any(True for _ in module.parameters()):
            fully_shard(module)
    fully_shard(model)


def in_whole_tensors(model: Byol) -> None:
    fully_shard(model, granularity=vescale_fsdp.Granularity.whole())


def train(model: Byol, follow: Callable[[Byol], None], batch: slice) -> list[Tensor]:
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    losses = []
    for step in range(5):
        inputs = torch.randn(12, 7, generator=torch.Generator().manual_seed(step))
        loss = model(inputs[batch])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            follow(model)
        losses.append(loss.detach())
    return losses


def follow_between(follow: Callable[[Byol], None], shard: Callable[[Byol], None]) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    single = Byol()
    torch.manual_seed(0)
    model = Byol()
    shard(model)
    expected = train(single, follow, slice(0, 12))
    share = 12 // world_size
    found = train(model, follow, slice(rank * share, (rank + 1) * share))
    for loss, one in zip(found, expected, strict=True):
        dist.all_reduce(loss)
        torch.testing.assert_close(loss / world_size, one, rtol=1e-5, atol=1e-6)
    for (key, param), whole in zip(model.named_parameters(), single.parameters(), strict=True):
        torch.testing.assert_close(
            param.full_tensor(), whole, rtol=1e-5, atol=1e-6, msg=lambda m, key=key: f"{key}: {m}"
        )


def cut_alike() -> None:
    """Modules of the same shapes are units, as docs/coming-from-fsdp2.md advises: nothing moves."""
    model = Byol()
    fully_shard(model.student)
    fully_shard(model.teacher)
    fully_shard(model)
    assert all(t.placements == s.placements for t, s in zip(*pairs(model), strict=True))


def find_by_equal() -> None:
    """Lightning's ``BaseFinetuning`` looks for parameters in lists of others by ``torch.equal``."""
    model = fully_shard(Byol())
    params = list(model.parameters())
    assert [sum(torch.equal(p, q) for q in params if q.shape == p.shape) >= 1 for p in params]
    assert all(torch.equal(t, s) for t, s in zip(*pairs(model), strict=True))
    with torch.no_grad():
        model.student[2].bias[4].add_(1)  # on one rank
    assert not torch.equal(model.student[2].bias, model.teacher[2].bias)


def inside() -> Cases:
    kinds: list[type[SelfDistillation]] = [BYOL, MoCo, DINO]
    updates = [by_data, by_data_in_place, in_place, by_lists]
    found = sampled(
        5,
        {
            f"{kind.__name__}, {update.__name__}": Case(
                lambda kind=kind, update=update: move_inside(kind, update)
            )
            for update, kind in product(updates, kinds)
        },
    )
    found |= sampled(
        2,
        {
            f"{kind.__name__}, {in_flight} in flight": Case(
                lambda kind=kind, in_flight=in_flight: move_inside(
                    kind, by_data_in_place, None, in_flight
                )
            )
            for in_flight, kind in product((1, 4), kinds)
        },
    )
    # Where parameters stay gathered; of MoCo the teacher has not run when it moves.
    for wanted, some in ((3, [MoCo]), (3, [BYOL, DINO])):
        found |= sampled(
            wanted,
            {
                f"{kind.__name__}, {sharding}": Case(
                    lambda kind=kind, sharding=sharding: move_inside(
                        kind, by_data_in_place, sharding
                    )
                )
                for kind, sharding in product(some, ("ddp", "zero1", "zero2"))
            },
        )
    return found


def between() -> Cases:
    follows = [
        follow_by_lerp,
        follow_by_foreach,
        follow_in_a_loop,
        follow_by_data,
        follow_by_data_of_the_student,
    ]
    found: Cases = {
        f"{follow.__name__}, {ranks} ranks": Case(
            lambda follow=follow: follow_between(follow, one_unit),
            ranks=ranks,
            is_nightly=ranks == 2,
        )
        for follow, ranks in product(follows, (2, 3))
    }
    for follow, shard in product(
        (follow_by_lerp, follow_by_data), (kept_gathered, units_of_layers, in_whole_tensors)
    ):
        found[f"{follow.__name__}, {shard.__name__}"] = Case(
            lambda follow=follow, shard=shard: follow_between(follow, shard)
        )
    found["cut alike"] = Case(cut_alike)
    for ranks in (2, 3):
        found[f"equal, {ranks} ranks"] = Case(find_by_equal, ranks=ranks, is_nightly=ranks == 2)
    return found


CASES = inside() | between()


def answers(*names: str) -> Answers:
    return answer(CASES, names)


@pytest.mark.parametrize("name", named(CASES))
def test_a_teacher_follows_as_in_one_process(outcomes: Outcomes, name: str) -> None:
    outcomes.check(name)
