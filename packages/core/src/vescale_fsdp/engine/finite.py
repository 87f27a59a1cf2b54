"""Finds NaN and infinity in gradients before an optimizer writes them into the weights.

There are two steps. First, each rank sums its elements, one sum per buffer of reduced gradients,
and the ranks all-reduce whether all of their sums are finite. If they are, all gradients are
finite. A sum that is not finite may also come from an overflow, or from a NaN in padding. So in
that case each gradient is checked separately, and the ranks exchange the names through the store.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Collection, Iterable, Mapping
from typing import Literal, TypeAlias, get_args

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from vescale_fsdp.backends import collective_device
from vescale_fsdp.engine.reduce import drop_waiting
from vescale_fsdp.engine.unit import units_in
from vescale_fsdp.errors import NonFiniteError
from vescale_fsdp.ranks import collectives, over, waits

Policy = Literal["raise", "skip", "ignore"]

_MAX_NAMED = 8  # parameters in a message; the rest are counted
Finding: TypeAlias = tuple[str, str, list[int]]  # name of a gradient, what is in it, ranks

_log = logging.getLogger(__name__)


@torch.no_grad()
def check_gradients(module: nn.Module, policy: Policy = "raise") -> bool:
    """Whether all gradients of ``module`` are finite. The result is the same on all ranks.

    ::

        loss.backward()
        if check_gradients(model, "skip"):
            optimizer.step()

    Collective: all ranks that share the parameters call it, with the same policy. Call it between
    backward and the optimizer's step, and before clipping, because a norm that is NaN makes all
    gradients NaN. It checks ``.grad``, and not gradients that are accumulated for a later
    micro-batch. Gradients are sums over the ranks: the error names the rank whose shard has a NaN,
    which need not be the rank whose batch caused it.

    Args:
        module: sharded or not; its units may be on different meshes.
        policy: what to do about NaN or infinity.

            - ``"raise"``: raise on every rank; weights and gradients stay as they are.
            - ``"skip"``: return False and drop all gradients, as ``zero_grad(set_to_none=True)``
              does, including accumulated ones. The caller skips ``optimizer.step()``, as
              above, so weights, momentum, weight decay and step counts do not change.
              (Optimizers of ``torch.optim`` also do nothing if they are called: they skip
              parameters without a gradient. The caller handles the learning rate schedule.)
            - ``"ignore"``: return True without a check and without communication.

    Returns:
        True if all gradients are finite, if there are none, or with ``"ignore"``.

    Cost: one sum over each unit's reduced gradients (one per tensor for other gradients; on
    accelerators one kernel for all), an all-reduce of one number over the largest mesh of the
    parameters, and a wait for it. If no mesh contains all others, or if there are no sharded
    parameters, the all-reduce is over the default process group. If a gradient is not finite, the
    ranks also exchange names through the store.

    Raises:
        NonFiniteError: on every rank, with the parameters and the ranks that hold the values.
        ValueError: the policy is none of the three.
    """
    if policy not in get_args(Policy):
        raise ValueError(f"policy must be one of {', '.join(get_args(Policy))}, got {policy!r}")
    if policy == "ignore":
        return True
    params = _params(module)
    gradients = {name: p.grad for name, p in params.items() if p.grad is not None}
    group, device = _voters(params.values())
    suspicion = _suspicion([_values(gradient) for gradient in gradients.values()], device)
    if group is not None and dist.get_world_size(group) > 1:
        waits.wait(collectives.all_reduce(suspicion, group), "the verdict of check_gradients")
    if not suspicion.item():
        return True
    text = _find(gradients, group)
    if not text:
        return True
    if policy == "skip":
        if group is None or dist.get_rank(group) == 0:
            _log.info("step skipped: %s", text)
        _drop(params.values())
        return False
    raise NonFiniteError(
        f"{text}. Weights and gradients are as they were before the check: look at the loss, the "
        'inputs and the learning rate of this step; or use policy="skip" to skip such steps'
    )


def _params(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that have or will get the reduced gradients: the sharded ones."""
    sharded = {
        id(fsdp_param.gathered): fsdp_param.sharded
        for unit in units_in(module).values()
        for group in unit.groups
        for fsdp_param in group.fsdp_params
    }
    return {name: sharded.get(id(p), p) for name, p in module.named_parameters()}


def _values(gradient: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a gradient, in a dtype and layout that can be summed."""
    local = gradient._local_tensor if isinstance(gradient, DTensor) else gradient
    if local.layout != torch.strided:
        local = local.coalesce().values()
    return local.float() if local.dtype.itemsize == 1 else local


def what_is_not_finite(params: Mapping[str, nn.Parameter]) -> str:
    """Return a sentence that names the gradients that are not finite on any rank; else "".

    Collective over the ranks that share the parameters: an exchange through the store.
    """
    group, _ = _voters(params.values())
    return _find({name: p.grad for name, p in params.items() if p.grad is not None}, group)


# The ranks that need the same result


def _voters(params: Iterable[nn.Parameter]) -> tuple[dist.ProcessGroup | None, torch.device]:
    """Return the ranks that need the same result, and the device of the number to all-reduce.

    One group per mesh is not enough. A rank on two meshes needs to know of a NaN on either, and so
    do the ranks that share only one mesh with it.
    """
    params = list(params)
    if not (dist.is_available() and dist.is_initialized()):
        return None, params[0].device if params else torch.device("cpu")
    meshes = {id(p.device_mesh): p.device_mesh for p in params if isinstance(p, DTensor)}
    by_ranks: dict[frozenset[int], DeviceMesh] = {}
    for mesh in meshes.values():
        ranks = frozenset(mesh.mesh.flatten().tolist())
        if ranks not in by_ranks or mesh.ndim == 1:  # one that has a communicator over all of them
            by_ranks[ranks] = mesh
    largest = max(by_ranks, key=len, default=frozenset())
    if by_ranks and all(ranks <= largest for ranks in by_ranks):
        mesh = by_ranks[largest]
        group = collectives.mesh_group(mesh, 0)
        group = group if mesh.ndim == 1 else collectives.group_over([*largest], group)
        return group, torch.device(mesh.device_type)
    world = dist.group.WORLD
    assert world is not None, "torch.distributed is initialised"
    return world, collective_device(world, torch.device("cpu"))


# First step: one sum for each buffer


def _suspicion(values: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Return a number on ``device``: 0 if all values are finite; else nearly always above 0."""
    by_kind: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for piece in _pieces(values):
        by_kind.setdefault((piece.device, piece.dtype), []).append(piece)
    found = torch.zeros((), device=device)
    for pieces in by_kind.values():
        all_finite = torch.stack(_totals(pieces)).isfinite().all()
        found += (~all_finite).to(device)
    return found


def _pieces(values: list[torch.Tensor]) -> list[torch.Tensor]:
    """Join values that are close together in one storage, such as a group's reduced gradients.

    Elements between them are part of the piece.
    """
    by_storage: dict[tuple[int, torch.dtype], list[torch.Tensor]] = {}
    pieces: list[torch.Tensor] = []
    for each in values:
        if not each.numel():
            continue
        if type(each) is torch.Tensor and each.is_contiguous():
            storage = each.untyped_storage()._cdata
            by_storage.setdefault((storage, each.dtype), []).append(each)
        else:
            pieces.append(each)
    for neighbours in by_storage.values():
        start = min(each.storage_offset() for each in neighbours)
        stop = max(each.storage_offset() + each.numel() for each in neighbours)
        if len(neighbours) > 1 and stop - start <= 2 * sum(each.numel() for each in neighbours):
            pieces.append(neighbours[0].as_strided((stop - start,), (1,), start))
        else:
            pieces += neighbours
    return pieces


def _totals(pieces: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return one number per piece, which is not finite if an element is not.

    All pieces have the same device and dtype.
    """
    dtype = torch.float32 if pieces[0].dtype == torch.float16 else None  # 65,504 is soon reached
    if pieces[0].device.type == "cpu":
        # In bf16 and fp32 a sum takes a tenth of the time that a 1-norm takes.
        return [piece.sum(dtype=dtype) for piece in pieces]
    return list(torch._foreach_norm(pieces, 1.0, dtype=dtype))


# Second step: each gradient


def _find(gradients: dict[str, torch.Tensor], group: dist.ProcessGroup | None) -> str:
    """Return a sentence that names the gradients that are not finite; "" if all are finite.

    It is the same on all ranks.
    """
    kinds = {name: _kind(_values(gradient)) for name, gradient in gradients.items()}
    rank = 0 if group is None else dist.get_rank()
    found = [(name, kind, [rank]) for name, kind in kinds.items() if kind]
    if group is None:
        return _sentence(found)
    sentence: str = over(group).exchange("gradients", found, _merged, _sentence)
    return sentence


def _kind(values: torch.Tensor) -> str:
    has_nan, has_inf = bool(values.isnan().any()), bool(values.isinf().any())
    return " and ".join(word for word, has in (("NaN", has_nan), ("inf", has_inf)) if has)


def _merged(found: list[list[Finding]]) -> list[Finding]:
    """Merge the findings of ranks: for each name and kind the ranks."""
    holders: dict[tuple[str, str], list[int]] = {}
    for name, kind, ranks in itertools.chain(*found):
        holders.setdefault((name, kind), []).extend(ranks)
    return [(name, kind, ranks) for (name, kind), ranks in holders.items()]


def _sentence(found: list[Finding]) -> str:
    """Return the findings of all ranks as a sentence."""
    holders = {(name, kind): ranks for name, kind, ranks in found}
    if not holders:
        return ""
    named = [
        f"{name!r} has {kind} on {_rank_list(where)}"
        for (name, kind), where in list(holders.items())[:_MAX_NAMED]
    ]
    num_names = len({name for name, _ in holders})
    num_left_out = num_names - len({name for name, _ in list(holders)[:_MAX_NAMED]})
    more = f", and {num_left_out} more" if num_left_out else ""
    what = "gradients of 1 parameter" if num_names == 1 else f"gradients of {num_names} parameters"
    return f"{what} are not finite: {'; '.join(named)}{more}"


def _rank_list(ranks: list[int]) -> str:
    """Return "ranks 0-2, 5" for [0, 1, 2, 5]."""
    runs: list[tuple[int, int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1] = (runs[-1][0], rank)
        else:
            runs.append((rank, rank))
    text = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
    return f"rank{'s' if len(ranks) > 1 else ''} {text}"


def _drop(params: Collection[nn.Parameter]) -> None:
    """Drop all gradients, also those that are accumulated for a later backward."""
    drop_waiting(params)
    for param in params:
        param.grad = None
