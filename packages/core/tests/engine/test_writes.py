"""Writes to parameters inside of a forward that is a unit's, as ``training_step`` of Lightning is.

BYOL, MoCo and DINO move a teacher there, each in its own way. The reference is DDP's: one process
with the gradients averaged over all ranks' batches.
"""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable.checkpoint_activation import checkpoint as recompute
from torch.nn import functional as F

from vescale_fsdp import fully_shard, register_fsdp_forward_method, unsharded
from vescale_fsdp.testing import run_ranks

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
        with torch.no_grad():
            self.slow_scale.mul_(0.9).add_(0.1 * self.scale.detach())
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


@pytest.mark.parametrize("sharding", ["ddp", "zero1", "zero2"])
def test_a_gathered_student_and_a_teacher_that_has_not_run(sharding: str) -> None:
    run_ranks(check, 2, MoCo, by_data_in_place, sharding, 2)


class Decays(nn.Linear):
    """Writes to an attribute in each forward, also in evaluation."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.mul_(0.5)
        return super().forward(x)


def compare(model: nn.Module, plain: nn.Module) -> None:
    for name, weight in full_parameters(model).items():
        torch.testing.assert_close(weight, plain.get_parameter(name).detach(), msg=name)


def check_attributes(options: dict[str, Any], recomputes: bool) -> None:
    def make() -> nn.Sequential:
        torch.manual_seed(0)
        model = nn.Sequential(Decays(4, 4), nn.Tanh(), Decays(4, 4))
        if recomputes:  # the forward, and its writes, come again in backward
            for part in model:
                recompute(part)
        return model

    plain, model = make(), make()
    fully_shard(model[0], **options)
    fully_shard(model, **options)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (plain, model)]
    for step in range(3):
        x = torch.full((2, 4), 1.0 + step)
        for each, optimizer in zip((plain, model), optimizers, strict=True):
            each(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                each(x)
        compare(model, plain)  # as an average of weights reads them
        with torch.no_grad():
            for each in (plain, model):
                for param in each.parameters():
                    param.mul_(1.5)  # between passes
                each(x)
        compare(model, plain)


ROWS = [{}, {"reshard_after_forward": False}, *({"sharding": r} for r in ("zero1", "zero2", "ddp"))]


@pytest.mark.parametrize("options", ROWS)
def test_writes_to_attributes_without_autograd_are_kept(options: dict[str, Any]) -> None:
    run_ranks(check_attributes, 2, options, False)


@pytest.mark.parametrize("options", ROWS[:2])
def test_they_are_kept_where_forwards_are_recomputed(options: dict[str, Any]) -> None:
    run_ranks(check_attributes, 2, options, True)


class Normalized(nn.Linear):
    """Weights of length one, as of face recognition. So is the bias: each rank has some of it."""

    def forward(self, x: Tensor) -> Tensor:
        for param in (self.weight, self.bias):
            param.data.copy_(F.normalize(param.data, dim=-1))
        return super().forward(x)


class Assigned(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        for param in (self.weight, self.bias):
            param.data = F.normalize(param.data, dim=-1)
        return super().forward(x)


class DecaysByParameters(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for param in self.parameters():
                param.mul_(0.5)
        return super().forward(x)


def check_data(options: dict[str, Any]) -> None:
    """By ``.data`` of an attribute, where autograd records: the forward computes with it."""
    torch.manual_seed(0)
    for layer_class in (Normalized, Assigned):
        plain = layer_class(4, 4)
        model = fully_shard(copy.deepcopy(plain), **options)
        before = full_parameters(model)
        x = torch.ones(2, 4)
        found = model(x)
        torch.testing.assert_close(found, plain(x))
        found.sum().backward()
        # Where nothing is sharded, a write in place is one to what the optimizer trains.
        if options == {"sharding": "ddp"} and layer_class is Normalized:
            compare(model, plain)
            continue
        for name, weight in full_parameters(model).items():
            assert torch.equal(weight, before[name]), "nothing tells of the write, and it is lost"


@pytest.mark.parametrize("options", ROWS)
def test_writes_to_the_data_of_an_attribute_are_lost(options: dict[str, Any]) -> None:
    # As with FSDP2.
    run_ranks(check_data, 2, options)


def check_told(options: dict[str, Any]) -> None:
    os.environ["VESCALE_FSDP_CHECK_MEMORY"] = "1"
    x = torch.ones(2, 4)
    for layer_class in (Normalized, Assigned):
        model = fully_shard(layer_class(4, 4), **options)
        with pytest.raises(RuntimeError, match="has written to the data of 'weight', 'bias'"):
            model(x).sum().backward()
    for layer_class in (nn.Linear, Decays, DecaysByParameters):
        model = fully_shard(layer_class(4, 4), **options)
        for _ in range(2):
            model(x).sum().backward()


@pytest.mark.parametrize("options", ROWS)
def test_a_check_of_memory_tells_of_them(options: dict[str, Any]) -> None:
    run_ranks(check_told, 2, options)


def check_by_hand(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    model = fully_shard(copy.deepcopy(plain), **options)
    for each in (plain, model):
        with unsharded(each, writeback=True) if each is model else contextlib.nullcontext():
            for param in each[0].parameters():
                param.data = param.data * 0.5
            vector = nn.utils.parameters_to_vector(each[1].parameters())
            nn.utils.vector_to_parameters(vector.detach() + 1, each[1].parameters())
    compare(model, plain)
    refused = pytest.raises(RuntimeError, match=r"'1\.weight' was replaced by another one inside")
    with refused, unsharded(model, writeback=True):
        model[1].weight = nn.Parameter(torch.zeros(2, 4))
    compare(model, plain)
    refused = pytest.raises(RuntimeError, match=r"Linear got the parameters \['other'\]")
    with refused, unsharded(model, writeback=True):
        model[1].other = nn.Parameter(torch.zeros(2, 4))
    del model[1].other
    misfits = pytest.raises(ValueError, match=r"was given data of shape \(3,\)")
    with misfits, unsharded(model, writeback=True):
        model[1].bias.data = torch.zeros(3)


@pytest.mark.parametrize("options", ROWS)
def test_changes_by_hand_are_kept_or_refused(options: dict[str, Any]) -> None:
    run_ranks(check_by_hand, 2, options)
