"""Element-wise operators: they run on the local parts, and the layout of the result is known.

Element i of each result depends on element i of each argument only, so nothing is communicated
where all give each rank the same elements.
Ragged arguments that are split differently are redistributed first: to the layout of what is
written, else of the first of them; those of another shape are gathered. File `mixing` says what
else may stand beside them. Lists (``foreach``, ``fused``) are matched position by position, and a
position without a ragged tensor goes to torch's own dispatch. A write to a tensor that all ranks
have (a state of ``grad.new_zeros(rows, 1)``) gathers the ragged arguments.

Optimizers call these for thousands of tensors in each step: tensors of a list that share a spec
object are matched by its identity. Those of one tensor take a shorter way (file `dispatch`).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate

from vescale_fsdp.compat import DTensorSpec, pytree
from vescale_fsdp.ragged.gathered import run_gathered, whole
from vescale_fsdp.ragged.mixing import (
    CutDifferentlyError,
    broadcasts_to,
    check_linear,
    cut_differently,
    keep_layout,
    local_beside,
    local_of_ragged,
    may_move,
    start_move,
    wider,
)
from vescale_fsdp.ragged.moves import InFlight
from vescale_fsdp.ragged.recuts import respecified_as, same_layout
from vescale_fsdp.ragged.reduced import as_reduced, is_unsharded
from vescale_fsdp.ragged.tensor import RaggedTensor, wrap_local
from vescale_fsdp.ragged.whole import Access, access_of

_OF_STATES = (  # whose step is the first to see them: torch loads states as they are
    ". If it is the state of an optimizer, optimizer.load_state_dict has loaded whole states: load "
    "them by vescale_fsdp.checkpoint.full.load_optimizer(model, optimizer, states), which gives "
    "each rank its part"
)


def run_elementwise(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an element-wise operator on the local parts and wrap what comes out.

    Raises:
        ValueError: the arguments do not mix.
        NotImplementedError: an argument is partial, and the operator is not linear.
    """
    access = access_of(func)
    # It describes the global tensor, and means nothing for a flat local part.
    kwargs.pop("memory_format", None)
    try:
        operands = _Operands(func, access, args, kwargs)
    except CutDifferentlyError:  # known before anything is sent, on all ranks
        written = access.written(args, kwargs)
        shards = [each for each in (*args, *kwargs.values()) if isinstance(each, RaggedTensor)]
        are_alike = len({each.shape for each in shards}) == 1  # but partial, or on other meshes
        is_enlarged = any(each.shape != _shape_of(args) for each in written)
        if access.has_lists or are_alike or is_enlarged:
            raise
        return _run_beside_whole(func, args, kwargs)
    if operands.single is not None and not access.writes and _enlarges(args, operands.single):
        return run_gathered(func, args, kwargs)
    written = access.written(args, kwargs)
    positions = operands.but_outside(written)
    if any(spec is None for spec in positions):
        return _split(func, access, args, kwargs, positions)
    if operands.single is not None and _are_outside(written, operands.single):
        return _run_on_whole(func, args, kwargs)
    operands.check(args, kwargs)
    if access.has_out and not access.has_lists:
        _check_out(func, args, kwargs)
    local_args = [operands.local(arg) for arg in args]
    local_kwargs = {key: operands.local(value) for key, value in kwargs.items()}
    if access.writes:
        _count_writes(access, local_args, local_kwargs)
    if access.has_out and not any(isinstance(arg, RaggedTensor) for arg in args):
        return _write_number(func, kwargs, local_args, local_kwargs)
    result = func(*local_args, **local_kwargs)
    if access.writes:
        return access.returned(args, kwargs)
    return operands.wrap(result)


def _enlarges(args: Sequence[Any], spec: DTensorSpec) -> bool:
    """Whether the result has more elements than the ragged arguments, because of another one."""
    return any(
        isinstance(arg, DTensor)
        and not isinstance(arg, RaggedTensor)
        and is_unsharded(arg)
        and arg.numel() > 1
        and not broadcasts_to(arg.shape, spec.shape)
        for arg in args
    )


def _shape_of(args: Sequence[Any]) -> torch.Size:
    """The shape of the result of an element-wise operator."""
    shapes = [arg.shape for arg in args if isinstance(arg, torch.Tensor)]
    return torch.Size(torch.broadcast_shapes(*shapes))


def _run_beside_whole(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator on ragged tensors of several shapes: smaller ones are gathered.

    Where the result is larger than each of them (a column times a row), all are.
    """
    kept = _shape_of(args)
    operands = (*args, *kwargs.values())
    if not any(isinstance(arg, RaggedTensor) and arg.shape == kept for arg in operands):
        return run_gathered(func, args, kwargs)

    def beside(arg: Any) -> Any:
        is_smaller = isinstance(arg, RaggedTensor) and arg.shape != kept
        return whole(func, arg) if is_smaller else arg

    others = {key: beside(value) for key, value in kwargs.items()}
    return run_elementwise(func, tuple(map(beside, args)), others)


def _write_number(
    func: Any, kwargs: dict[str, Any], local_args: Any, local_kwargs: dict[str, Any]
) -> Any:
    """Run ``torch.mul(x, y, out=ragged)``, where x and y are single numbers.

    Torch would give a part without elements the shape of the numbers.
    """
    local = local_kwargs["out"]
    number = func(*local_args, **{**local_kwargs, "out": local.new_empty(0)})
    local.copy_(number.expand_as(local))
    return kwargs["out"]


def _check_out(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Raise if ``out=`` has another shape than the result, which torch would give to it."""
    out = kwargs.get("out")
    if isinstance(out, torch.Tensor) and out.shape != _shape_of(args):
        raise ValueError(
            f"{func} would change the shape of a RaggedTensor from {tuple(out.shape)} to "
            f"{tuple(_shape_of(args))}: `out` has to have the shape of the result"
        )


def _are_outside(written: Sequence[Any], spec: DTensorSpec) -> bool:
    """Whether all ranks have what is written to; or it is plain, and takes a single element."""
    takes_number = math.prod(spec.shape) == 1
    are_outside = [
        _is_outside(each) or (takes_number and isinstance(each, torch.Tensor) and _is_plain(each))
        for each in written
    ]
    return bool(written) and all(are_outside)


def _is_plain(tensor: torch.Tensor) -> bool:
    return not isinstance(tensor, DTensor)


def _is_outside(tensor: Any) -> bool:
    is_ragged = isinstance(tensor, RaggedTensor)
    return isinstance(tensor, DTensor) and not is_ragged and is_unsharded(tensor)


def _run_on_whole(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator that writes to tensors that are not ragged: on all elements of the others.

    Cost: an all-gather of each ragged argument.
    """
    with torch.no_grad():  # autograd has been here
        args, kwargs = pytree.tree_map(lambda arg: whole(func, arg), (args, kwargs))
        return func(*args, **kwargs)


def run_new(func: Any, x: RaggedTensor, size: Sequence[int], *args: Any, **kwargs: Any) -> Any:
    """``x.new_zeros(x.shape)`` and the like, which autograd calls: like ``zeros_like(x)``.

    Of another shape it is a replicated DTensor, as of any DTensor: there is no layout for it.
    """
    local = x._local_tensor
    if tuple(size) != tuple(x.shape):
        whole = func(local, size, *args, **kwargs)
        replicated = [Replicate()] * x.device_mesh.ndim
        return as_reduced(DTensor.from_local(whole, x.device_mesh, replicated, run_check=False))
    if func is torch.ops.aten.new_empty_strided.default:  # a ragged tensor is always row-major
        args = ((1,), *args[1:])
    made = func(local, local.shape, *args, **kwargs)
    return wrap_local(made, respecified_as(x._spec, dtype=made.dtype), False)


def _count_writes(access: Access, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Raise the version of each local tensor that an operator writes to: the engine reads it.

    Below autograd torch does not raise it. What shares memory by a view, by ``detach()`` or by
    ``.data`` shares the version, too.
    """
    for i, name in access.positions[: access.num_counted]:
        arg = args[i] if i < len(args) else kwargs.get(name)
        if arg is not None:
            torch.autograd.graph.increment_version((arg,) if isinstance(arg, torch.Tensor) else arg)


def _is_tensor_list(arg: Any) -> bool:
    return isinstance(arg, list | tuple) and bool(arg) and isinstance(arg[0], torch.Tensor)


class _Operands:
    """The layouts of the arguments: of those outside lists, and of each position of the lists."""

    def __init__(
        self, func: Any, access: Access, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self.func, self.access = func, access
        self.single: DTensorSpec | None = None
        self.positions: Sequence[DTensorSpec | None] = []
        self._specs: dict[int, Sequence[DTensorSpec | None]] = {}  # by list, its id
        self._alike: dict[int, bool] = {}  # by list: see `_is_alike`
        self._differ = False  # whether ragged ones are cut differently, so that some must move
        # What is written decides on the layout: it is the first argument, or passed as ``out``.
        ordered = (*kwargs.values(), *args) if access.has_out else (*args, *kwargs.values())
        for arg in ordered:
            if isinstance(arg, RaggedTensor):
                self.single = self._joined(self.single, arg._spec)
            elif _is_tensor_list(arg):
                specs = [item._spec if isinstance(item, RaggedTensor) else None for item in arg]
                self._specs[id(arg)] = specs
                self._join_list(specs)
        if access.has_lists and self.single is not None:
            raise ValueError(
                f"{func} got a RaggedTensor where it takes one number for all tensors of a list; "
                "not every rank has it: use `.full_tensor()`"
            )

    def _join_list(self, specs: Sequence[DTensorSpec | None]) -> None:
        if not self.positions:
            self.positions = specs
        elif len(self.positions) != len(specs):
            raise ValueError(
                f"{self.func} got lists of {len(self.positions)} and of {len(specs)} tensors"
            )
        elif any(specs) and not all(map(operator.is_, self.positions, specs)):
            both = zip(self.positions, specs, strict=True)
            self.positions = [self._joined(a, b) for a, b in both]

    def _is_alike(self, arg: Sequence[Any]) -> bool:
        """Whether all tensors of a list are ragged and have the very specs of their positions."""
        alike = self._alike.get(id(arg))
        if alike is None:
            alike = all(map(operator.is_, self._specs[id(arg)], self.positions))
            self._alike[id(arg)] = alike
        return alike

    def _joined(self, known: DTensorSpec | None, new: DTensorSpec | None) -> DTensorSpec | None:
        if known is None or new is None or known is new:
            return known or new
        both = wider(known, new)
        if both is None and may_move(new, known):
            self._differ = True
            return known
        if both is None:
            raise cut_differently(self.func, known, new)
        return both

    def but_outside(self, written: Sequence[Any]) -> Sequence[DTensorSpec | None]:
        """The positions, None where a tensor is written to that all ranks have."""
        positions = self.positions
        for arg in written:
            if _is_tensor_list(arg) and not self._is_alike(arg):
                pairs = zip(arg, positions, strict=True)
                positions = [None if _is_outside(item) else spec for item, spec in pairs]
        return positions

    def check(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raises if the operator may not run on tensors of these layouts."""
        for i, name in self.access.positions:
            self._check_written(args[i] if i < len(args) else kwargs.get(name))
        specs = [self.single] if self.single is not None else self.positions
        # On a mesh of one axis there is no other axis: most calls end here.
        others = [spec for spec in specs if spec is not None and len(spec.placements) > 1]
        if others:
            check_linear(self.func, args, kwargs, others)

    def _check_written(self, arg: Any) -> None:
        if isinstance(arg, torch.Tensor):
            pairs = [(arg, self.single)]
        elif _is_tensor_list(arg) and not self._is_alike(arg):
            pairs = list(zip(arg, self.positions, strict=True))
        else:
            return
        for tensor, spec in pairs:
            if spec is None:
                continue
            if self.access.is_fused and _is_plain(tensor) and not tensor.dim():
                continue  # a counter of steps, which each rank has
            if isinstance(tensor, RaggedTensor) and tensor.shape == spec.shape:
                if self._differ and not same_layout(tensor._spec, spec):
                    raise cut_differently(self.func, spec, tensor._spec)
                continue
            found = getattr(tensor, "placements", "a plain tensor")
            raise ValueError(
                f"{self.func} would write a RaggedTensor of shape {tuple(spec.shape)} into {found} "
                f"of shape {tuple(tensor.shape)}; use `.full_tensor()` on the ragged one"
                f"{_OF_STATES}"
            )

    def local(self, arg: Any) -> Any:
        """What the operator gets on this rank for an argument."""
        if isinstance(arg, torch.Tensor):
            local = self._local(arg, self.single)
            return _arrived(local) if self._differ else local
        if not _is_tensor_list(arg):
            return arg
        if self._is_alike(arg):
            return [item._local_tensor for item in arg]
        if self.access.has_lists and _are_numbers(arg):  # as `local_beside` returns them
            return arg
        # All moves are under way before the first is waited for.
        found = [self._local(item, at) for item, at in zip(arg, self.positions, strict=True)]
        return [_arrived(each) for each in found] if self._differ else found

    def _local(self, tensor: torch.Tensor, spec: DTensorSpec | None) -> torch.Tensor | InFlight:
        in_list = self.access.has_lists
        if spec is None:  # one number for all tensors of a list
            spec = next(known for known in self.positions if known is not None)
        if isinstance(tensor, RaggedTensor):
            if not self._differ or tensor.shape != spec.shape:
                return local_of_ragged(tensor, spec)
            keep_layout(tensor)  # its gradient may come in the layout of the others
            return start_move(self.func, tensor, spec)
        if tensor.requires_grad:
            keep_layout(tensor)
        return local_beside(self.func, tensor, spec, in_list)

    def wrap(self, result: Any) -> Any:
        """The results as tensors of the layouts of the arguments."""
        if isinstance(result, torch.Tensor):
            assert self.single is not None, "a ragged argument brought us here"
            return _wrap(result, self.single)
        if isinstance(result, list | tuple) and result and isinstance(result[0], torch.Tensor):
            specs = self.positions or [self.single] * len(result)
            return type(result)(_wrap(r, spec) for r, spec in zip(result, specs, strict=True))
        return result


def _are_numbers(items: Sequence[Any]) -> bool:
    kinds = set(map(type, items))
    return kinds == {torch.Tensor} and not any(t.dim() or t.requires_grad for t in items)


def _arrived(local: torch.Tensor | InFlight) -> torch.Tensor:
    return local.wait() if isinstance(local, InFlight) else local


def _wrap(local: torch.Tensor, spec: DTensorSpec | None) -> torch.Tensor:
    assert spec is not None, "positions without a ragged tensor went another way"
    meta = spec.tensor_meta
    assert meta is not None, "specs of ragged tensors are made with their meta"
    if meta.dtype != local.dtype:
        spec = respecified_as(spec, dtype=local.dtype)
    return wrap_local(local, spec, False)


def _split(
    func: Any,
    access: Access,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    positions: Sequence[DTensorSpec | None],
) -> Any:
    """Run a list operator apart for positions with ragged tensors, DTensors and plain tensors."""
    ragged = [i for i, spec in enumerate(positions) if spec is not None]
    others = [i for i, spec in enumerate(positions) if spec is None]
    lists = [arg for arg in (*args, *kwargs.values()) if _is_tensor_list(arg)]
    # torch refuses lists that mix plain tensors and DTensors.
    are_dtensors = [i for i in others if any(isinstance(arg[i], DTensor) for arg in lists)]
    are_plain = [i for i in others if i not in set(are_dtensors)]

    def at(arg: Any, indices: list[int]) -> Any:
        is_list = isinstance(arg, list | tuple) and len(arg) == len(positions)
        return [arg[i] for i in indices] if is_list else arg

    merged: list[Any] = [None] * len(positions)
    for indices in (ragged, are_dtensors, are_plain):
        if not indices:
            continue
        part_args = tuple(at(arg, indices) for arg in args)
        part_kwargs = {key: at(value, indices) for key, value in kwargs.items()}
        if indices is ragged:
            results = run_elementwise(func, part_args, part_kwargs)
        else:
            results = _run_on_whole(func, part_args, part_kwargs)
        for i, result in zip(indices, results or (), strict=False):
            merged[i] = result
    return access.returned(args, kwargs) if access.writes else merged
