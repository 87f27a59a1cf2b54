"""How a file of questions is asked: a table of cases, few starts of ranks, a test for each answer.

A file has ``CASES``, by name, and a function ``answers`` that ranks call. What a case asks is a
function without arguments that raises where the answer is not the wanted one. Most call
`as_one_process`.

Only public names are used, so that another engine could be asked, too. What this one answers
otherwise is listed in each file (``OTHERWISE``): such a case is expected to fail.
"""

from __future__ import annotations

import fnmatch
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from vescale_fsdp.testing import RankError, run_ranks

from ..helpers import full_gradients, full_parameters, shard_units

WIDTH, ROWS, CLASSES = 8, 6, 4
AT_ONCE = 15  # cases that are asked after one start of ranks
# Root and units as they are by default, and with a root that is resharded after its forward, too.
SETTINGS: dict[str, dict[str, Any]] = {
    "": {},
    ", root resharded": {"reshard_after_forward": True},
}

Ask = Callable[[], None]
Run = Callable[[Any, Tensor], Any]  # of a model and the batch, or this rank's part of it
Answers = dict[str, str]  # by name: empty, or what is wrong


@dataclass(frozen=True)
class Case:
    ask: Ask
    otherwise: str = ""  # what the engine answers instead, so that the case is expected to fail
    ranks: int = 2
    is_nightly: bool = False


Cases = dict[str, Case]


def in_settings(name: str, check: Callable[..., None], **options: Any) -> Cases:
    """The case in each of the settings."""
    return {
        f"{name}{suffix}": Case(lambda more=more: check(**options, **more))
        for suffix, more in SETTINGS.items()
    }


def listed(cases: Cases, otherwise: dict[str, str]) -> Cases:
    """The cases, with what the engine answers instead, by names; ``*`` ends any of several."""
    for pattern, reason in otherwise.items():
        names = fnmatch.filter(cases, pattern)
        assert names, f"no case is called {pattern!r}"
        for name in names:
            cases[name] = replace(cases[name], otherwise=reason)
    return cases


def sampled(wanted: int, cases: Cases) -> Cases:
    """So many of the cases run at each change, evenly spread; the others nightly."""
    kept = {number * len(cases) // wanted for number in range(wanted)}
    return {
        name: case if number in kept else replace(case, is_nightly=True)
        for number, (name, case) in enumerate(cases.items())
    }


def named(cases: Cases) -> list[Any]:
    """What ``pytest.mark.parametrize`` takes."""
    found = []
    for name, case in cases.items():
        marks = [pytest.mark.nightly] if case.is_nightly else []
        if case.otherwise:
            marks.append(pytest.mark.xfail(strict=True, reason=case.otherwise))
        found.append(pytest.param(name, marks=marks))
    return found


def answer(cases: Cases, names: Sequence[str]) -> Answers:
    """In a rank: ask the cases of these names."""
    found = {}
    for name in names:
        torch.manual_seed(0)
        try:
            cases[name].ask()
        except (Exception, pytest.fail.Exception):  # noqa: BLE001  # it is the answer
            found[name] = traceback.format_exc()
        else:
            found[name] = ""
        torch._dynamo.reset()
    return found


class Outcomes:
    """What all ranks have answered. A rank that hangs or dies takes only its own case along.

    A start of ranks asks the next `AT_ONCE` cases, so that workers that share a file between them
    ask few of them twice, and a busy machine has time for them.
    """

    def __init__(
        self, request: pytest.FixtureRequest, cases: Cases, answers: Callable[..., Answers]
    ) -> None:
        self.cases, self.answers = cases, answers
        items = [item for item in request.session.items if item.path == request.path]
        params = [item.callspec.params for item in items if hasattr(item, "callspec")]
        self.names = [each["name"] for each in params if each.get("name") in cases]
        self.found: dict[str, list[str]] = {}  # by name, one of each rank

    def check(self, name: str) -> None:
        if name not in self.found:
            later = self.names[self.names.index(name) :]
            ranks = self.cases[name].ranks
            alike = [each for each in later if self.cases[each].ranks == ranks]
            try:
                self.ask(alike[:AT_ONCE], timeout_s=80)
            except RankError:  # then each case has ranks of its own, when it is looked at
                self.found |= {each: [] for each in alike[:AT_ONCE]}
        if not self.found[name]:
            self.ask([name], timeout_s=20)
        for rank, found in enumerate(self.found[name]):
            assert not found, f"rank {rank}: {found}"

    def ask(self, names: Sequence[str], timeout_s: int) -> None:
        ranks = self.cases[names[0]].ranks
        of_ranks = run_ranks(self.answers, ranks, *names, timeout_s=timeout_s)
        self.found |= {name: [answers[name] for answers in of_ranks] for name in names}


# Models and data, in float64: sums in another order differ by less than any mistake does.


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.b(F.gelu(self.a(self.norm(x))))


class Net(nn.Module):
    """Three blocks, which are units, and a head, which is the root's."""

    def __init__(self, block: Callable[[], nn.Module] = Block) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([block() for _ in range(3)])
        self.head = nn.Linear(WIDTH, CLASSES)

    def through(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.through(x))


def blocks_of(model: Any) -> Iterable[nn.Module]:
    return list(model.blocks)


def batch(step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(ROWS, WIDTH, dtype=torch.float64, generator=generator)


def part(whole: Tensor, rank: int | None = None, size: int | None = None) -> Tensor:
    """This rank's rows."""
    rank = dist.get_rank() if rank is None else rank
    return whole.chunk(size or dist.get_world_size())[rank]


def squares(model: Any, x: Tensor) -> Tensor:
    """The loss: a mean over the rows, so that the mean over ranks is that of the whole batch."""
    return model(x).square().mean()


def backward(model: Any, x: Tensor) -> None:
    squares(model, x).backward()


def is_sharded(model: nn.Module) -> bool:
    return any(isinstance(param, DTensor) for param in model.parameters())


def synchronize(model: Any, wanted: bool) -> None:
    """Of a plain model, every backward's gradients are there at once."""
    if is_sharded(model):
        model.set_requires_gradient_sync(wanted)


# Comparison


def made(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make().double()


def pair(
    make: Callable[[], nn.Module] = Net,
    units: Callable[[Any], Iterable[nn.Module]] = blocks_of,
    **options: Any,
) -> tuple[Any, Any]:
    """The same model plain and sharded."""
    plain, sharded = made(make), made(make)
    shard_units(sharded, units(sharded), **options)
    return plain, sharded


def as_one_process(
    make: Callable[[], nn.Module] = Net,
    run: Run = backward,
    *,
    units: Callable[[Any], Iterable[nn.Module]] = blocks_of,
    raises: str = "",
    steps: int = 2,
    rests: bool = True,
    data: Callable[[int], Tensor] = batch,
    **options: Any,
) -> None:
    """Each rank runs on its rows, and one process on all: results, gradients, weights are the same.

    Where one process raises an error with the words ``raises``, ranks raise one of the same type.
    With ``rests``, all parameters are sharded after a step.
    """
    plain, sharded = pair(make, units, **options)
    params = dict(sharded.named_parameters())
    for step in range(steps):
        plain.zero_grad()
        sharded.zero_grad()
        x = data(step)
        if raises:
            with pytest.raises(RuntimeError, match=raises) as caught:
                run(plain, x)
            with pytest.raises(caught.type):
                run(sharded, part(x))
            return
        expected, found = run(plain, x), run(sharded, part(x))
        assert_same(found, of_rank(expected), f"step {step}: result")
        check_models(plain, sharded, f"step {step}")
        for name, param in sharded.named_parameters():
            assert param is params[name], f"{name} is another object than before"
        if rests:
            check_rests(sharded)


def check_models(plain: nn.Module, sharded: nn.Module, when: str = "") -> None:
    """Gradients and weights are the same."""
    gradients = {
        name: None if param.grad is None else param.grad for name, param in plain.named_parameters()
    }
    assert_same(full_gradients(sharded), gradients, f"{when}: gradient")
    assert_same(full_parameters(sharded), dict(plain.named_parameters()), f"{when}: weight")


def check_rests(sharded: nn.Module) -> None:
    """What a module has as an attribute is its sharded parameter."""
    for path, module in sharded.named_modules():
        for name, param in module.named_parameters(recurse=False):
            assert isinstance(param, DTensor), f"{path}.{name} is left unsharded"
            if not isinstance(module, torch.jit.ScriptModule):
                assert getattr(module, name) is param, f"{path}.{name} reads as another tensor"


def of_rank(expected: Any) -> Any:
    """Of the whole batch's results, those of this rank."""
    if isinstance(expected, Tensor):
        return part(expected) if expected.dim() and len(expected) == ROWS else expected
    if isinstance(expected, (list, tuple)):
        return type(expected)(of_rank(each) for each in expected)
    return expected


def assert_same(found: Any, expected: Any, what: str) -> None:
    if isinstance(expected, dict):
        assert list(found) == list(expected), what
        for name, value in expected.items():
            assert_same(found[name], value, f"{what} {name}")
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected), what
        for number, value in enumerate(expected):
            assert_same(found[number], value, f"{what} {number}")
    elif isinstance(expected, Tensor):
        assert found is not None, f"{what} is None"
        torch.testing.assert_close(
            found.detach(),
            expected.detach(),
            rtol=1e-9,
            atol=1e-11,
            msg=lambda text: f"{what}: {text}",
        )
    else:
        assert found == expected, f"{what}: {found}, expected {expected}"
