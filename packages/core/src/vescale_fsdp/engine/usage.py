"""Which parameters got a gradient on any rank: those that did on none keep ``.grad`` None."""

from __future__ import annotations

import torch
import torch.distributed as dist

from vescale_fsdp.dbuffer import Comm
from vescale_fsdp.engine.agreement import exchange
from vescale_fsdp.engine.group import Group
from vescale_fsdp.engine.slot import local_of

__all__ = ["Usage"]


class Usage:
    """Which parameters were used on any rank: only those get a gradient.

    "exchange" asks the other ranks after every backward; "zeros" never asks and gives every
    trainable parameter a gradient; "auto" asks once and, if every parameter was used
    everywhere, takes that for granted from then on.
    """

    def __init__(self, mode: str) -> None:
        self.mode = mode
        # Whether all are used, by groups and by which of their parameters are trainable.
        self._known: dict[tuple[int, ...], bool] = {}

    def of(self, groups: list[Group], comm: Comm) -> list[list[bool]]:
        """One flag per slot of each group that was reduced. Collective.

        Args:
            groups: those that were reduced, in an order that all ranks have.
            comm: of the ranks that reduced.
        """
        local = [[slot.used for slot in group.slots] for group in groups]
        everything = [[True] * len(flags) for flags in local]
        if self.mode == "zeros":
            return everything
        if comm.size * comm.num_replicas == 1:
            return local
        wanted = [[slot.sharded.requires_grad for slot in group.slots] for group in groups]
        trainable = tuple(flag for flags in wanted for flag in flags)
        key = (*map(id, groups), *trainable)
        if self.mode == "auto" and self._known.get(key):
            # A backward that is not for the parameters at all (autograd.grad of the inputs)
            # must not leave zeros behind.
            return everything if any(any(flags) for flags in local) else local
        if key not in self._known:
            flat = _ask_store(local, comm)
            self._known[key] = all(u or not w for u, w in zip(flat, trainable, strict=True))
        else:
            flat = _ask_ranks(local, comm, local_of(groups[0].slots[0].sharded).device)
        flags = iter(flat)
        return [[next(flags) for _ in group] for group in local]


def _ask_store(local: list[list[bool]], comm: Comm) -> list[bool]:
    """The flags of all ranks or-ed."""
    answer = "".join("01"[flag] for flags in local for flag in flags)
    for group in comm.reducing_groups:
        answer = exchange("used parameters", answer, group, _merged)
    return [flag == "1" for flag in answer]


def _merged(payloads: list[str]) -> str:
    return "".join("1" if "1" in flags else "0" for flags in zip(*payloads, strict=True))


def _ask_ranks(local: list[list[bool]], comm: Comm, device: torch.device) -> list[bool]:
    """The flags of all ranks or-ed, by a small collective (one byte per parameter)."""
    flags = torch.tensor([f for group in local for f in group], dtype=torch.uint8, device=device)
    for group in comm.reducing_groups:
        dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=group)
    return [bool(flag) for flag in flags.tolist()]
