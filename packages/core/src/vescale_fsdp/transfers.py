"""Transfers between a device and the host, most of them beside the compute.

========== ==================================================================================
copy_async, one tensor, on the current stream
from_host
Arrival    one tensor to pinned memory, on a copy stream (`moved_to_host`)
Copies     several tensors in either direction, on a copy stream
Staging    many tensors to the host, which waits once for all of them
========== ==================================================================================

The streams and their rules are those of `devices`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from vescale_fsdp import devices

_STAGED_BYTES, _STAGED_ALIGNMENT = 64 << 20, 64


def brought_to(target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """``source`` on the device of ``target``. If it has to be copied, the host waits."""
    if devices.is_same(target, source):
        return source
    if devices.is_on_host(target):
        return on_host(source)
    return torch.empty_like(source, device=target.device).copy_(source)


def copy_async(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy and cast ``source`` into ``target``. The host does not wait if ``source`` is pinned.

    From the CPU, torch's ``copy_`` casts first, into memory that is not pinned, and then copies to
    the accelerator. So if the devices and dtypes differ, this first copies and then casts.

    Memory in that case: a temporary tensor of the size of ``source`` on the target's device.
    """
    if not devices.is_same(source, target) and source.dtype != target.dtype:
        moved = torch.empty(source.shape, dtype=source.dtype, device=target.device)
        source = moved.copy_(source, non_blocking=True)
    target.copy_(source, non_blocking=True)


def from_host(values: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A flat tensor of numbers from the host. The host does not wait for the device."""
    if not devices.has_streams(device):
        return torch.tensor(values, dtype=dtype, device=device)
    staged = devices.pinned_numbers(values, dtype)
    return torch.empty(len(values), dtype=dtype, device=device).copy_(staged, non_blocking=True)


class Arrival:
    """A copy to pinned memory on the host that is under way.

    Attributes:
        value: the copy. Do not read it before `wait`.
    """

    def __init__(self, value: torch.Tensor, source: torch.Tensor, event: Any) -> None:
        self.value = value
        self._source: torch.Tensor | None = source
        self._event = event

    def wait(self) -> torch.Tensor:
        """Let the host wait until the copy has ended; returns it."""
        self._event.synchronize()
        self._source = None
        return self.value

    def release(self) -> None:
        """Free the source. The current stream, which frees it, first waits for the copy."""
        if self._source is not None:
            devices.wait_event(self._source.device, self._event)
            self._source = None


_LAST: dict[torch.device, Arrival] = {}  # the last copy from each device


def moved_to_host(source: torch.Tensor) -> Arrival:
    """Start to copy ``source`` from a device with streams to pinned memory, beside the compute.

    ``source`` stays in memory until the copy is waited for, or until the next copy from the device
    begins. In the second case the current stream waits for this copy first.
    """
    device = source.device
    former = _LAST.pop(device, None)
    if former is not None:
        former.release()
    value = devices.empty_pinned(source.shape, source.dtype)
    _LAST[device] = Arrival(value, source, _copied([value], [source], device, "to the host"))
    return _LAST[device]


class Copies:
    """Copies of tensors between a device with streams and pinned memory, beside the compute.

    Attributes:
        made: the copies. Not to be read, and the sources not to be freed, before `wait`.
    """

    def __init__(self, made: list[torch.Tensor], device: torch.device, event: Any) -> None:
        self.made, self._device, self._event = made, device, event
        self._is_awaited = False

    def __del__(self) -> None:
        if not self._is_awaited:  # else their memory would be used again while they are made
            self.wait()

    @classmethod
    def to_host(
        cls, sources: Sequence[torch.Tensor], into: Sequence[torch.Tensor] | None = None
    ) -> Copies:
        """Start to copy tensors of one device to pinned memory: new memory, or that of ``into``."""
        made = list(
            into or [devices.empty_pinned(source.shape, source.dtype) for source in sources]
        )
        device = sources[0].device
        return cls(made, device, _copied(made, sources, device, "to the host"))

    @classmethod
    def to_device(cls, sources: Sequence[torch.Tensor], device: torch.device) -> Copies:
        """Start to copy tensors in pinned memory to ``device``, to memory of its current stream."""
        made = [torch.empty(each.shape, dtype=each.dtype, device=device) for each in sources]
        return cls(made, device, _copied(made, sources, device, "to the device"))

    def given_up(self) -> list[torch.Tensor]:
        """Return the copies. This object does not hold them any more."""
        made, self.made = self.made, []
        return made

    def wait(self) -> None:
        """Let the current stream wait for the copies."""
        self._is_awaited = True
        devices.wait_event(self._device, self._event)

    def synchronize(self) -> None:
        """Keep the host, and the current stream, waiting until they are made."""
        self._event.synchronize()
        self.wait()


def _copied(
    targets: Sequence[torch.Tensor],
    sources: Sequence[torch.Tensor],
    device: torch.device,
    use: str,
) -> Any:
    """Copy on the stream for this use, after what is queued so far. Returns the event after it."""
    module, stream = devices.module_of(device), devices.side_stream(device, use)
    stream.wait_stream(module.current_stream(device))
    with module.stream(stream):
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source, non_blocking=True)
        return stream.record_event()


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous CPU tensor with the same elements. If ``tensor`` is one, the same memory."""
    if devices.is_on_host(tensor):
        return tensor.contiguous()
    return devices.empty_on_host(tensor.shape, tensor.dtype).copy_(tensor)


class Staging:
    """Copies many tensors to the host's memory. The host waits once, for all of them.

    Copies from an accelerator share slabs of pinned memory of 64 MiB; a larger tensor has its own.
    The slabs save memory: torch's host allocator rounds each request up to a power of two.
    """

    def __init__(self) -> None:
        self._slab = torch.empty(0, dtype=torch.uint8)  # the unused part of the last slab
        self._devices: dict[torch.device, None] = {}

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """A contiguous copy. Do not read it before `wait`."""
        if devices.is_on_host(tensor):
            return tensor.to("cpu", copy=True, memory_format=torch.contiguous_format).contiguous()
        num_bytes = tensor.numel() * tensor.dtype.itemsize
        size = -(-num_bytes // _STAGED_ALIGNMENT) * _STAGED_ALIGNMENT
        if size > len(self._slab):
            self._slab = devices.empty_pinned((max(size, _STAGED_BYTES),), torch.uint8)
        place, self._slab = self._slab[:num_bytes], self._slab[size:]
        staged = place.view(tensor.dtype).view(tensor.shape)
        staged.copy_(tensor, non_blocking=True)
        self._devices[tensor.device] = None
        return staged

    def wait(self) -> None:
        """Let the host wait until all copies have ended."""
        for device in self._devices:
            devices.current_stream(device).record_event().synchronize()
