"""The operands of an operator: the layout in which they meet, and what each is on this rank.

An operator runs on local tensors, so every operand must become one. Where all are whole on every
rank, that is their local tensor. Beside a ragged tensor an element-wise operator takes:

| operand | what becomes of it |
|---|---|
| number, or plain tensor with one element | itself |
| DTensor, replicated on every axis, that broadcasts to the ragged shape | its local elements |
| DTensor, partial, smaller than the ragged tensor (a sum, a norm) | reduced first |
| ragged, broadcasts along unsharded dimensions, to the same shards | repeated locally |
| ragged, of the same shape and mesh, with other shards | redistributed, by one uneven all-to-all |
| all else | ``ValueError`` |

The memory needed is that of local elements, never of the whole tensor. Whether a tensor is
redistributed follows from the placements alone, so all ranks do the same.

Between a backward and its reduction over replicas, a gradient is ``Partial`` on the replica axis
and ragged on the other. It is not redistributed. It takes only operators that commute with a sum:

| operators | condition |
|---|---|
| copies, views, ``zeros_like``, ``zero_`` | none; a cast stays among floating-point types |
| ``mul``, ``div``, ``neg``, and their ``foreach`` forms | the factor is not partial itself |
| ``add``, ``sub``, and their ``foreach`` forms | both tensors are partial in the same way |
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from vescale_fsdp.compat import DTensorSpec, TensorMeta
from vescale_fsdp.ragged.access import Access
from vescale_fsdp.ragged.gradients import keep_layout
from vescale_fsdp.ragged.moves import InFlight, done, move
from vescale_fsdp.ragged.recuts import rescaled, reshaped, respecified_as, same_layout, sizes_here
from vescale_fsdp.ragged.replicated import wrap_replicated
from vescale_fsdp.ragged.tensor import RaggedTensor, local_part, wrap_local

aten = torch.ops.aten

_COPIES = {
    aten._to_copy.default,
    aten.alias.default,
    aten.clone.default,
    aten.copy_.default,
    aten.detach.default,
    aten.empty_like.default,
    aten.zero_.default,
    aten.zeros_like.default,
    aten._foreach_copy_.default,
    aten._foreach_zero_.default,
}
_SCALES = {"mul", "mul_", "_foreach_mul", "_foreach_mul_"}
_DIVIDES = {"div", "div_", "neg", "neg_"}
_DIVIDES |= {"_foreach_div", "_foreach_div_", "_foreach_neg", "_foreach_neg_"}
_ADDS = {"add", "add_", "sub", "sub_"}
_ADDS |= {"_foreach_add", "_foreach_add_", "_foreach_sub", "_foreach_sub_"}

_OF_STATES = (  # whose step is the first to see them: torch loads states as they are
    ". If it is the state of an optimizer, optimizer.load_state_dict has loaded whole states: load "
    "them by vescale_fsdp.checkpoint.full.load_optimizer(model, optimizer, states), which gives "
    "each rank its part"
)


class NotWholeError(Exception):
    """None of the operands is ragged, and one is not whole on every rank: they are torch's."""


class CutDifferentlyError(ValueError):
    """Ragged operands do not go together, each on its shards."""

    def __init__(self, func: Any, one: DTensorSpec, other: DTensorSpec) -> None:
        super().__init__(
            f"{func} got tensors that are sharded differently: shape {tuple(one.shape)} with "
            f"{one.placements} and shape {tuple(other.shape)} with {other.placements}. "
            "Redistribute one to the placements of the other, or use `.full_tensor()`"
        )


class Operands:
    """The layouts of the arguments of an operator, and the local tensors that it runs on.

    Many tensors of a list share a spec object, a mesh or a tuple of placements: they are compared
    by identity first, because optimizers call these operators for thousands of tensors.

    Args:
        is_ragged: whether a ragged tensor is among them. Without one, all have to be whole.

    Raises:
        CutDifferentlyError: ragged ones do not go together.
        NotWholeError: by `local`, where none is ragged and one is not whole.
        ValueError: one cannot stand beside a ragged tensor.
    """

    def __init__(
        self,
        func: Any,
        access: Access,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        is_ragged: bool,
    ) -> None:
        self.func, self.access, self.is_ragged = func, access, is_ragged
        self.single: DTensorSpec | None = None  # where arguments outside of lists meet
        self.positions: Sequence[DTensorSpec | None] = []  # the same for each position of lists
        self._specs: dict[int, Sequence[DTensorSpec | None]] = {}  # by list, its id
        self._alike: dict[int, bool] = {}  # by list: see `is_alike`
        self._differ = False  # whether ragged ones are cut differently, so that some must move
        self._known: set[int] = set()  # ids of meshes and placements that are those of whole ones
        if not is_ragged:
            return
        # What is written decides on the layout: it is the first argument, or passed as ``out``.
        ordered = (*kwargs.values(), *args) if access.has_out else (*args, *kwargs.values())
        for arg in ordered:
            if isinstance(arg, RaggedTensor):
                self.single = self._joined(self.single, arg._spec)
            elif is_tensor_list(arg):
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

    def _joined(self, known: DTensorSpec | None, new: DTensorSpec | None) -> DTensorSpec | None:
        if known is None or new is None or known is new:
            return known or new
        both = _wider(known, new)
        if both is None and may_move(new, known):
            self._differ = True
            return known
        if both is None:
            raise CutDifferentlyError(self.func, known, new)
        return both

    def is_alike(self, arg: Sequence[Any]) -> bool:
        """Whether all tensors of a list are ragged and have the very specs of their positions."""
        alike = self._alike.get(id(arg))
        if alike is None:
            alike = all(map(operator.is_, self._specs[id(arg)], self.positions))
            self._alike[id(arg)] = alike
        return alike

    def check(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raise if the operator may not run on ragged tensors of these layouts."""
        for written in self.access.written(args, kwargs):
            if isinstance(written, torch.Tensor):
                self._check_written(written, self.single)
            elif is_tensor_list(written) and not self.is_alike(written):
                for tensor, spec in zip(written, self.positions, strict=True):
                    self._check_written(tensor, spec)
        specs = [self.single] if self.single is not None else self.positions
        # On a mesh of one axis there is no other axis: most calls end here.
        for spec in [each for each in specs if each is not None and len(each.placements) > 1]:
            if is_partial(spec) and not _commutes(self.func, args, kwargs, spec):
                refuse_partial(self.func, spec)

    def _check_written(self, tensor: torch.Tensor, spec: DTensorSpec | None) -> None:
        if spec is None:
            return
        if self.access.is_fused and not isinstance(tensor, DTensor) and not tensor.dim():
            return  # a counter of steps, which each rank has
        if isinstance(tensor, RaggedTensor) and tensor.shape == spec.shape:
            if self._differ and not same_layout(tensor._spec, spec):
                raise CutDifferentlyError(self.func, spec, tensor._spec)
            return
        found = getattr(tensor, "placements", "a plain tensor")
        raise ValueError(
            f"{self.func} would write a RaggedTensor of shape {tuple(spec.shape)} into {found} "
            f"of shape {tuple(tensor.shape)}; use `.full_tensor()` on the ragged one{_OF_STATES}"
        )

    def local(self, arg: Any) -> Any:
        """What the operator gets on this rank for an argument."""
        if isinstance(arg, torch.Tensor):
            return _arrived(self._beside(arg, self.single) if self.is_ragged else self._whole(arg))
        if not isinstance(arg, list | tuple):
            return arg
        if not self.is_ragged:
            known = self._known
            return [
                item._local_tensor
                if isinstance(item, DTensor)
                and id(item._spec.placements) in known
                and id(item._spec.mesh) in known
                and type(item._local_tensor) is torch.Tensor
                else self._whole(item)
                for item in arg
            ]
        if not is_tensor_list(arg):
            return arg
        if self.is_alike(arg):
            return [item._local_tensor for item in arg]
        if self.access.has_lists and _are_numbers(arg):  # as `local_beside` returns them
            return arg
        # All moves are under way before the first is waited for.
        found = [self._beside(item, at) for item, at in zip(arg, self.positions, strict=True)]
        return [_arrived(each) for each in found]

    def _whole(self, tensor: Any) -> Any:
        """The local tensor of an operand that each rank has whole."""
        if not isinstance(tensor, torch.Tensor):
            return tensor
        if not isinstance(tensor, DTensor):
            is_number = self.access.takes_numbers and tensor.numel() == 1
            if tensor.dim() and tensor.numel() and not is_number and torch.is_grad_enabled():
                raise NotWholeError  # most often an activation
            return tensor
        spec = tensor._spec
        if self.single is None:
            self.single = spec
        mesh = self.single.mesh
        is_here = spec.mesh is mesh or spec.mesh == mesh  # whose comparison is a call
        is_whole = is_here and all(p.is_replicate() for p in spec.placements)
        if not is_whole or type(tensor._local_tensor) is not torch.Tensor:
            raise NotWholeError
        self._known |= {id(spec.mesh), id(spec.placements)}
        return tensor._local_tensor

    def _beside(self, tensor: torch.Tensor, spec: DTensorSpec | None) -> torch.Tensor | InFlight:
        """The local tensor of an operand beside ragged ones, which meet as ``spec`` says."""
        if spec is None:  # one number for all tensors of a list
            spec = next(known for known in self.positions if known is not None)
        if not isinstance(tensor, RaggedTensor):
            if tensor.requires_grad:
                keep_layout(tensor)
            return local_beside(self.func, tensor, spec, self.access.has_lists)
        if tensor.shape != spec.shape:
            return local_expanded(tensor._local_tensor, tensor._spec, spec)
        if not self._differ:
            return tensor._local_tensor
        keep_layout(tensor)  # its gradient may come in the layout of the others
        return start_move(self.func, tensor, spec)

    def wrap(self, result: Any) -> Any:
        """The results as tensors of the layouts of the arguments."""
        if isinstance(result, torch.Tensor):
            return self._wrap(result, self.single)
        if not isinstance(result, list | tuple):
            return result
        if result and isinstance(result[0], list | tuple):  # the lists of a functional fused step
            return type(result)(map(self.wrap, result))
        specs = self.positions or [self.single] * len(result)
        return type(result)(map(self._wrap, result, specs))

    def _wrap(self, local: Any, spec: DTensorSpec | None) -> Any:
        if not isinstance(local, torch.Tensor):
            return local
        assert spec is not None, "an operand with a spec brought us here"
        if not self.is_ragged:
            meta = TensorMeta(local.shape, local.stride(), local.dtype)
            return wrap_replicated(local, DTensorSpec(spec.mesh, spec.placements, meta))
        assert spec.tensor_meta is not None, "specs of ragged tensors are made with their meta"
        if spec.tensor_meta.dtype != local.dtype:
            spec = respecified_as(spec, dtype=local.dtype)
        return wrap_local(local, spec, False)


def is_tensor_list(arg: Any) -> bool:
    """Whether an argument is a list of tensors, as of ``foreach`` operators."""
    return isinstance(arg, list | tuple) and bool(arg) and isinstance(arg[0], torch.Tensor)


def _are_numbers(items: Sequence[Any]) -> bool:
    kinds = set(map(type, items))
    return kinds == {torch.Tensor} and not any(t.dim() or t.requires_grad for t in items)


def _arrived(local: Any) -> Any:
    return local.wait() if type(local) is InFlight else local


# --- ragged operands of several layouts -----------------------------------------------------------


def _wider(one: DTensorSpec, other: DTensorSpec) -> DTensorSpec | None:
    """The layout of both after broadcasting; None if they are cut differently."""
    if same_layout(one, other):
        return one
    for small, large in ((one, other), (other, one)):
        if small.shape != large.shape and small.mesh == large.mesh:
            expanded = expanded_spec(small, large.shape)
            if expanded is not None and same_layout(expanded, large):
                return large
    return None


def broadcasts_to(shape: Sequence[int], target: Sequence[int]) -> bool:
    """Whether a tensor of ``shape`` broadcasts to ``target`` without enlarging that."""
    missing = len(target) - len(shape)
    return missing >= 0 and all(
        n in (1, want) for n, want in zip(shape, target[missing:], strict=True)
    )


def expanded_spec(spec: DTensorSpec, shape: Sequence[int]) -> DTensorSpec | None:
    """The layout of a ragged tensor expanded to ``shape``; None if that needs other ranks.

    Each slice over the dimensions from the first that grows must be on one rank.
    """
    if not broadcasts_to(spec.shape, shape):
        return None
    padded = reshaped(spec, (*(1,) * (len(shape) - len(spec.shape)), *spec.shape))
    if padded is None:
        return None
    grows = [d for d in range(len(shape)) if padded.shape[d] != shape[d]]
    if not grows:
        return padded
    if any(type(p) is Shard and p.dim in grows for p in spec.placements):
        return None
    return rescaled(padded, grows[0], shape, padded.placements)


def local_expanded(local: torch.Tensor, spec: DTensorSpec, target: DTensorSpec) -> torch.Tensor:
    """The local part, laid out as ``spec``, after expansion to ``target``: a copy."""
    missing = len(target.shape) - len(spec.shape)
    old, new = (*(1,) * missing, *sizes_here(spec)), sizes_here(target)
    kept = next((d for d in range(len(new)) if old[d] != new[d]), len(new))
    slices = local.numel() // (math.prod(old[kept:]) or 1)
    return local.view(slices, *old[kept:]).expand(slices, *new[kept:]).reshape(-1)


def may_move(source: DTensorSpec, target: DTensorSpec) -> bool:
    """Whether a tensor laid out as ``source`` may be moved to where ``target`` lies."""
    same_tensor = source.shape == target.shape and source.mesh == target.mesh
    return same_tensor and not is_partial(source) and not is_partial(target)


def start_move(func: Any, tensor: RaggedTensor, spec: DTensorSpec) -> InFlight:
    """Start to move a ragged operand to where ``spec`` lies; nothing moves if it lies there.

    Raises:
        CutDifferentlyError: it is another tensor, or partial.
    """
    if same_layout(tensor._spec, spec):
        return done(tensor._local_tensor)
    if not may_move(tensor._spec, spec):
        raise CutDifferentlyError(func, spec, tensor._spec)
    return move(tensor._arrived(), tensor._spec, respecified_as(spec, dtype=tensor.dtype))


# --- what is not ragged, beside ragged ones -------------------------------------------------------


def local_beside(func: Any, tensor: torch.Tensor, spec: DTensorSpec, in_list: bool) -> torch.Tensor:
    """What stands for a tensor that is not ragged, beside ragged ones laid out as ``spec``.

    Raises:
        ValueError: it cannot stand there; the message names the way out.
    """
    local = _value_of(func, tensor, spec)
    num_dims = len(spec.shape)
    if local.numel() == 1:
        # In the shape that promotes and broadcasts as the whole would. The local part is 1-D
        # whatever the global shape is: beside it, (1, 1) would add a dimension, and a number
        # beside a ragged scalar would be the weaker type.
        if in_list and local.dim() == 0:  # these want a number or a list
            return local
        if local.dim() > num_dims:
            raise ValueError(
                f"{func} got a tensor of shape {tuple(local.shape)}, which would add a "
                f"dimension to a RaggedTensor of {num_dims}; use `.full_tensor()`"
            )
        return local.view(1) if local.dim() or not num_dims else local
    if not broadcasts_to(local.shape, spec.shape):
        raise ValueError(
            f"{func} got a replicated DTensor of shape {tuple(local.shape)}, which would enlarge "
            f"a RaggedTensor of shape {tuple(spec.shape)}; use `.full_tensor()` on the ragged one"
        )
    return local_part(local, spec)


def _value_of(func: Any, tensor: torch.Tensor, spec: DTensorSpec) -> torch.Tensor:
    """The plain tensor that every rank has."""
    found = "a plain tensor"
    if isinstance(tensor, DTensor):
        found = str(tensor.placements)
        whole = tensor
        small = tensor.numel() < math.prod(spec.shape) or tensor.numel() == 1
        if small and any(p.is_partial() for p in tensor.placements):
            with torch.no_grad():
                whole = tensor.redistribute(
                    placements=[Replicate() if p.is_partial() else p for p in tensor.placements]
                )
        if all(p.is_replicate() for p in whole.placements):
            if tensor.numel() == 1 or tensor.device_mesh == spec.mesh:
                return whole._local_tensor
            found = f"a DTensor on another mesh, {tensor.device_mesh},"
    elif tensor.numel() == 1:
        return tensor
    raise ValueError(
        f"{func} got a ragged tensor together with {found} of shape {tuple(tensor.shape)}. Only "
        "numbers, tensors with one element and replicated DTensors of the same mesh can be "
        "combined with ragged tensors: use `DTensor.from_local(x, mesh, [Replicate()])` if every "
        "rank has the same, `vescale_fsdp.ragged.redistribute(x, placements=ragged.placements)` "
        "on a DTensor, or "
        "`.full_tensor()` on the ragged one. Copies of parameters (averages, references) match if "
        "they are made after the model was sharded"
    )


# --- partial tensors ------------------------------------------------------------------------------


def is_partial(spec: DTensorSpec) -> bool:
    """Whether the values of a ragged tensor are still to be combined along another axis."""
    return len(spec.placements) > 1 and any(p.is_partial() for p in spec.placements)


def refuse_partial(func: Any, spec: DTensorSpec) -> None:
    """Raises ``NotImplementedError`` if the tensor `is_partial`."""
    if is_partial(spec):
        raise NotImplementedError(
            f"{func} does not run on {spec.placements}: values along the Partial axis are not "
            "combined yet; redistribute the Partial axis first, for example to Replicate"
        )


def _commutes(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], spec: DTensorSpec) -> bool:
    """Whether an element-wise operator on partial tensors commutes with the sum."""
    # The others are ragged in the same layout, or not ragged; the caller has checked that.
    ragged = [_is_ragged(arg) for arg in args]
    if func in _COPIES:
        dtype = kwargs.get("dtype")
        casts = dtype is not None and not (dtype.is_floating_point or dtype.is_complex)
        return not casts and all(ragged[:2])
    partials: list[Any] = [p for p in spec.placements if p.is_partial()]
    if any(type(p) is not Partial or p.reduce_op not in ("sum", "avg") for p in partials):
        return False
    name = func._schema.name.removeprefix("aten::")
    if name in _ADDS:
        return len(ragged) > 1 and all(ragged)
    if "rounding_mode" in kwargs:
        return False
    return (name in _SCALES or (name in _DIVIDES and ragged[0])) and sum(ragged) == 1


def _is_ragged(arg: Any) -> bool:
    if isinstance(arg, list | tuple):
        return bool(arg) and all(isinstance(item, RaggedTensor) for item in arg)
    return isinstance(arg, RaggedTensor)
