"""Runs a program on ranks, and beside them one process that plays all ranks.

That process has the plain model. For each rank in turn it runs forward and backward, and then
averages the gradients as DDP does: none if no rank has one, zeros for a rank that has none. Losses,
gradients and weights are compared after every step.
"""

from __future__ import annotations

import copy
import os
import re
import tempfile
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from vescale_fsdp import checkpoint, clip_grad_norm_, unsharded
from vescale_fsdp.engine import remesh
from vescale_fsdp.testing import RankError, run_ranks
from vescale_fsdp.testing.nccl import nccl_group

from .cases import Case, Step
from .drawing import draw
from .habits import CLIPS, Habits
from .programs import program_of

__all__ = ["REFUSED", "Failure", "Invalid", "check", "drawn"]

Record = list[tuple[str, Tensor | None]]
BATCH = 2


class Invalid(Exception):
    """The plain model cannot run the case either."""


REFUSED = "refused"
# A backward raises after units that one of the ranks has left out.
_REFUSED = "an exception has ended a step"


@dataclass(frozen=True)
class Failure:
    """What was wrong.

    Attributes:
        kind: "hang", "died", "refused" (by name, on every rank, as the docs say), the beginning of
            an exception, or what differs ("loss", "weight").
        text: stacks of all ranks, or the values.
    """

    kind: str
    text: str

    def __str__(self) -> str:
        return f"{self.kind}\n{self.text}"


def drawn(seed: int, world_size: int | None = None) -> Case:
    """The case of a seed: the first of its draws that the plain model can run."""
    for draft in count(1000 * seed):
        case = draw(draft, world_size)
        try:
            program = program_of(case)
            _on_plain(program, case.world_size)
        except Invalid:
            continue
        return case
    raise AssertionError("there is no end to the drafts")


def check(program: str, timeout_s: float = 60, device: str = "cpu") -> Failure | None:
    """Run a program; what was wrong, if anything.

    Args:
        device: of the ranks: "cpu", or "cuda" with NCCL.

    Raises:
        Invalid: the plain model cannot run it.
    """
    world_size, tolerance = _settings(program)
    expected = _on_plain(program, world_size)
    os.environ.setdefault("VESCALE_FSDP_TIMEOUT_S", str(timeout_s / 2))
    try:
        found = run_ranks(_on_rank, world_size, program, device, timeout_s=timeout_s)
    except RankError as error:
        names = {"RankHung": "hang", "RankDied": "died"}
        first = names.get(error.type_name)
        beginning = re.sub(r"rank \d+|[\d.]+", "N", error.message)[:24]
        kind = first or f"{error.type_name}: {beginning}"
        is_told = all(each.type_name == "RankMismatchError" for each in error.failures)
        if is_told and any(_REFUSED in each.message for each in error.failures):
            kind = REFUSED
        ranks = [f"rank {each.rank}: {each.type_name}: {each.message}" for each in error.failures]
        return Failure(kind, "\n".join([*ranks, str(error)]))
    for rank, record in enumerate(found):
        failure = _compared(rank, record, expected[rank], tolerance)
        if failure is not None:
            return failure
    return None


def _settings(program: str) -> tuple[int, float]:
    space = _executed(program)
    return space["WORLD_SIZE"], space["TOLERANCE"]


def _executed(program: str) -> dict[str, Any]:
    space: dict[str, Any] = {"__name__": "case"}
    exec(compile(program, "<case>", "exec", dont_inherit=True), space)
    space["STEPS"] = [Step(**step) for step in space["STEPS"]]
    # Whether the graph of each rank has all parameters that are used on any.
    shows = "now.rank" not in program and "use_reentrant=True" not in program
    space["SHOWS_PARAMETERS"], space["CASTS_OUTPUTS"] = shows, "output_dtype" in program
    return space


def _on_plain(program: str, world_size: int) -> list[Record]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return _Plain(_executed(program), range(world_size)).play()
    except Exception as error:
        raise Invalid("".join(traceback.format_exception(error))) from error
    finally:
        torch.set_num_threads(threads)


def _on_rank(program: str, device: str) -> Record:
    with warnings.catch_warnings(), nccl_group() if device == "cuda" else nullcontext():
        warnings.simplefilter("ignore")
        return _Sharded(_executed(program), [dist.get_rank()], device).play()[0]


def _compared(rank: int, record: Record, expected: Record, tolerance: float) -> Failure | None:
    for (label, value), (name, other) in zip(record, expected, strict=False):
        kind = label.split(":")[0]
        where = f"rank {rank}, {label}"
        if label != name:
            return Failure("record", f"{where}: expected {name}")
        if value is None or other is None:
            if value is not other:
                return Failure(f"{kind}-none", f"{where}:\n{value}\nexpected {other}")
            continue
        if value.shape != other.shape:
            return Failure("shape", f"{where}: {value.shape}, expected {other.shape}")
        difference = (value.double() - other.double()).abs()
        allowed = tolerance + tolerance * other.double().abs()
        if not bool((difference <= allowed).all()):  # NaN is a difference
            return Failure(kind, f"{where}:\n{value}\nexpected\n{other}")
    if len(record) != len(expected):
        return Failure("record", f"rank {rank}: {len(record)} values, expected {len(expected)}")
    return None


class _Player(Habits):
    """Plays the steps of a program for some ranks, and writes down what can be compared."""

    def __init__(self, space: dict[str, Any], ranks: Any, device: str = "cpu") -> None:
        self.space, self.now, self.device = space, space["now"], device
        self.ranks = list(ranks)
        self.model = self.made()
        self.records: dict[int, Record] = {rank: [] for rank in self.ranks}
        # Once: a root that is gathered between two passes shows others.
        self.named = dict(self.model.named_parameters())
        self.optimizer = self.made_optimizer(list(self.named.values()))
        self.hooked: dict[str, Tensor] = {}  # sums of what backward hooks have seen in a pass
        self.input_is_wanted: bool = space["INPUT_WANTS_GRADIENT"]

    def made_optimizer(self, params: list[nn.Parameter]) -> Any:
        if self.space["OPTIMIZER"] == "sgd":
            return torch.optim.SGD(params, lr=0.05, momentum=0.9, weight_decay=0.01)
        foreach = True if self.space["OPTIMIZER"] == "adamw-foreach" else None
        return torch.optim.AdamW(params, lr=0.01, eps=1e-3, weight_decay=0.1, foreach=foreach)

    def made(self) -> nn.Module:
        raise NotImplementedError

    def play(self) -> list[Record]:
        for number, step in enumerate(self.space["STEPS"]):
            self.now.step = number
            for event, argument in step.before:
                self.label = f"step {number}, {event} {argument}"
                self.happens(event, argument)
            self.label = f"step {number}"
            if step.zeroes:
                self.optimizer.zero_grad(set_to_none=self.space["SET_TO_NONE"])
            if step.fault:
                self.breaks_off(step)
            self.passes(step)
            if step.halves:
                for param in self.named.values():
                    if param.grad is not None:
                        param.grad.mul_(0.5)
            self.write_all("gradient", self.gradients())
            if step.clips:
                self.write("norm", self.clipped(step.clips))
            self.optimizer.step()
            self.write_all("weight", self.weights())
        return [self.records[rank] for rank in self.ranks]

    # Writing down

    def write(self, kind: str, value: Tensor | None, rank: int | None = None) -> None:
        for each in self.ranks if rank is None else [rank]:
            kept = None if value is None else value.detach().clone().cpu()
            self.records[each].append((f"{kind}: {self.label}", kept))

    def write_all(self, kind: str, values: dict[str, Tensor | None]) -> None:
        for name, value in values.items():
            self.write(f"{kind}: {name}", value)

    # Passes

    def run_passes(self, rank: int, step: Step) -> None:
        """All forwards and backwards of a step on one rank."""
        for micro, kind in enumerate(step.passes):
            self.now.micro, self.now.rank = micro, rank
            self.hooked.clear()  # of a step that was broken off
            self.label = f"step {self.now.step}, micro-batch {micro}"
            self.set_sync(not step.syncs_last_only or micro == len(step.passes) - 1)
            name, _, path = kind.partition(" ")
            getattr(self, f"pass_{name}")(rank, *([path] if path else []))
            for where in sorted(self.hooked):
                self.write(f"seen by a hook: {where}", self.hooked[where], rank)

    def loss(self, rank: int, which: int = 0, path: str = "") -> Tensor:
        seed = 1000 * self.now.step + 100 * self.now.micro + 10 * which + rank
        x = torch.randn(
            BATCH,
            self.space["WIDTH"],
            dtype=torch.float64,
            generator=torch.Generator().manual_seed(seed),
        ).to(self.device)
        x.requires_grad_(self.input_is_wanted and torch.is_grad_enabled())
        self.x = x
        out = (self.calls or self.model.get_submodule(path))(x)
        while not isinstance(out, Tensor):
            out = out["y"] if isinstance(out, dict) else out[0]
        loss = out.double().square().mean() + 0.1 * out.double().sum()
        self.write(f"loss: {which}", loss, rank)
        if torch.is_grad_enabled() and not loss.requires_grad:
            raise Invalid("a loss without a graph")
        return loss

    def pass_plain(self, rank: int) -> None:
        self.loss(rank).backward()
        self.write("gradient of the input", self.x.grad, rank)

    def pass_sum(self, rank: int) -> None:
        """Two forwards, one backward."""
        (self.loss(rank) + self.loss(rank, 1)).backward()

    def pass_two(self, rank: int) -> None:
        """Two forwards, two backwards."""
        first, second = self.loss(rank), self.loss(rank, 1)
        first.backward()
        second.backward()

    def pass_crossed(self, rank: int) -> None:
        """Two forwards, two backwards, the last one first."""
        first, second = self.loss(rank), self.loss(rank, 1)
        second.backward()
        first.backward()

    def pass_peek(self, rank: int) -> None:
        """Another forward, without gradients, in between."""
        loss = self.loss(rank)
        with torch.no_grad():
            self.loss(rank, 1)
        loss.backward()

    def pass_retain(self, rank: int) -> None:
        """Two backwards through one graph."""
        loss = self.loss(rank)
        loss.backward(retain_graph=True)
        loss.backward()

    def pass_drop(self, rank: int) -> None:
        """A forward before it that nobody uses."""
        self.loss(rank, 1)
        self.loss(rank).backward()

    def pass_part(self, rank: int, path: str) -> None:
        """A unit by itself."""
        self.loss(rank, 0, path).backward()

    def passes(self, step: Step) -> None:
        raise NotImplementedError

    def fault_of(self, rank: int, step: Step) -> None:
        """Run until all ranks raise. What was written down on the way counts."""
        self.now.fault = tuple(step.fault or ())
        try:
            self.run_passes(rank, step)
        except self.space["Boom"]:
            return
        finally:
            self.now.fault = None
        raise Invalid("the fault was not met")

    def breaks_off(self, step: Step) -> None:
        raise NotImplementedError

    # What the two sides do in their own ways

    def set_sync(self, reduces: bool) -> None:
        pass

    def gradients(self) -> dict[str, Tensor | None]:
        return {name: param.grad for name, param in self.named.items()}

    def weights(self) -> dict[str, Tensor | None]:
        return dict(self.named)

    def clipped(self, whose: str) -> Tensor:
        if whose in CLIPS:
            norm: Tensor = getattr(self, f"clip_{whose.replace(' ', '_')}")()
            return norm
        return torch.nn.utils.clip_grad_norm_(self.named.values(), 0.5)

    # Events

    def happens(self, event: str, argument: str) -> None:
        if event == "remesh":
            self.averaged = None  # it is on the former mesh
        getattr(self, f"event_{event}")(argument)

    def event_eval(self, mode: str, model: nn.Module | None = None) -> None:
        kept = self.model
        self.model = kept if model is None else model
        for rank in self.ranks:
            self.now.rank, self.now.micro = rank, 0
            with getattr(torch, mode)():
                self.loss(rank, 2)
        self.model = kept

    def event_freeze(self, path: str) -> None:
        self._set_requires_grad(path, False)

    def event_unfreeze(self, path: str) -> None:
        self._set_requires_grad(path, True)

    def _set_requires_grad(self, path: str, value: bool) -> None:
        for name, param in self.named.items():
            if f"{name}.".startswith(f"{path}." if path else ""):
                param.requires_grad_(value)

    def event_state_dict(self, _: str) -> None:
        for name, value in self.model.state_dict().items():
            self.write(f"state: {name}", self.whole(value))

    def event_reload(self, _: str) -> None:
        state = {name: value.detach().clone() for name, value in self.model.state_dict().items()}
        with torch.no_grad():
            for value in state.values():
                value.mul_(0.9)
        self.model.load_state_dict(state)

    def event_write(self, _: str) -> None:
        """In place, to the parameters that the optimizer has."""
        with torch.no_grad():
            for param in self.named.values():
                param.mul_(0.9)

    def event_copy(self, _: str) -> None:
        """A copy wants the units resharded (it says so)."""
        self.reshard_all()
        self.event_eval("no_grad", copy.deepcopy(self.model))

    def reshard_all(self) -> None:
        for path, module in self.model.named_modules():
            if hasattr(module, "reset_iter_state"):
                self.event_reshard(path)

    def event_remesh(self, _: str) -> None:
        """The ranks form another world, in another order. Gradients are lost."""
        self.optimizer.zero_grad()

    def event_unshard(self, path: str) -> None:
        pass

    def event_reshard(self, path: str) -> None:
        pass

    def event_unsharded(self, how: str) -> None:
        """Look at all weights, perhaps change them, and run a forward inside."""
        with self.whole_model(writeback=how == "write"), torch.no_grad():
            for name, param in self.model.named_parameters():
                if how == "write":
                    param.mul_(0.9)
                self.write(f"unsharded: {name}", param)
            if how == "run":
                self.event_eval("no_grad")

    def whole_model(self, writeback: bool) -> Any:
        return nullcontext()

    def whole(self, tensor: Tensor) -> Tensor:
        return tensor


class _Plain(_Player):
    def made(self) -> nn.Module:
        model: nn.Module = self.space["build"]()
        return model

    def passes(self, step: Step) -> None:
        found: dict[str, list[Tensor | None]] = {name: [] for name in self.named}
        for rank in self.ranks:
            with self._apart():
                self.run_passes(rank, step)
                for name, param in self.named.items():
                    found[name].append(param.grad)
        for name, grads in found.items():
            there = [grad for grad in grads if grad is not None]
            if there:
                average = sum(there) / len(self.ranks)
                assert isinstance(average, Tensor), "a sum of tensors is one"
                param = self.named[name]
                param.grad = average if param.grad is None else param.grad + average

    @contextmanager
    def _apart(self) -> Iterator[None]:
        """Gradients begin at nothing, and those from before come back."""
        kept = {name: param.grad for name, param in self.named.items()}
        for param in self.named.values():
            param.grad = None
        yield
        for name, param in self.named.items():
            param.grad = kept[name]

    def breaks_off(self, step: Step) -> None:
        for rank in self.ranks:
            with self._apart():
                self.fault_of(rank, step)
        self.optimizer.zero_grad()


class _Sharded(_Player):
    def made(self) -> nn.Module:
        model: nn.Module = self.space["shard"](self.space["build"]().to(self.device))
        return model

    def set_sync(self, reduces: bool) -> None:
        for module in self._roots():
            module.set_requires_gradient_sync(reduces)

    def _roots(self) -> list[Any]:
        found: list[Any] = []
        inside: set[int] = set()
        for module in self.model.modules():
            if hasattr(module, "reset_iter_state") and id(module) not in inside:
                found.append(module)
                inside.update(map(id, module.modules()))
        return found

    def passes(self, step: Step) -> None:
        self.run_passes(self.ranks[0], step)

    def breaks_off(self, step: Step) -> None:
        self.fault_of(self.ranks[0], step)
        for module in self._roots():
            module.reset_iter_state()
        self.optimizer.zero_grad()

    def gradients(self) -> dict[str, Tensor | None]:
        grads = super().gradients()
        there = [grad is not None for grad in grads.values()]
        everywhere: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everywhere, there)
        for name, *flags in zip(grads, *everywhere, strict=True):
            if len(set(flags)) > 1:
                raise RanksDiffer(f"{self.label}: ranks that have a gradient of {name}: {flags}")
        return {name: None if g is None else self.whole(g) for name, g in grads.items()}

    def weights(self) -> dict[str, Tensor | None]:
        return {name: self.whole(param) for name, param in self.named.items()}

    def clipped(self, whose: str) -> Tensor:
        if whose == "ours":
            return clip_grad_norm_(list(self.named.values()), 0.5)
        return self.whole(super().clipped(whose))

    def event_remesh(self, _: str) -> None:
        rank, size = dist.get_rank(), dist.get_world_size()
        made = tempfile.TemporaryDirectory() if rank == 0 else None
        store = dist.TCPStore("127.0.0.1", 0, is_master=True) if rank == 0 else None
        told = [made and made.name, store and store.port]
        dist.broadcast_object_list(told)
        folder, port = f"{told[0]}/saved", told[1]
        checkpoint.save(folder, self.model, self.optimizer)
        backend = dist.get_backend()
        dist.destroy_process_group()
        store = store or dist.TCPStore("127.0.0.1", port)
        dist.init_process_group(backend, store=store, rank=(rank + 1) % size, world_size=size)
        remesh(self.model)
        self.optimizer.state.clear()
        checkpoint.load(folder, self.model, self.optimizer)
        dist.barrier()
        if made is not None:
            made.cleanup()

    def event_unshard(self, path: str) -> None:
        self.model.get_submodule(path).unshard()

    def event_reshard(self, path: str) -> None:
        self.model.get_submodule(path).reshard()

    def whole_model(self, writeback: bool) -> Any:
        return unsharded(self.model, writeback=writeback)

    def whole(self, tensor: Tensor) -> Tensor:
        return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


class RanksDiffer(AssertionError):
    """What has to be the same on all ranks is not."""
