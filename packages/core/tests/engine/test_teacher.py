"""A teacher that follows its student, and parameters whose data is replaced, between steps."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import vescale_fsdp
from vescale_fsdp import fully_shard
from vescale_fsdp.optim import flatten_
from vescale_fsdp.testing import run_ranks

MOMENTUM, STEPS, BATCH = 0.9, 5, 4


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


FOLLOW = {
    each.__name__: each
    for each in (
        follow_by_lerp,
        follow_by_foreach,
        follow_in_a_loop,
        follow_by_data,
        follow_by_data_of_the_student,
    )
}


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
    for step in range(STEPS):
        inputs = torch.randn(12, 7, generator=torch.Generator().manual_seed(step))
        loss = model(inputs[batch])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            follow(model)
        losses.append(loss.detach())
    return losses


def check_follows(name: str, shard: Callable[[Byol], None]) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    single = Byol()
    torch.manual_seed(0)
    model = Byol()
    shard(model)
    expected = train(single, FOLLOW[name], slice(0, 12))
    share = 12 // world_size
    found = train(model, FOLLOW[name], slice(rank * share, (rank + 1) * share))
    for loss, one in zip(found, expected, strict=True):
        dist.all_reduce(loss)
        torch.testing.assert_close(loss / world_size, one, rtol=1e-5, atol=1e-6)
    for (key, param), whole in zip(model.named_parameters(), single.parameters(), strict=True):
        torch.testing.assert_close(
            param.full_tensor(), whole, rtol=1e-5, atol=1e-6, msg=lambda m, key=key: f"{key}: {m}"
        )


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("name", FOLLOW)
def test_a_teacher_in_the_unit_of_its_student_follows_it(name: str, world_size: int) -> None:
    run_ranks(check_follows, world_size, name, one_unit)


@pytest.mark.parametrize("shard", [kept_gathered, units_of_layers, in_whole_tensors])
def test_a_teacher_follows_in_other_units(shard: Callable[[Byol], None]) -> None:
    for name in ("follow_by_lerp", "follow_by_data"):
        run_ranks(check_follows, 2, name, shard)


def check_cuts() -> list[bool]:
    model = Byol()
    fully_shard(model.student)
    fully_shard(model.teacher)
    fully_shard(model)
    return [t.placements == s.placements for t, s in zip(*pairs(model), strict=True)]


def test_modules_of_the_same_shapes_that_are_units_are_cut_alike() -> None:
    """What docs/coming-from-fsdp2.md advises: then nothing moves."""
    assert run_ranks(check_cuts, 2) == [[True] * 4] * 2


def check_two_models(kept: bool) -> None:
    """Averaged weights, as of a copy of the model, that the next forward must use."""
    torch.manual_seed(1)
    single, averaged = encoder(), encoder()
    torch.manual_seed(1)
    model, average = encoder(), encoder()
    options = {"reshard_after_forward": not kept}
    fully_shard(model, **options)
    for module in average:
        if isinstance(module, nn.Linear):
            fully_shard(module, **options)
    fully_shard(average, **options)
    x = torch.randn(3, 7, generator=torch.Generator().manual_seed(0))
    for student, teacher in ((single, averaged), (model, average)):
        for _ in range(3):
            for p, ema_p in zip(student.parameters(), teacher.parameters(), strict=True):
                ema_p.data = ema_p.data * 0.75 + p.data * 0.25
            teacher(x)
    torch.testing.assert_close(average(x), averaged(x))


@pytest.mark.parametrize("kept", [False, True])
def test_a_forward_uses_data_that_was_assigned(kept: bool) -> None:
    run_ranks(check_two_models, 2, kept)


ROWS: dict[str, dict[str, Any]] = {
    "zero3": {},
    "zero1": {"sharding": "zero1"},
    "ddp": {"sharding": "ddp"},
    "unsharded after forward": {"reshard_after_forward": False},
}


def check_swaps(flattens: bool) -> None:
    """The weights of an average are used for an evaluation, as most classes for it do."""
    x = torch.randn(3, 7, generator=torch.Generator().manual_seed(0))
    for name, options in ROWS.items():
        outputs = []
        for shards in (False, True):
            torch.manual_seed(1)
            model, found = encoder(), list[Tensor]()
            if shards:
                for module in model:
                    if isinstance(module, nn.Linear):
                        fully_shard(module, **options)
                fully_shard(model, **options)
            optimizer = torch.optim.AdamW(model.parameters(), 0.1)
            if shards and flattens:
                flatten_(optimizer)
            average = [p.detach().clone() for p in model.parameters()]
            for step in range(4):
                model(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                with torch.no_grad():
                    for each, p in zip(average, model.parameters(), strict=True):
                        each.lerp_(p, 0.1)
                backup = [p.data for p in model.parameters()]
                for each, p in zip(average, model.parameters(), strict=True):
                    p.data = each
                if step % 2:
                    with torch.no_grad():
                        found.append(model(x))
                for each, p in zip(backup, model.parameters(), strict=True):
                    p.data = each
            outputs.append([*found, model(x)])
        torch.testing.assert_close(*outputs, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("flattens", [False, True])
def test_a_backup_of_the_data_brings_the_weights_back(flattens: bool) -> None:
    run_ranks(check_swaps, 2, flattens)


WRITES: dict[str, Callable[[nn.Module], object]] = {
    "in place": lambda model: [p.mul_(2) for p in model.parameters()],
    "data": lambda model: [p.data.mul_(2) for p in model.parameters()],
    "part of data": lambda model: [p.data[:].mul_(2) for p in model.parameters()],
    "foreach": lambda model: torch._foreach_mul_(list(model.parameters()), 2),
    "foreach of data": lambda model: torch._foreach_mul_([p.data for p in model.parameters()], 2),
}


def check_kept_weights() -> None:
    cases = product(WRITES.items(), ({"reshard_after_forward": False}, {"sharding": "ddp"}))
    for (name, write), options in cases:
        torch.manual_seed(1)
        single = encoder().bfloat16()
        torch.manual_seed(1)
        model = fully_shard(encoder(), mp_policy=MixedPrecisionPolicy(torch.bfloat16), **options)
        x = torch.randn(3, 7, generator=torch.Generator().manual_seed(0))
        for _ in range(2):
            outputs = [single(x.bfloat16()), model(x)]
            torch.testing.assert_close(outputs[1], outputs[0], msg=lambda m, name=name: name + m)
            with torch.no_grad():
                write(single)
                write(model)


def test_weights_that_stay_gathered_are_gathered_anew_after_a_write() -> None:
    run_ranks(check_kept_weights, 2)


def check_dtype() -> None:
    torch.manual_seed(1)
    single = encoder()
    torch.manual_seed(1)
    model = fully_shard(encoder())
    before = list(model.parameters())
    x = torch.randn(3, 7, generator=torch.Generator().manual_seed(0))
    for each in (single, model):
        each(x)
        for p in each.parameters():
            p.data = p.data.double() + 1
    torch.testing.assert_close(model(x.double()), single(x.double()))
    assert [id(p) for p in model.parameters()] == [id(p) for p in before]
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model(x.double()).sum().backward()
    optimizer.step()
    single(x.double()).sum().backward()
    torch.optim.SGD(single.parameters(), lr=1.0).step()
    torch.testing.assert_close(model(x.double()), single(x.double()))


def test_a_forward_uses_data_of_another_dtype() -> None:
    run_ranks(check_dtype, 2)


def check_names() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5))
    fully_shard(model[1])
    fully_shard(model)
    with pytest.raises(ValueError, match=r"the data of parameter 'weight' cannot be replaced"):
        model[1].weight.data = torch.zeros(5, 4)
    model(torch.zeros(1, 3))
    for module in (model, model.double()):  # also where the parameters got another memory
        module(torch.zeros(1, 3, dtype=module[0].weight.dtype))
        module.reshard()
        with pytest.raises(ValueError, match=r"parameter '1.weight' cannot be replaced") as caught:
            module[1].weight.data = torch.zeros(5, 4)
        assert "a Tensor of shape (5, 4); expected a DTensor of shape (5, 4)" in str(caught.value)
        with pytest.raises(ValueError, match=r"parameter '0.bias'.*shape \(3,\)"):
            module[0].bias.data = module[0].bias[0:3]


def test_errors_name_the_parameter() -> None:
    run_ranks(check_names, 2)


def check_finetuning() -> None:
    """Lightning's ``BaseFinetuning`` looks for parameters in lists of others by ``torch.equal``."""
    model = fully_shard(Byol())
    params = list(model.parameters())
    assert [sum(torch.equal(p, q) for q in params if q.shape == p.shape) >= 1 for p in params]
    assert all(torch.equal(t, s) for t, s in zip(*pairs(model), strict=True))
    with torch.no_grad():
        model.student[2].bias[4].add_(1)  # on one rank
    assert not torch.equal(model.student[2].bias, model.teacher[2].bias)


@pytest.mark.parametrize("world_size", [2, 3])
def test_equal_of_parameters_of_one_unit(world_size: int) -> None:
    run_ranks(check_finetuning, world_size)
