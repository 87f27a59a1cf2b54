"""``generating``: a loop of forwards without gradients on sharded parameters.

A loop of ``generate`` runs the model once a token, and each rank may stop after another number of
tokens. Before each pass, the ranks exchange one number: the unit that they run next, or that they
have left the loop. The first unit in order of definition is next. A rank that has left, or that
runs another one, runs the same pass without its modules: it joins the all-gathers that the others
need (`vescale_fsdp.program`), and computes nothing.

::

    rank 0      forward  forward  forward  joins    left
    rank 1      forward  joins    joins    encoder  left
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
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
_LEFT, _FAILED = 1 << 30, -1  # in the place of the unit that a rank runs next


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
    disabled inside. Unit by unit, and with units on several meshes (experts), all ranks have to
    run the first forward of all.

    Inside of another `generating`, or of `unsharded`, of the same model it does nothing more.

    Args:
        model: a sharded module, or a module with sharded ones inside.
        max_unsharded_bytes: unshard all parameters if they take at most so many bytes on each rank;
            0 never does. None: half of the free memory of the device; on a CPU, half of this rank's
            share of it (``LOCAL_WORLD_SIZE`` ranks share a machine).

    Cost:
        One round through the store, and then: unsharded once, one all-gather a unit. Unit by unit,
        one all-gather a unit and forward, and one all-reduce of a number a forward, which the host
        waits for. Units that are called outside of the root's forward have one each.

    Raises:
        RuntimeError: a forward or backward of the model is under way. Unit by unit, also in a
            forward with gradients.
        RankMismatchError: unit by unit, another rank has left the context by an exception, or one
            did not come in time.
    """

    def __init__(self, model: nn.Module, *, max_unsharded_bytes: int | None = None) -> None:
        self._model, self._limit = model, max_unsharded_bytes
        self._stack = ExitStack()

    def __enter__(self) -> None:
        units = units_in(self._model)
        found = [*units.values()]
        if any(unit.engine is not None and unit.engine.is_running for unit in found):
            raise RuntimeError(
                "generating(...) was entered while a forward or backward of the model is under "
                "way; enter it between two steps"
            )
        with ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            for module in self._model.modules():
                if "_is_fsdp_managed_module" in module.__dict__ and hasattr(module, "generate"):
                    stack.enter_context(_without_synced_gpus(module))
            if not all(unit.engine and (unit.num_pins or unit.before_pass) for unit in found):
                roots = _outermost(units)
                for root in roots:  # on all ranks now: one may run no forward
                    _prepare(root)
                fits = self._fits(found)
                stack.enter_context(unsharded(self._model) if fits else _Loop(roots, found))
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
        units: all of them.
    """

    def __init__(self, roots: list[Unit], units: list[Unit]) -> None:
        self._roots, self._units = roots, units
        self._group: dist.ProcessGroup | None = None
        self._device = torch.device("cpu")
        self._has_failed = False  # a rank, and so the loop is over for all
        self._pinned: AbstractContextManager[None] = contextlib.nullcontext()

    def __enter__(self) -> None:
        group = next(group for unit in self._units for group in unit.groups)
        self._device = group.pool.device
        self._group = compat.group_over(_ranks_of(self._units), group.axes.groups[0])
        modules = [module for root in self._roots for module in root.modules()]
        self._pinned = unsharded(*modules, recurse=False)
        self._pinned.__enter__()
        for unit in self._units:
            unit.before_pass = self._before_pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for unit in self._units:
            unit.before_pass = None
        try:
            if error is None:
                self._join_until(_LEFT)
            elif not self._has_failed:
                with contextlib.suppress(RankMismatchError):  # the one that is raised says more
                    self._exchange(_FAILED)
        finally:
            self._pinned.__exit__(kind, error, trace)

    def _before_pass(self, unit: Unit) -> None:
        """Take part in what other ranks run first."""
        if torch.is_grad_enabled():
            raise RuntimeError(
                "a forward with gradients inside of generating(...), which runs unit by unit here; "
                "run it outside of the context"
            )
        self._join_until(self._units.index(unit))

    def _join_until(self, mine: int) -> None:
        """Take part in the all-gathers of the other ranks, until all have come to ``mine``."""
        while (code := self._exchange(mine)) != mine:
            unit = self._units[code]
            unit.before_pass, before_pass = None, unit.before_pass
            try:
                hooks.pre_forward(unit, unit.modules()[0], (), {})
            finally:
                hooks.post_forward(unit, None)
                unit.before_pass = before_pass

    def _exchange(self, code: int) -> int:
        """What the ranks run next: the lowest of their codes."""
        assert self._group is not None, "the context was entered"
        if not self._has_failed:
            device = collective_device(self._group, self._device)
            number = torch.tensor(code, device=device)
            compat.all_reduce(number, self._group, dist.ReduceOp.MIN).wait()
            code = int(number)
            self._has_failed = code == _FAILED
        if self._has_failed:
            raise RankMismatchError(
                "another rank has left generating(...) by an exception; its own traceback says "
                "which. No rank can go on with the loop"
            )
        return code


@contextlib.contextmanager
def _without_synced_gpus(module: nn.Module) -> Iterator[None]:
    """Within it, transformers does not have ranks that are done run forwards for the others."""
    marks = module.__dict__
    marks["_is_fsdp_managed_module"], before = False, marks["_is_fsdp_managed_module"]
    try:
        yield
    finally:
        marks["_is_fsdp_managed_module"] = before


def _prepare(root: Unit) -> None:
    """Do what the first forward after a step would do with the other ranks."""
    if root.engine is None:
        with plain_tensors():
            hooks.make_root(root)
    if root.is_root and root.broadcasts_buffers:
        (module,) = root.modules()
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
