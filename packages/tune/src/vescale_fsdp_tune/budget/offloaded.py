"""Offloaded activations of a trace: the engine's classes, with copies that are only bytes."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch

from vescale_fsdp.spi import Kept, Offload


class _OnHost:
    """Bytes on the host."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes


class _Copies:
    """Copies that have ended."""

    def __init__(self, made: list[Any]) -> None:
        self._made = made

    def given_up(self) -> list[Any]:
        made, self._made = self._made, []
        return made

    def wait(self) -> None: ...


class CountedOffload(Offload):
    """Offloads the activations of units, and counts what is on the host.

    Args:
        device: of the model.
        stays: storages that are not moved.
    """

    def __init__(self, device: torch.device, stays: set[int]) -> None:
        super().__init__()
        self._device, self._stays, self.copies = device, stays, self
        self.highest_bytes = self._bytes = 0

    def collect(self, unit: int) -> Kept:
        """Start to collect what autograd saves, in a forward of a unit."""
        return Kept(self, self._device, f"unit {unit}", self._stays, checks=False)

    def to_host(self, sources: Sequence[torch.Tensor]) -> _Copies:
        """Count copies on the host, as long as they exist."""
        made = [_OnHost(each.nbytes) for each in sources]
        for each in made:
            self._bytes += each.num_bytes
            weakref.finalize(each, self._drop, each.num_bytes).atexit = False
        self.highest_bytes = max(self.highest_bytes, self._bytes)
        return _Copies(made)

    def _drop(self, num_bytes: int) -> None:
        self._bytes -= num_bytes

    def to_device(self, hosts: Sequence[_OnHost], device: torch.device) -> _Copies:
        """Make the tensors that come back."""
        sizes = [each.num_bytes for each in hosts]
        return _Copies([torch.empty(size, dtype=torch.uint8, device=device) for size in sizes])
