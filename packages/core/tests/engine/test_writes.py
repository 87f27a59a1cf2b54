"""Writes to parameters inside of a forward that is a unit's, as ``training_step`` of Lightning is.

BYOL, MoCo and DINO move a teacher there, each in its own way. The reference is DDP's: one process
with the gradients averaged over all ranks' batches.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from vescale_fsdp import fully_shard, register_fsdp_forward_method
from vescale_fsdp.testing import RankError, run_ranks

from .helpers import averaged_gradients, full_parameters
from .models import make

STEPS = 12
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
        self.slow_scale.data.mul_(0.9).add_(0.1 * self.scale.detach().data)
        return loss


def batch_of(step: int, rank: int) -> Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * step + rank))


def check(
    model_class: type[SelfDistillation], update: Update, sharding: str | None, in_flight: int
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
    for step in range(STEPS):
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


@pytest.mark.parametrize("update", [by_data, by_data_in_place, in_place, by_lists])
@pytest.mark.parametrize("model_class", [BYOL, MoCo, DINO])
@pytest.mark.sampled(3)
def test_a_teacher_that_moves_inside_of_a_step(
    model_class: type[SelfDistillation], update: Update
) -> None:
    run_ranks(check, 2, model_class, update, None, 2)


@pytest.mark.parametrize("in_flight", [1, 4])
@pytest.mark.parametrize("model_class", [BYOL, MoCo, DINO])
@pytest.mark.sampled(2)
def test_a_teacher_that_moves_whatever_is_gathered_ahead(
    model_class: type[SelfDistillation], in_flight: int
) -> None:
    run_ranks(check, 2, model_class, by_data_in_place, None, in_flight)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("sharding", ["ddp", "zero1", "zero2"])
@pytest.mark.parametrize("model_class", [BYOL, DINO])
def test_a_teacher_that_moves_where_parameters_stay_gathered(
    model_class: type[SelfDistillation], sharding: str
) -> None:
    run_ranks(check, 2, model_class, by_data_in_place, sharding, 2)


def test_a_gathered_student_and_a_replicated_teacher() -> None:
    # The student has run and stays gathered, and the teacher has not.
    run_ranks(check, 2, MoCo, by_data_in_place, "ddp", 2)


@pytest.mark.parametrize("sharding", ["zero1", "zero2"])
def test_a_gathered_student_and_a_sharded_teacher_are_refused(sharding: str) -> None:
    # As with FSDP2.
    with pytest.raises(RankError, match="together with a plain tensor"):
        run_ranks(check, 2, MoCo, by_data_in_place, sharding, 2)
