"""Parameters that change between a forward and its backward: an error, as in one process.

FSDP2 calls this unsupported: its backward may read the new values, or those that it has kept. In
one process autograd compares the versions of what it has saved, and raises if the backward needs
one that was written to. Ours does the same for each parameter, however it is sharded.

Two things differ. A write by ``p.data`` is one of those that autograd does not see in one process;
here it is seen. And what an activation checkpoint computes again has the new values, as it has in
one process.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed.fsdp
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from vescale_fsdp import fully_shard
from vescale_fsdp.testing import run_ranks

from .helpers import full_gradients, shard_units

WIDTH = 8
ERROR = "modified by an inplace operation"

Write = Callable[[nn.Module, list[Any]], object]
Found = str | dict[str, Tensor | None]  # the error of a backward, or its gradients


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.b(torch.tanh(self.a(x)))


class Net(nn.Module):
    """Three units, and the head of the root. A backward reads all weights and no bias."""

    def __init__(self, recomputes: bool) -> None:
        super().__init__()
        self.recomputes = recomputes
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recomputes else block(x)
        return self.head(x)


def plain(recomputes: bool = False) -> Any:
    torch.manual_seed(0)
    return Net(recomputes).double()


def sharded(recomputes: bool = False, **options: Any) -> Any:
    model = plain(recomputes)
    shard_units(model, list(model.blocks), **options)
    return model


def data() -> Tensor:
    """The same on each rank, so that the mean of gradients is that of one process."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(6, WIDTH, dtype=torch.float64, generator=generator)


def gradients(model: nn.Module, write: Write | None, prefix: str = "") -> Found:
    """Of a backward before which ``write`` has changed the parameters of these names."""
    model.zero_grad()
    loss = model(data()).square().mean()
    if write is not None:
        write(model, [p for name, p in model.named_parameters() if name.startswith(prefix)])
    try:
        loss.backward()
    except RuntimeError as error:
        return ERROR if ERROR in str(error) else str(error)
    return full_gradients(model)


def assert_same(found: Found, expected: Found, what: str) -> None:
    if isinstance(expected, str) or isinstance(found, str):
        assert found == expected, what
        return
    for name, value in expected.items():
        torch.testing.assert_close(
            found[name], value, msg=lambda text, n=name: f"{what} {n} {text}"
        )


# --- writes ---------------------------------------------------------------------------------------


@torch.no_grad()
def in_place(model: nn.Module, params: list[Any]) -> None:
    for param in params:
        param.mul_(0.5)


@torch.no_grad()
def by_foreach(model: nn.Module, params: list[Any]) -> None:
    torch._foreach_mul_(params, 0.5)


def by_optimizer(model: nn.Module, params: list[Any]) -> None:
    optimizer = torch.optim.SGD(params, lr=0.5)
    for param in params:
        param.grad = param.detach().clone()
    optimizer.step()
    optimizer.zero_grad()


@torch.no_grad()
def by_loading(model: nn.Module, params: list[Any]) -> None:
    model.load_state_dict({name: 0.5 * value for name, value in model.state_dict().items()})


def by_data(model: nn.Module, params: list[Any]) -> None:
    for param in params:
        param.data.mul_(0.5)


def by_assignment(model: nn.Module, params: list[Any]) -> None:
    for param in params:
        param.data = param.data * 0.5


SEEN: tuple[Write, ...] = (in_place, by_foreach, by_optimizer, by_loading)
PREFIXES = ("blocks.1.a.weight", "blocks.1.a.bias", "blocks.0", "blocks.2.b", "head", "")
OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "kept": {"reshard_after_forward": False},
    "released": {"reshard_after_forward": True},
    "last ones kept": {"in_flight": 4},
    "zero1": {"sharding": "zero1"},
    "ddp": {"sharding": "ddp"},
}


def check_as_one_process(recomputes: bool) -> None:
    """Of each write, and of each kind of unit: then a step is right again."""
    for name, options in OPTIONS.items():
        model, single = sharded(recomputes, **options), plain(recomputes)
        for write in SEEN:
            for prefix in PREFIXES[-1:] if write is by_loading else PREFIXES:
                what = f"{name}, {write.__name__}, {prefix!r}"
                found = gradients(model, write, prefix)
                assert_same(found, gradients(single, write, prefix), what)
                assert_same(gradients(model, None), gradients(single, None), f"after {what}")


@pytest.mark.parametrize("recomputes", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_a_backward_that_needs_what_was_changed_raises_as_in_one_process(recomputes: bool) -> None:
    run_ranks(check_as_one_process, 2, recomputes)


def check_parts() -> None:
    """Backward gathers from parts of two ranks, which have the values of the forward."""
    model = sharded(reshard_after_forward=2)
    assert isinstance(gradients(model, None), dict)
    for prefix, needs in (("blocks.1.a.bias", False), ("blocks.1", True), ("head", True)):
        assert (gradients(model, in_place, prefix) == ERROR) is needs, prefix
    assert isinstance(gradients(model, None), dict)


def test_parts_that_forward_has_kept() -> None:
    run_ranks(check_parts, 4)


def check_data() -> None:
    for name, options in OPTIONS.items():
        model = sharded(**options)
        for write in (by_data, by_assignment):
            for prefix in PREFIXES:
                expected = gradients(model, None)
                found = gradients(model, write, prefix)
                needs = not prefix.endswith("bias")  # which no backward reads
                assert_same(found, ERROR if needs else expected, f"{name}, {write.__name__}")


def test_writes_to_data_are_seen() -> None:
    """In one process autograd takes the new values, or those of before an assignment."""
    run_ranks(check_data, 2)


# --- two models, and beside FSDP2 -----------------------------------------------------------------


def check_two_models() -> None:
    for make in (plain, *(partial(sharded, **options) for options in OPTIONS.values())):
        generator, critic = (make().blocks[0] for _ in range(2))  # each a model of its own
        optimizer = torch.optim.SGD(critic.parameters(), lr=0.1)
        loss = critic(generator(data())).square().mean()
        for param in critic.parameters():
            param.grad = torch.ones_like(param)
        optimizer.step()
        with pytest.raises(RuntimeError, match=ERROR):
            loss.backward()


def test_a_step_of_another_model_that_the_loss_goes_through() -> None:
    run_ranks(check_two_models, 2)


def check_beside_fsdp2() -> dict[str, list[str]]:
    """What both say of a write to a unit that was resharded, and to one that was not."""
    said: dict[str, list[str]] = {}
    for name, shard in (("fsdp2", torch.distributed.fsdp.fully_shard), ("ours", fully_shard)):
        said[name] = []
        for reshards in (True, False):
            model = plain()
            for part in (*model.blocks, model):
                shard(part, reshard_after_forward=reshards)
            before = gradients(model, None)
            found = gradients(model, in_place, "blocks.1.a.weight")
            is_wrong = found != ERROR and not torch.allclose(
                found["blocks.0.a.weight"], before["blocks.0.a.weight"]
            )
            said[name].append("other gradients" if is_wrong else "an error")
    return said


def test_fsdp2_may_give_other_gradients_without_an_error() -> None:
    expected = {"fsdp2": ["other gradients", "an error"], "ours": ["an error", "an error"]}
    assert run_ranks(check_beside_fsdp2, 2) == [expected] * 2
