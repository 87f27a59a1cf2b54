"""What ranks compare before collectives: the model, and its frozen parameters.

A collective between ranks with different plans hangs, aborts a process in another thread, or
returns wrong data. So ranks compare before it (`ranks.Ranks.agree`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed as dist

from vescale_fsdp.engine.unfilled import plain_buffers
from vescale_fsdp.errors import RankMismatchError
from vescale_fsdp.ranks import over

if TYPE_CHECKING:
    from vescale_fsdp.engine.unit import Unit

_SAME_FLAGS = "Call requires_grad_ with the same values on every rank, before the same backward"


def fingerprint_of(units: list[Unit]) -> list[str]:
    """Return what must be the same on every rank, one entry per unit and parameter."""
    entries = []
    for unit in units:
        entries.append(
            f"unit {unit.fqn!r} (reshard_after_forward={unit.reshard_after_forward}, in "
            f"{unit.num_parts} parts, {unit.mp_policy}, unused={unit.unused!r}, "
            f"in_flight={unit.in_flight}, broadcast_buffers={unit.broadcasts_buffers}, {unit.row})"
        )
        for module in (ref() for ref in unit.module_refs if unit.broadcasts_buffers):
            assert module is not None, "somebody is calling it"
            for name, buffer in plain_buffers(module).items():
                entries.append(f"buffer {name!r} (shape {tuple(buffer.shape)}, {buffer.dtype})")
        for group in unit.groups:
            plan = f"layout {group.layout.digest[:12]} over {group.num_shards} ranks"
            if group.compute_dtype is not None:
                plan += f", computed in {group.compute_dtype}"
            for fsdp_param, (gather, reduce) in zip(group.fsdp_params, group.codings, strict=True):
                is_set, dtype = fsdp_param.grad_dtype
                travels = f", grad_dtype={dtype}" if is_set else ""
                travels += f", gathered as {gather}" if gather else ""
                travels += f", reduced as {reduce}" if reduce else ""
                entries.append(
                    f"parameter {fsdp_param.fqn!r} (shape {tuple(fsdp_param.shape)}, "
                    f"{fsdp_param.sharded.dtype}, "
                    f"requires_grad={fsdp_param.sharded.requires_grad}, {plan}{travels})"
                )
    return entries


def agree_on_frozen(changed: list[str], group: dist.ProcessGroup) -> None:
    """Compare which parameters are frozen in groups with trainable ones, after a change.

    Raises:
        RankMismatchError: another rank has other frozen parameters, or no change.
    """
    try:
        over(group).agree("frozen parameters", changed, _SAME_FLAGS)
    except RankMismatchError as error:
        if str(error).startswith("ranks disagree"):
            raise
        raise RankMismatchError(
            f"the frozen parameters have changed on this rank since the last reduction "
            f"({changed}), and perhaps not on others: {error}. {_SAME_FLAGS}"
        ) from error
