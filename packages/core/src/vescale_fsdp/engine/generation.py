"""``generating``: a loop of forwards without gradients on sharded parameters.

A loop of ``generate`` runs the model once a token, and ranks may stop after different numbers of
tokens. Before each pass, each rank sends one number: the index of the unit that it runs next, or a
number that says that it has left the loop. The lowest number is next. A rank that has left, or that
will run another unit, joins the all-gathers of this pass (`vescale_fsdp.program`), and computes
nothing.

::

    rank 0      forward  forward  forward  joins    left
    rank 1      forward  joins    joins    encoder  left
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from vescale_fsdp import devices
from vescale_fsdp.backends import collective_device
from vescale_fsdp.dbuffer import plain_tensors
from vescale_fsdp.engine import hooks
from vescale_fsdp.engine.methods import unsharded
from vescale_fsdp.engine.unit import Unit, units_in
from vescale_fsdp.errors import RankMismatchError
from vescale_fsdp.ranks import collectives, limit_s, over

# The part of free memory for unsharded parameters. Caches and activations need the other part.
_SHARE = 0.5
_LEFT, _FAILED = 1 << 30, -1  # sent in place of the index of a unit


class generating(AbstractContextManager[None]):
    """Context for ``generate`` and other loops of forwards without gradients. Collective.

    ::

        with vescale_fsdp.generating(model):
            tokens = model.generate(**batch)

    If the memory of every rank allows it, all parameters are unsharded once, and the loop needs no
    communication. If not, the loop runs unit by unit: each forward unshards and reshards its units
    as in training, with prefetch, and only the root's own parameters stay unsharded. Gradients are
    disabled inside.

    Ranks may run different numbers of forwards, or none. A rank that leaves the context takes part
    in the all-gathers of the others until all have left. No option such as ``synced_gpus`` is
    needed. One exception: if the loop runs unit by unit and units are on several meshes (experts),
    all ranks have to run the model's first forward.

    Inside of another `generating` or `unsharded` of the same model, it only disables gradients.

    Args:
        model: a sharded module, or a module with sharded ones inside.
        max_unsharded_bytes: unshard all parameters if they take at most so many bytes on each rank.
            0: always run unit by unit. None: half of the free memory of the device. On a CPU, the
            free memory is first divided by the ranks of the machine (``LOCAL_WORLD_SIZE``).

    Cost:
        One round through the store. If all parameters fit, one all-gather a unit. Otherwise each
        forward has one all-gather a unit, and one all-reduce of a number, for which the host waits.
        Each unit that is called outside of the root's forward has its own all-reduce.

    Raises:
        RuntimeError: a forward or backward of the model is under way; or the loop runs unit by unit
            and a forward has gradients enabled.
        RankMismatchError: the loop runs unit by unit, and another rank has left the context by an
            exception or did not join in time.
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
                for root in roots:  # now, because some ranks may run no forward
                    _prepare(root)
                fits = self._fits(found)
                stack.enter_context(unsharded(self._model) if fits else _Loop(roots, found))
            self._stack = stack.pop_all()

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)

    def _fits(self, units: list[Unit]) -> bool:
        """Whether every rank has the memory to unshard all parameters."""
        groups = [group for unit in units for group in unit.groups]
        if not groups:
            return True
        needed = sum(
            fsdp_param.shape.numel() * (group.compute_dtype or fsdp_param.sharded.dtype).itemsize
            for group in groups
            for fsdp_param in group.fsdp_params
        )
        limit = self._limit
        if limit is None:
            limit = int(devices.free_bytes(groups[0].pool.device) * _SHARE)
        fits: bool = over(_ranks_of(units)).exchange(
            "memory for generating", needed <= limit, all, timeout_s=limit_s(may_be_late=True)
        )
        return fits


class _Loop(AbstractContextManager[None]):
    """A context in which forwards run unit by unit, any number of them on each rank.

    Args:
        roots: the outermost units. Each is the root of an engine, or is called by itself.
        units: all units of the model.
    """

    def __init__(self, roots: list[Unit], units: list[Unit]) -> None:
        self._roots, self._units = roots, units
        self._group: dist.ProcessGroup | None = None
        self._device = torch.device("cpu")
        self._has_failed = False  # whether a rank has failed, which ends the loop for all
        self._pinned: AbstractContextManager[None] = contextlib.nullcontext()

    def __enter__(self) -> None:
        group = next(group for unit in self._units for group in unit.groups)
        self._device = group.pool.device
        self._group = collectives.group_over(_ranks_of(self._units), group.axes.groups[0])
        modules = [module for root in self._roots for module in root.modules()]
        self._pinned = unsharded(*modules, recurse=False)
        self._pinned.__enter__()
        for unit in self._units:
            unit.before_pass = self._before_pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        for unit in self._units:
            unit.before_pass = None
        try:
            if error is None:
                self._join_until(_LEFT)
            elif not self._has_failed:
                with contextlib.suppress(RankMismatchError):  # `error` says more
                    self._exchange(_FAILED)
        finally:
            self._pinned.__exit__(kind, error, trace)

    def _before_pass(self, unit: Unit) -> None:
        """Take part in the passes that other ranks run before this one."""
        if torch.is_grad_enabled():
            raise RuntimeError(
                "a forward with gradients inside of generating(...), which runs unit by unit here; "
                "run it outside of the context"
            )
        self._join_until(self._units.index(unit))

    def _join_until(self, mine: int) -> None:
        """Take part in the all-gathers of the other ranks, until ``mine`` is the lowest number."""
        while (code := self._exchange(mine)) != mine:
            unit = self._units[code]
            unit.before_pass, before_pass = None, unit.before_pass
            try:
                hooks.pre_forward(unit, unit.modules()[0], (), {})
            finally:
                hooks.post_forward(unit, None)
                unit.before_pass = before_pass

    def _exchange(self, code: int) -> int:
        """The number of the unit that runs next: the lowest of all ranks' numbers."""
        assert self._group is not None, "the context was entered"
        if not self._has_failed:
            device = collective_device(self._group, self._device)
            number = torch.tensor(code, device=device)
            collectives.all_reduce(number, self._group, dist.ReduceOp.MIN).wait()
            code = int(number)
            self._has_failed = code == _FAILED
        if self._has_failed:
            raise RankMismatchError(
                "another rank has left generating(...) by an exception; see the traceback of that "
                "rank. No rank can go on with the loop"
            )
        return code


@contextlib.contextmanager
def _without_synced_gpus(module: nn.Module) -> Iterator[None]:
    """A context in which ``generate`` of transformers does not turn ``synced_gpus`` on."""
    marks = module.__dict__
    marks["_is_fsdp_managed_module"], before = False, marks["_is_fsdp_managed_module"]
    try:
        yield
    finally:
        marks["_is_fsdp_managed_module"] = before


def _prepare(root: Unit) -> None:
    """Do the communication that comes before the first forward: make the root, send buffers."""
    if root.engine is None:
        with plain_tensors():
            hooks.make_root(root)
    if root.is_root and root.broadcasts_buffers:
        (module,) = root.modules()
        hooks.send_buffers(root, module)


def _outermost(units: Mapping[str, Unit]) -> list[Unit]:
    """The units that are inside of no other unit. ``units`` is by module name."""
    above = [f"{name}." for name in units if name]
    if "" in units:
        return [units[""]]
    return [unit for name, unit in units.items() if not name.startswith(tuple(above))]


def _ranks_of(units: Sequence[Unit]) -> list[int]:
    """The ranks of the group with the most ranks."""
    return max((group.axes.ranks for unit in units for group in unit.groups), key=len)
