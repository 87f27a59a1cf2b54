"""Loops that would make replicas differ silently: each is an error, or works."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import vescale_fsdp_elastic as elastic
from vescale_fsdp import RankMismatchError, clip_grad_norm_, fully_shard
from vescale_fsdp.testing import run_ranks

from .test_replicas import WIDTH, Numbers, digest, make_sharded, split


def use(root: Path, replica: int, how: str) -> str:
    """Train a few steps in this way. Returns the error, or a digest."""
    model, optimizer = make_sharded(0)
    if how == "unfreezes":
        model[0].requires_grad_(False)  # type: ignore[index]
    num_replicas = 2 + replica * (how == "another number")
    global_batch = 8 + 4 * replica * (how == "another batch")
    wait_s = 1.0 if how == "another number" else 60.0
    try:
        with elastic.replicas(
            root / "run", model, optimizer, replica=replica, num_replicas=num_replicas,
            timeout_s=5.0, wait_s=wait_s, every_on_disk=None, signals=(),
            memory_directory=root / "memory",
        ) as run:  # fmt: skip
            for step in run.batches(Numbers(), global_batch=global_batch, micro_batch=2, until=5):
                if step.number == 2 and (how == "unfreezes" or (how == "freezes" and replica)):
                    model[0].requires_grad_(how == "unfreezes")  # type: ignore[index]
                batches = list(step) if how.startswith("list") else step
                for x, y in batches:
                    loss = nn.functional.mse_loss(model(x), y)
                    step.backward(loss) if how != "list, own" else loss.backward()
                    if how == "inside" and step.is_last:
                        optimizer.step()
                optimizer.step()
                optimizer.zero_grad()
            return f"{run.present} {digest(model, optimizer)}"
    except (RankMismatchError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"


def mistakes(root: Path, how: str) -> str:
    return use(root, split(root, 1), how)


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("list", "no parameter has a gradient on any replica"),
        ("list, own", "no parameter has a gradient on any replica"),
        ("inside", "an optimizer has made a step before the gradients of step 0 were averaged"),
    ],
)
def test_gradients_that_are_used_too_early_or_made_too_late(
    tmp_path: Path, how: str, text: str
) -> None:
    for result in run_ranks(mistakes, 2, tmp_path, how):
        assert text in result


def test_backward_after_the_exchange(tmp_path: Path) -> None:
    (text,) = run_ranks(late, 1, tmp_path)
    assert "at whose end the gradients were averaged" in text


def late(root: Path) -> str:
    model, optimizer = make_sharded(0)
    with elastic.replicas(
        root / "run", model, optimizer, replica=0, num_replicas=1, every_on_disk=None, signals=(),
        memory_directory=root / "memory",
    ) as run:  # fmt: skip
        for step in run.batches(Numbers(), global_batch=8, until=1):
            for x, _y in step:
                step.backward(model(x).sum())
            with pytest.raises(RuntimeError) as caught:
                step.backward(model(x).sum())
            optimizer.step()
    return str(caught.value)


def test_parameters_that_are_unfrozen_are_averaged(tmp_path: Path) -> None:
    first, second = run_ranks(mistakes, 2, tmp_path, "unfreezes")
    assert first == second
    assert first.startswith("(0, 1)")


def test_a_replica_that_freezes_alone_ends(tmp_path: Path) -> None:
    first, second = run_ranks(mistakes, 2, tmp_path, "freezes")
    assert first.startswith("(0,)")
    assert "replica 1 has steps of 8 samples and 5 trainable parameters; the other" in second
    assert "8 samples and 7 trainable parameters" in second


def test_a_replica_with_another_global_batch_ends(tmp_path: Path) -> None:
    first, second = run_ranks(mistakes, 2, tmp_path, "another batch")
    assert first.startswith("(0,)")
    assert "replica 1 has steps of 12 samples" in second
    assert "the other replicas have steps of 8 samples" in second


def test_a_replica_with_another_num_replicas_ends(tmp_path: Path) -> None:
    first, second = run_ranks(mistakes, 2, tmp_path, "another number")
    assert first.startswith("(0,)")
    assert "started with num_replicas=3, and replica 0 with num_replicas=2" in second


class Experts(nn.Module):
    """A step uses some of its experts."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 32)
        self.experts = nn.ModuleList([nn.Linear(32, 32) for _ in range(8)])
        self.last = nn.Linear(32, 1)

    def forward(self, x: torch.Tensor, which: list[int]) -> torch.Tensor:
        x = self.first(x)
        for number in which:
            x = x + self.experts[number](x).tanh()
        return self.last(x)  # type: ignore[no-any-return]


def some_experts(root: Path) -> list[float]:
    replica = split(root, 1)
    torch.manual_seed(0)
    model = fully_shard(Experts())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    norms = []
    with elastic.replicas(
        root / "run", model, optimizer, replica=replica, num_replicas=2, every_on_disk=None,
        signals=(), memory_directory=root / "memory",
    ) as run:  # fmt: skip
        for step in run.batches(Numbers(), global_batch=8, until=30):
            order = torch.Generator().manual_seed(step.number * 2 + replica)
            which = torch.randperm(8, generator=order)[:3].tolist()
            for x, y in step:
                step.backward(nn.functional.mse_loss(model(x, which), y))
            norms.append(float(clip_grad_norm_(model.parameters(), 0.01)))
            optimizer.step()
            optimizer.zero_grad()
    return [*norms, *(float(param.to_local().detach().sum()) for param in model.parameters())]


def test_replicas_that_use_other_experts_clip_to_the_same_bits(tmp_path: Path) -> None:
    first, second = run_ranks(some_experts, 2, tmp_path)
    assert first == second


def in_half(root: Path) -> list[list[float]]:
    replica = split(root, 1)
    model = nn.ParameterList([nn.Parameter(torch.zeros(2, dtype=torch.float16)) for _ in range(2)])
    with elastic.replicas(
        root / "run", model, torch.optim.SGD(model.parameters()), replica=replica, num_replicas=2,
        every_on_disk=None, signals=(), memory_directory=root / "memory",
    ) as run:  # fmt: skip
        for param in model:
            param.grad = torch.full((2,), 40_000.0, dtype=torch.float16)
        run.reduce_gradients()
    return [param.grad.tolist() for param in model if param.grad is not None]


def test_a_mean_that_fits_the_dtype_does_not_overflow_before_it_is_divided(tmp_path: Path) -> None:
    assert run_ranks(in_half, 2, tmp_path) == [[[40_000.0] * 2] * 2] * 2
