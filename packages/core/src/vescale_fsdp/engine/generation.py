"""``generating``: a loop of forwards without gradients on sharded parameters.

A loop of ``generate`` runs the model once a token, and each rank may stop after another number of
tokens. Before each forward of a root, the ranks exchange one number: what they run next, or that
they have left the loop. A rank that has left it runs the same pass without its modules: it joins
the all-gathers that the others need (`vescale_fsdp.program`), and computes nothing.

::

    rank 0      forward  forward  forward  left
    rank 1      forward  left     joins    left
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from types import TracebackType

import torch
import torch.distributed as dist
from torch import nn

from vescale_fsdp import compat, devices
from vescale_fsdp.backends import collective_device
from vescale_fsdp.dbuffer import plain_tensors
from vescale_fsdp.engine import hooks
from vescale_fsdp.engine.agreement import LONG_TIMEOUT_S, exchange
from vescale_fsdp.engine.methods import unsharded
from vescale_fsdp.engine.unit import Unit, units_in
from vescale_fsdp.errors import RankMismatchError

_SHARE = 0.5  # of the free memory, for unsharded parameters: caches and activations need the rest
_LEFT, _FAILED = 0, 1 << 30  # in the place of what a rank runs next


class generating(AbstractContextManager[None]):
    """Context for ``generate`` and other loops of forwards without gradients. Collective.

    ::

        with vescale_fsdp.generating(model):
            tokens = model.generate(**batch)

    If the memory of every rank allows it, all parameters are unsharded once, and the loop needs no
    communication. If not, each forward unshards and reshards its units as in training, with
    prefetch; the parameters of the root itself stay unsharded. Ranks may run different numbers of
    forwards, or none: a rank that leaves the context first takes part in the all-gathers of the
    others until all have left it. No option such as ``synced_gpus`` is needed. Gradients are
    disabled inside.

    Args:
        model: a sharded module, or a module with sharded ones inside.
        max_unsharded_bytes: unshard all parameters if they take at most so many bytes on each rank;
            0 never does. None: half of the free memory of the device; on a CPU, half of this rank's
            share of it (``LOCAL_WORLD_SIZE`` ranks share a machine).

    Cost:
        One round through the store, and then: unsharded once, one all-gather a unit. Unit by unit,
        one all-gather a unit and forward, and one all-reduce of two numbers a forward, which the
        host waits for.

    Raises:
        RuntimeError: a forward or backward of the model is under way.
        RankMismatchError: unit by unit, two ranks run different roots or methods, another rank has
            left the context by an exception, or one did not come in time.
    """

    def __init__(self, model: nn.Module, *, max_unsharded_bytes: int | None = None) -> None:
        self._model, self._limit = model, max_unsharded_bytes
        self._stack = ExitStack()

    def __enter__(self) -> None:
        units = units_in(self._model)
        if any(unit.engine is not None and unit.engine.is_running for unit in units.values()):
            raise RuntimeError(
                "generating(...) was entered while a forward or backward of the model is under "
                "way; enter it between two steps"
            )
        with ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            roots = _outermost(units)
            for root in roots:  # on all ranks now: one may run no forward
                _prepare(root)
            fits = self._fits([*units.values()])
            stack.enter_context(unsharded(self._model) if fits else _Loop(roots))
            self._stack = stack.pop_all()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.__exit__(kind, error, trace)

    def _fits(self, units: list[Unit]) -> bool:
        """Whether every rank may unshard all parameters."""
        groups = [group for unit in units for group in unit.groups]
        if not groups:
            return True
        needed = sum(
            slot.shape.numel() * (group.compute_dtype or slot.sharded.dtype).itemsize
            for group in groups
            for slot in group.slots
        )
        limit = self._limit
        if limit is None:
            limit = int(devices.free_bytes(groups[0].pool.device) * _SHARE)
        answer = exchange(
            "memory for generating",
            str(int(needed <= limit)),
            _ranks_of(units),
            min,
            timeout_s=LONG_TIMEOUT_S,
        )
        return answer == "1"


class _Loop(AbstractContextManager[None]):
    """Forwards unit by unit, any number on each rank.

    Args:
        roots: the outermost units. One is root of an engine, or called by itself.
    """

    def __init__(self, roots: list[Unit]) -> None:
        self._roots = roots
        self._group: dist.ProcessGroup | None = None
        self._device = torch.device("cpu")
        self._is_over = False  # for all ranks, by an error
        self._pinned: AbstractContextManager[None] = contextlib.nullcontext()

    def __enter__(self) -> None:
        modules = [module for root in self._roots for module in root.modules()]
        units = [unit for module in modules for unit in units_in(module).values()]
        group = next(group for unit in units for group in unit.groups)
        self._device = group.pool.device
        self._group = compat.group_over(_ranks_of(units), group.axes.groups[0])
        self._pinned = unsharded(*modules, recurse=False)
        self._pinned.__enter__()
        for root in self._roots:
            root.before_pass = self._before_pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for root in self._roots:
            root.before_pass = None
        try:
            if self._is_over:
                return  # by an error that all ranks know of
            if error is not None:
                with contextlib.suppress(RankMismatchError):  # the one that is raised says more
                    self._exchange(_FAILED)
            else:
                self._join_others()
        finally:
            self._pinned.__exit__(kind, error, trace)

    def _before_pass(self, root: Unit, method: str) -> None:
        """Tell the others what this rank runs next."""
        self._exchange(1 + self._passes().index((root, method)))

    def _join_others(self) -> None:
        """Take part in the all-gathers of the other ranks, until all have left."""
        while code := self._exchange(_LEFT):
            root, method = self._passes()[code - 1]
            (module,) = root.modules()
            try:
                hooks.pre_forward(root, module, (), {}, method)
            finally:
                hooks.post_forward(root, None)

    def _passes(self) -> list[tuple[Unit, str]]:
        """What a rank may run, in the same order on all ranks."""
        return [
            (root, method)
            for root in self._roots
            for method in ("forward", *sorted(root.forward_methods))
        ]

    def _exchange(self, code: int) -> int:
        """What the ranks that are still in the loop run next; 0 if all have left it."""
        assert self._group is not None, "the context was entered"
        device = collective_device(self._group, self._device)
        # The maximum of both: the highest code, and the lowest of those that run something.
        numbers = torch.tensor([code, -code if code else -_FAILED - 1], device=device)
        compat.all_reduce(numbers, self._group, dist.ReduceOp.MAX).wait()
        highest, lowest = numbers.tolist()
        self._is_over = highest == _FAILED or highest not in (0, -lowest)
        if highest == _FAILED:
            raise RankMismatchError(
                "another rank has left generating(...) by an exception; its own traceback says "
                "which. No rank can go on with the loop"
            )
        if self._is_over:
            (one, first), (two, second) = (self._passes()[each - 1] for each in (-lowest, highest))
            raise RankMismatchError(
                f"inside of generating(...) one rank runs {first} of {one.fqn or 'the root'} and "
                f"another one {second} of {two.fqn or 'the root'}. Run the same methods in the "
                "same order on every rank; a rank may run fewer of them"
            )
        return int(highest)


def _prepare(root: Unit) -> None:
    """Do what the first forward after a step would do with the other ranks."""
    if root.engine is None:
        with plain_tensors():
            hooks.make_root(root)
    (module,) = root.modules()
    if root.is_root and root.broadcasts_buffers:
        hooks.send_buffers(root, module)


def _outermost(units: Mapping[str, Unit]) -> list[Unit]:
    """The units, by module name, that are in no other one."""
    above = [f"{name}." for name in units if name]
    if "" in units:
        return [units[""]]
    return [unit for name, unit in units.items() if not name.startswith(tuple(above))]


def _ranks_of(units: Sequence[Unit]) -> list[int]:
    """The ranks of the widest group."""
    return max((group.axes.ranks for unit in units for group in unit.groups), key=len)
