"""``finalize_backward``: the reduction as an action of its own, beside FSDP2 of torch 2.15."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.checkpoint import checkpoint

import vescale_fsdp
from vescale_fsdp import RankMismatchError
from vescale_fsdp.testing import run_ranks

from .libraries import LIBRARIES, Library, Outcomes, observe_all
from .recorders import Recorder

HAS_IT = hasattr(torch.distributed.fsdp.FSDPModule, "finalize_backward")
WORLD_SIZE, WIDTH = 4, 6
BOTH = ["ours", pytest.param("fsdp2", marks=pytest.mark.skipif(not HAS_IT, reason="torch 2.15"))]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 9, bias=False)
        self.down = nn.Linear(9, WIDTH, bias=False)
        self.frozen = nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.frozen(self.down(torch.tanh(self.up(x))))


class Net(nn.Module):
    """Three blocks, of which the last is used only where ``uses_all``, and a head of the root."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.head = nn.Linear(WIDTH, 2)
        self.uses_all = False

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks if self.uses_all else self.blocks[:2]:
            x = block(x)
        out: Tensor = self.head(x)
        return out


def made(library: Library, **options: Any) -> Any:
    torch.manual_seed(0)
    model = Net()
    return library.shard(model, *model.blocks, **options)


def backward(model: Any, number: int) -> None:
    generator = torch.Generator().manual_seed(10 * number + dist.get_rank())
    model(torch.randn(3, WIDTH, generator=generator)).float().square().sum().backward()


def gradients(model: nn.Module) -> dict[str, Any]:
    """By parameter, those of all ranks together."""
    found = {name: param.grad for name, param in model.named_parameters()}
    return {
        name: None if grad is None else grad.full_tensor().double().tolist()  # type: ignore[attr-defined]
        for name, grad in found.items()
    }


def by_hand(model: Any, first: int, *, async_op: bool, reshards: bool) -> None:
    """Two micro-batches, and then the reduction."""
    model.set_manual_backward_finalization(True)
    model.set_requires_gradient_sync(False)
    model.set_reshard_after_backward(reshards)
    for number in range(first, first + 2):
        backward(model, number)
    model.set_requires_gradient_sync(True)
    model.set_reshard_after_backward(True)
    handle = model.finalize_backward(async_op=async_op)
    assert (handle is not None) == async_op
    if handle is not None:
        if HAS_IT:
            assert isinstance(handle, torch.distributed.fsdp.GradientReductionHandle)
        handle.wait()
        handle.wait()
    model.set_manual_backward_finalization(False)


def at_its_end(model: Any, first: int) -> None:
    """The same, reduced by the last backward."""
    for number in range(first, first + 2):
        model.set_requires_gradient_sync(number == first + 1)
        backward(model, number)


def trained(model: Any, accumulate: Callable[[Any, int], None]) -> list[Any]:
    """The gradients of two steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    seen = []
    for step in range(2):
        model.uses_all = step == 1
        accumulate(model, 2 * step)
        seen.append(gradients(model))
        optimizer.step()
        optimizer.zero_grad()
    return seen


MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
OPTIONS: dict[str, dict[str, Any]] = {
    "": {},
    "kept after forward, bf16": {"reshard_after_forward": False, "mp_policy": MIXED},
    "replicas, bf16": {"mesh": (2, 2), "mp_policy": MIXED},
}
HOW = {"at once, resharded": (False, True), "by a handle, unsharded": (True, False)}
CASES = list(itertools.product(OPTIONS, HOW))


def trains(library: Library) -> dict[Any, Any]:
    """The gradients of each case, and of the same training without manual finalization."""
    seen: dict[Any, Any] = {}
    for name, options in OPTIONS.items():
        sizes = options.get("mesh", (WORLD_SIZE,))
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("replica", "shard")[-len(sizes) :])
        seen[name] = trained(made(library, **options | {"mesh": mesh}), at_its_end)
        for how, (async_op, reshards) in HOW.items():
            accumulate = partial(by_hand, async_op=async_op, reshards=reshards)
            seen[name, how] = trained(made(library, **options | {"mesh": mesh}), accumulate)
    return seen


def mistakes(library: Library) -> list[tuple[str, str]]:
    """The errors of each mistake, in turn."""
    said: list[tuple[str, str]] = []

    def note(call: Callable[[], Any]) -> None:
        try:
            call()
        except RuntimeError as error:
            said.append((type(error).__name__, str(error).split("\n")[0]))
        else:
            said.append(("", ""))

    def switch(model: Any, enabled: bool) -> Callable[[], Any]:
        return lambda: model.set_manual_backward_finalization(enabled)

    model = made(library)
    note(model.finalize_backward)  # nothing, before the first forward
    note(lambda: model.finalize_backward(async_op=True).wait())
    backward(model, 0)
    note(switch(model.blocks[0], True))
    note(model.blocks[0].finalize_backward)
    note(model.finalize_backward)
    model.zero_grad()
    switch(model, True)()
    model.set_requires_gradient_sync(False)

    def in_backward(_: Tensor) -> None:
        note(model.finalize_backward)
        note(switch(model, False))

    def watch(_: nn.Module, __: Any, out: Tensor) -> None:
        out.register_hook(in_backward)

    hook = model.blocks[0].register_forward_hook(watch)
    backward(model, 1)
    hook.remove()
    note(switch(model, True))
    note(switch(model, False))
    model.set_requires_gradient_sync(True)
    handle = model.finalize_backward(async_op=True)
    note(model.finalize_backward)
    note(lambda: backward(model, 2))
    handle.wait()
    note(switch(model, False))
    note(switch(model, True))
    # A step that is dropped
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for options in ({}, {"mesh": mesh}):
        model = made(library, **options)
        switch(model, True)()
        model.set_requires_gradient_sync(False)
        backward(model, 3)
        model.set_requires_gradient_sync(True)
        handle = model.finalize_backward(async_op=True)
        model.reset_iter_state()
        note(handle.wait)
        model.zero_grad()
        note(switch(model, False))
        backward(model, 4)
        after = gradients(model)
        other = made(library, **options)
        backward(other, 4)
        said.append(("same", str(after == gradients(other))))
    # Replicas
    model = made(library, mesh=mesh)
    switch(model, True)()
    model.set_requires_gradient_sync(False)
    backward(model, 0)
    model.set_requires_gradient_sync(True)
    model.set_requires_all_reduce(False)
    note(model.finalize_backward)
    # A part that is told to
    model = made(library)
    switch(model.blocks[1], True)()
    note(lambda: backward(model, 0))
    return said


NO_ROOT = " must be called on the root FSDP module"
DROPPED = [
    ("RuntimeError", "This gradient reduction handle was invalidated"),
    ("", ""),
    ("same", "True"),
]
SAID = [
    ("", ""),
    ("", ""),
    ("RuntimeError", f"set_manual_backward_finalization{NO_ROOT}"),
    ("RuntimeError", f"finalize_backward{NO_ROOT}"),
    (
        "RuntimeError",
        "FSDP finalize_backward requires manual backward finalization. Call "
        "set_manual_backward_finalization(True) before forward",
    ),
    ("RuntimeError", "FSDP finalize_backward must be called after backward completes"),
    ("RuntimeError", "set_manual_backward_finalization cannot change mode during backward"),
    ("", ""),
    ("RuntimeError", "set_manual_backward_finalization cannot change mode after backward starts"),
    (
        "RuntimeError",
        "The previous gradient reduction must be waited on before finalizing backward again",
    ),
    ("RuntimeError", "The previous gradient reduction must be waited on before forward"),
    ("", ""),
    ("", ""),
    *DROPPED,
    *DROPPED,
    (
        "RuntimeError",
        "FSDP manual backward finalization requires all-reduce for parameter group ",
    ),
    ("RuntimeError", f"set_manual_backward_finalization{NO_ROOT}"),
]


@pytest.fixture(scope="module")
def outcomes() -> Outcomes:
    return observe_all([trains, mistakes], WORLD_SIZE)


def found_by(outcomes: Outcomes, library: str, function: Callable[[Library], Any]) -> list[Any]:
    """What each rank has returned."""
    found = outcomes[library, function.__name__]
    assert all(kind == "returned" for kind, _ in found), found
    return [value for _, value in found]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("library", BOTH)
def test_it_reduces_what_the_last_backward_would(
    outcomes: Outcomes, library: str, case: tuple[str, str]
) -> None:
    for seen in found_by(outcomes, library, trains):
        assert seen[case] == seen[case[0]]


@pytest.mark.skipif(not HAS_IT, reason="torch 2.15")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_it_gives_the_gradients_of_fsdp2(outcomes: Outcomes, case: tuple[str, str]) -> None:
    ours, fsdp2 = (found_by(outcomes, library, trains)[0][case] for library in ("ours", "fsdp2"))
    for mine, theirs in zip(ours, fsdp2, strict=True):
        assert [name for name in mine if mine[name] is None] == [
            name for name in theirs if theirs[name] is None
        ]
        for name in (each for each in mine if mine[each] is not None):
            one, other = (torch.tensor(each[name]) for each in (mine, theirs))
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize("library", BOTH)
def test_mistakes_are_refused_by_both_in_the_same_words(outcomes: Outcomes, library: str) -> None:
    for said in found_by(outcomes, library, mistakes):
        assert len(said) == len(SAID), said
        for (kind, text), (expected, words) in zip(said, SAID, strict=True):
            assert (kind, text[: len(words)]) == (expected, words)


# Ours alone


def check_cost() -> None:
    model = made(LIBRARIES["ours"])
    model.set_manual_backward_finalization(True)
    for step in range(3):
        backward(model, step)
        with Recorder() as recorder:
            model.finalize_backward()  # the backward has reduced: nothing waits
        assert not recorder.events
        model.set_requires_gradient_sync(False)
        backward(model, step)
        model.set_requires_gradient_sync(True)
        with Recorder() as recorder:
            handle = model.finalize_backward(async_op=True)
            assert all(
                isinstance(block.up.weight, vescale_fsdp.RaggedTensor) for block in model.blocks
            )
            handle.wait()
        assert recorder.count("gathers") == 0
        assert 1 <= recorder.count("reductions") <= 4  # small ones are sent together


def test_it_costs_one_reduction_of_what_waits() -> None:
    run_ranks(check_cost, 2)


class Recomputed(Net):
    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)  # type: ignore[assignment]
        out: Tensor = self.head(x)
        return out


def check_between(options: dict[str, Any]) -> None:
    for kind in (Net, Recomputed):
        loses_nothing(kind, options)


def loses_nothing(kind: type[Net], options: dict[str, Any]) -> None:
    """A finalization between a forward and its backward reduces what waited, and loses nothing."""

    def run(model: Any, number: int, between: Callable[[], object] = lambda: None) -> None:
        x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(number))
        loss = model(x * (1 + dist.get_rank())).square().sum()
        between()
        loss.backward()

    models = []
    for _ in range(2):
        torch.manual_seed(0)
        model = kind()
        models.append(LIBRARIES["ours"].shard(model, *model.blocks, **options))
    ours, other = models
    ours.set_manual_backward_finalization(True)
    for step in range(3):
        for model in models:
            model.uses_all = True
            model.set_requires_gradient_sync(False)
            run(model, step)
        ours.set_requires_gradient_sync(True)
        run(ours, step + 1, ours.finalize_backward)  # reduces its own at its end
        other.set_requires_gradient_sync(True)
        run(other, step + 1)
        for name, one in gradients(ours).items():
            wanted = gradients(other)[name]
            if wanted is None:
                assert one is None
            else:
                torch.testing.assert_close(torch.tensor(one), torch.tensor(wanted), msg=name)
        ours.finalize_backward()
        for model in models:
            model.zero_grad()


@pytest.mark.parametrize(
    "options", [{}, {"reshard_after_forward": False}, {"in_flight": 3}], ids=str
)
def test_between_a_forward_and_its_backward_nothing_is_lost(options: dict[str, Any]) -> None:
    run_ranks(check_between, 2, options)


def leave_out() -> str:
    os.environ["VESCALE_FSDP_TIMEOUT_S"] = "3"
    model = made(LIBRARIES["ours"])
    model.set_manual_backward_finalization(True)
    try:
        for step in range(3):
            model.set_requires_gradient_sync(False)
            backward(model, step)
            model.set_requires_gradient_sync(True)
            if step < 1 or dist.get_rank():
                model.finalize_backward()
    except RankMismatchError as error:
        return str(error)
    return ""


@pytest.mark.usefixtures("each_alone")
def test_a_rank_that_leaves_it_out_is_found() -> None:
    for said in run_ranks(leave_out, 2, timeout_s=40):
        assert "for the reduction of 'blocks.2', in finalization of model 1" in said
        assert "for the gather of the root, in forward of the root of model 1" in said
