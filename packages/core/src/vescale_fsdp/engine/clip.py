"""Clips gradients by their total norm, sharded and plain ones together.

The gradients of a group are views of one reduced shard, one after the other in memory. They are
joined to one flat tensor without a copy, so that one kernel reads the shard once. One kernel for
each gradient would cost a few microseconds of host time each, and a model may have thousands.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import groupby
from typing import TypeAlias, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from vescale_fsdp import compat
from vescale_fsdp.engine.finite import what_is_not_finite
from vescale_fsdp.engine.fsdp_param import listed
from vescale_fsdp.engine.late import check_reduced
from vescale_fsdp.engine.ownership import replaced_parameters
from vescale_fsdp.errors import NonFiniteError
from vescale_fsdp.ragged import RaggedShard, max_over_ranks
from vescale_fsdp.ranks import collectives, waits


def join_adjacent(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return views of the same elements in fewer tensors, without empty ones.

    Contiguous tensors of one storage and dtype are joined if one begins at the address at which
    another ends. Gaps are never included, because other tensors may be there. The result is in the
    order in which the first tensors were given, so that sums do not depend on addresses.

    Cost: about a microsecond of host time for each tensor; no kernel.
    """
    result: list[_Placed] = []
    contiguous: list[_Placed] = []
    for place, tensor in enumerate(tensors):
        if tensor.numel():
            is_plain = type(tensor) is torch.Tensor and tensor.layout == torch.strided
            joins = is_plain and tensor.is_contiguous()
            (contiguous if joins else result).append((place, tensor))
    run: list[_Placed] = []
    end, dtype = 0, None
    for place, tensor in sorted(contiguous, key=lambda each: each[1].data_ptr()):
        address = tensor.data_ptr()
        if address != end or tensor.dtype != dtype:
            result += _joined(run)
            run, dtype = [], tensor.dtype
        run.append((place, tensor))
        end = address + tensor.nbytes
    result += _joined(run)
    return [tensor for _, tensor in sorted(result, key=lambda each: each[0])]


_Placed: TypeAlias = tuple[int, torch.Tensor]  # a tensor, and its place in what was given


def _joined(run: list[_Placed]) -> list[_Placed]:
    # Tensors of different storages are not joined: they are neighbours only by chance.
    found = []
    for _, each in groupby(run, lambda placed: placed[1].untyped_storage()._cdata):
        placed = list(each)
        place, (_, first) = min(number for number, _ in placed), placed[0]
        if len(placed) > 1:
            num_elements = sum(tensor.numel() for _, tensor in placed)
            first = first.as_strided((num_elements,), (1,), first.storage_offset())
        found.append((place, first))
    return found


_Axes: TypeAlias = tuple[dist.ProcessGroup, ...]  # the groups over which a gradient is sharded
_Kind: TypeAlias = tuple[_Axes, torch.device]  # and its device: some units may be offloaded


@torch.no_grad()
def clip_grad_norm_(
    params_or_module: nn.Module | torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    *,
    reduced_by_hand: bool = False,
) -> torch.Tensor:
    """Scale all gradients so that their total norm is at most ``max_norm``.

    Args:
        params_or_module: parameters (or a module's parameters), sharded and plain ones mixed.
            Plain ones must be the same on every rank, and count once.
        max_norm: the largest total norm afterwards.
        norm_type: the p of the norm, > 0; ``inf`` is allowed.
        error_if_nonfinite: raise, on every rank and before scaling, if the norm is not finite.
        reduced_by_hand: the caller has reduced the gradients of trainable plain parameters in a
            module that contains units. Else these are an error: each rank would train its own.

    Returns:
        The total norm before clipping: a plain tensor on the device of the first gradient, the same
        on every rank. The norm of offloaded gradients is reduced on the accelerator if the
        ranks have no backend for the CPU.

    Cost: one all-reduce of one number per mesh axis. On the CPU also two kernels for each stretch
    of gradients without a gap: a stretch is a whole shard, unless parameters are left out or the
    shard has padding. On accelerators a few kernels handle all of them.

    Raises:
        NonFiniteError: the norm is not finite and ``error_if_nonfinite`` is set. It names the
            parameters (by their indices if no module was passed) and the ranks. It is a
            RuntimeError, as in torch's function.
        ValueError: ``norm_type`` is not positive; the module has trainable parameters that nothing
            reduces; or ``fully_shard`` has replaced parameters of the list, which get no gradients.
    """
    params = _named(params_or_module)
    if isinstance(params_or_module, nn.Module):
        if not reduced_by_hand and any(map(_is_plain, params.values())):
            check_reduced(params_or_module, "clip_grad_norm_")
    elif replaced := replaced_parameters(filter(_is_plain, params.values())):
        raise ValueError(
            f"clip_grad_norm_: fully_shard has replaced {listed(replaced)} of the list, which was "
            "made before it. The gradients are at the sharded parameters: pass model.parameters()"
        )
    grads = [param.grad for param in params.values() if param.grad is not None]
    if not grads:
        return torch.tensor(0.0)
    if not norm_type > 0:
        raise ValueError(f"clip_grad_norm_: norm_type must be positive, got {norm_type}")
    by_kind = _by_kind(grads)
    total = _total_norm(by_kind, float(norm_type), _widest(grads))
    if error_if_nonfinite and not torch.isfinite(total):
        found = what_is_not_finite(params) or "each gradient is finite, their norm overflows"
        raise NonFiniteError(
            f"the total norm of order {norm_type} of the gradients is {total.item()}, so they "
            f"cannot be clipped: {found}. Leave the step out (check_gradients with "
            'policy="skip" does), or pass error_if_nonfinite=False'
        )
    coefficient = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    for device in {device: None for _, device in by_kind}:
        here = [part for kind, parts in by_kind.items() if kind[1] == device for part in parts]
        torch._foreach_mul_(here, coefficient.to(device))
    return total


def _is_plain(param: torch.Tensor) -> bool:
    return param.requires_grad and not isinstance(param, DTensor)


def _named(
    params_or_module: nn.Module | torch.Tensor | Iterable[torch.Tensor],
) -> dict[str, nn.Parameter]:
    if isinstance(params_or_module, nn.Module):
        return dict(params_or_module.named_parameters())
    if isinstance(params_or_module, torch.Tensor):
        params_or_module = [params_or_module]
    return {f"parameter {i}": cast(nn.Parameter, p) for i, p in enumerate(params_or_module)}


def _by_kind(grads: list[torch.Tensor]) -> dict[_Kind, list[torch.Tensor]]:
    """Return this rank's parts of the gradients, joined to few tensors, by axes and device."""
    known: dict[tuple[object, ...], _Axes] = {}  # for a mesh and the types of placements on it
    by_kind: dict[_Kind, list[torch.Tensor]] = {}
    for grad in grads:
        key: tuple[object, ...] = ()
        if isinstance(grad, DTensor):
            key = (id(grad.device_mesh), *map(type, grad.placements))
        if key not in known:
            known[key] = _axes_of(grad)
        local = compat.local_tensor(grad)
        by_kind.setdefault((known[key], local.device), []).append(local)
    return {kind: join_adjacent(parts) or parts[:1] for kind, parts in by_kind.items()}


def _widest(grads: list[torch.Tensor]) -> torch.dtype:
    """Return the dtype to sum the norm in. It is the same on all ranks."""
    has_double = any(grad.dtype == torch.float64 for grad in grads)
    return torch.float64 if has_double else torch.float32


def _total_norm(
    by_kind: dict[_Kind, list[torch.Tensor]], order: float, dtype: torch.dtype
) -> torch.Tensor:
    """Return the norm over all elements of all gradients, each counted once."""
    totals = [_norm_over(parts, axes, order, dtype) for (axes, _), parts in by_kind.items()]
    together = torch.stack([total.to(totals[0].device) for total in totals])
    norm: torch.Tensor = torch.linalg.vector_norm(together, order)
    return norm


def _axes_of(grad: torch.Tensor) -> _Axes:
    """Return the process groups over which a gradient is sharded. Replicas are counted once."""
    if not isinstance(grad, DTensor):
        return ()
    cuts = RaggedShard | Shard | compat.StridedShard
    cut = [axis for axis, p in enumerate(grad.placements) if isinstance(p, cuts)]
    return tuple(collectives.mesh_group(grad.device_mesh, axis) for axis in cut)


def _norm_over(
    locals_: list[torch.Tensor], axes: _Axes, order: float, dtype: torch.dtype
) -> torch.Tensor:
    device = locals_[0].device
    filled = [local for local in locals_ if local.numel()]
    norms = torch._foreach_norm(filled, order) if filled else []
    largest = torch.zeros((), dtype=dtype, device=device)
    stacked = torch.stack([norm.to(dtype) for norm in norms]) if norms else largest.view(1)
    local: torch.Tensor = torch.linalg.vector_norm(stacked, order)
    if math.isinf(order):
        for axis in axes:
            local = max_over_ranks(local, axis)
        return local
    if not axes:
        return local
    power: torch.Tensor = local**order
    for axis in axes:
        waits.wait(collectives.all_reduce(power, axis), "the norm of gradients")
    root: torch.Tensor = power ** (1.0 / order)
    return root
