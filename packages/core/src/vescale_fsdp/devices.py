"""Devices: all that is asked of an accelerator, in one place. On a CPU most of it does nothing.

::

    the engine's stream | unit i - 1 |           unit i            |         unit i + 1
    copy stream                      | cast of i + 1 |
    NCCL's streams                                   | gather i + 1 |

The rule of memory on an accelerator: **one stream allocates and frees every buffer of the engine**
(`Lane`: the stream that was current when the engine first ran on the device, so that of the model's
compute), and frees it after it has waited for those that use it. What it frees it may allocate
again at once, however far the host is ahead. So memory does not depend on the host, nothing is
fragmented, and no ``record_stream`` is needed. The price: a gather starts when the compute that was
queued before it has ended. That compute has used the memory that the gather writes to, so with two
full buffers an earlier start is impossible.

A unit that a user runs on another stream uses memory of this one: its stream waits for the gather,
and the engine's stream waits for it before the memory is freed (`Users`).

Two rules keep the copy stream within this:

* Each task on it begins after all that the current stream has queued so far: the memory that the
  task is given may have been in use until then. Memory that a task allocates for itself is safe for
  the same reason.
* Who asked for a task waits for what it returns before a buffer of it is freed.

Nothing else in this package names ``torch.cuda``, ``torch.accelerator``, ``is_pinned`` or
``get_device_module`` (tests/test_devices.py). So a simulator of streams needs to stand in for one
thing only (`stand_in`). Alternatives are in docs/design/cuda.md.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

_HIGH_PRIORITY = -1  # a few short kernels that a gather waits for: before the blocks of a long one
_NOTHING = nullcontext()
_STAND_INS: dict[str, Any] = {}


class Waitable(Protocol):
    """What is under way: a ``Work``, or what waits like one."""

    def wait(self) -> object:
        """Return when it has ended (on CUDA: let the current stream wait for it)."""


def free_bytes(device: torch.device) -> int:
    """Memory that this rank may allocate on a device; on a CPU its part of what is free.

    Linux; elsewhere, on a CPU, 0.
    """
    if device.type != "cpu":
        module = torch.get_device_module(device)
        free: int = module.mem_get_info(device)[0]
        cached: int = module.memory_reserved(device) - module.memory_allocated(device)
        return free + cached
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return 0
    (available,) = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return int(available) * 1024 // int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))


def module_of(device: torch.device) -> Any:
    """The module of a device with streams (``torch.cuda``, for example), or None."""
    found = _STAND_INS.get(device.type)
    if found is not None or device.type in ("cpu", "meta"):
        return found
    return torch.get_device_module(device)


@contextmanager
def stand_in(device_type: str, module: Any) -> Iterator[None]:
    """Within it, take ``module`` for that of a type of devices. For simulators."""
    before = _STAND_INS.get(device_type)
    _STAND_INS[device_type] = module
    _side_stream.cache_clear()
    try:
        yield
    finally:
        del _STAND_INS[device_type]
        if before is not None:
            _STAND_INS[device_type] = before
        _side_stream.cache_clear()


# What there is


def has_accelerator() -> bool:
    """Whether this machine has one that can be used."""
    return bool(_STAND_INS) or torch.accelerator.is_available()


def accelerator_type(*, warns: bool = False) -> str | None:
    """Its type, "cuda" for example; None without one (a build for CUDA alone has none).

    Args:
        warns: let torch say why it sees none.
    """
    if not (warns or torch.accelerator.is_available()):
        return None
    found = torch.accelerator.current_accelerator(check_available=True)
    return None if found is None else found.type


def current_device(device_type: str) -> torch.device:
    """The device of a type that this process uses."""
    if device_type == "cpu":
        return torch.device("cpu")
    return torch.device(device_type, torch.get_device_module(device_type).current_device())


def made_current(device: torch.device) -> AbstractContextManager[None]:
    """A context in which ``device`` is the one that kernels are launched on."""
    return torch.cuda.device(device) if device.type == "cuda" else _NOTHING


def describe_all() -> dict[str, Any]:
    """The accelerators of this machine: names, memory, versions of libraries."""
    kind = accelerator_type(warns=True)
    found: dict[str, Any] = {"type": kind, "devices": []}
    if kind is None:
        return found
    count = torch.accelerator.device_count()
    if kind != "cuda":
        found["devices"] = [{"name": kind}] * count
        return found
    for index in range(count):
        properties = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        found["devices"].append(
            {
                "name": properties.name,
                "capability": f"{properties.major}.{properties.minor}",
                "total_bytes": total,
                "free_bytes": free,
            }
        )
    if torch.distributed.is_nccl_available():
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    found["peer_access"] = all(
        torch.cuda.can_device_access_peer(0, index) for index in range(1, count)
    )
    return found


def capability(device: torch.device) -> tuple[int, int]:
    """The compute capability of a CUDA device."""
    return torch.cuda.get_device_capability(device)


def generator_state() -> torch.Tensor | None:
    """That of the current CUDA device; None where CUDA is not used."""
    used = torch.cuda.is_available() and torch.cuda.is_initialized()
    return torch.cuda.get_rng_state() if used else None


def set_generator_state(state: torch.Tensor) -> None:
    """Give the current CUDA device's generator a state. Does nothing without CUDA."""
    if torch.cuda.is_available():
        torch.cuda.set_rng_state(state)


def default_generator(device: torch.device) -> torch.Generator:
    """The generator that random operators on ``device`` use if none is passed."""
    if device.type == "cpu":
        return torch.default_generator
    module = torch.get_device_module(device)
    index = module.current_device() if device.index is None else device.index
    generator: torch.Generator = module.default_generators[index]
    return generator


# Streams


def has_streams(device: torch.device) -> bool:
    """Whether work on ``device`` is queued on streams."""
    return device.type in _STAND_INS or device.type not in ("cpu", "meta")


def current_stream(device: torch.device) -> Any:
    """Where work of this thread is queued now; None without streams."""
    module = module_of(device)
    return None if module is None else module.current_stream(device)


def wait_event(device: torch.device, event: Any) -> None:
    """Let the current stream wait for an event. Does nothing without streams.

    The stream is one of the device's own module: a generic one (``torch.accelerator``) passes over
    the events of ``torch.cuda`` without a word.
    """
    stream = current_stream(device)
    if stream is not None:
        stream.wait_event(event)


def start_beside(device: torch.device, start: Callable[[], Waitable | None]) -> Waitable | None:
    """Call ``start`` on the copy stream, after what the current stream has queued so far.

    Returns what lets the current stream wait for all that ``start`` has queued, and for what it
    has returned. Without streams: what ``start`` returns.

    Cost on the host: two events.
    """
    module = module_of(device)
    if module is None:
        return start()
    stream = _side_stream(device, "to the device")
    stream.wait_stream(module.current_stream(device))
    with module.stream(stream):
        work = start()
        return _Beside(device, stream.record_event(), work)


@contextmanager
def on_stream(device: torch.device, stream: Any) -> Iterator[None]:
    """Run on ``stream`` after what the current one has queued, and let that wait for it.

    None is the current one. Without streams it is passed over.
    """
    module = module_of(device)
    if stream is None or module is None:
        yield
        return
    current = module.current_stream(device)
    stream.wait_stream(current)
    with module.stream(stream):
        yield
    current.wait_stream(stream)


class _Beside:
    """A task of the copy stream, and what it has started."""

    def __init__(self, device: torch.device, event: Any, work: Waitable | None) -> None:
        self._device, self._event, self._work = device, event, work

    def wait(self) -> None:
        """Let the current stream wait for both."""
        wait_event(self._device, self._event)
        if self._work is not None:
            self._work.wait()


@functools.cache
def _side_stream(device: torch.device, use: str) -> Any:
    """A stream of a device, made at first use and shared by all models."""
    return module_of(device).Stream(device=device, priority=_HIGH_PRIORITY)


class Lane:
    """The stream of a device that allocates and frees, whichever stream is current.

    Args:
        device: of the memory.

    The stream is the one that was current at the first use.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._module = device, module_of(device)
        self._stream: Any = None

    def entered(self) -> AbstractContextManager[None]:
        """A context on the stream, after what the current one has queued so far.

        Cost on the host: a comparison; where another stream is current, two events.
        """
        if self.is_current:
            return _NOTHING
        self._stream.wait_stream(self._module.current_stream(self._device))
        entered: AbstractContextManager[None] = self._module.stream(self._stream)
        return entered

    @property
    def is_current(self) -> bool:
        """Whether what is queued now is queued on the stream."""
        if self._module is None:
            return True
        current = self._module.current_stream(self._device)
        if self._stream is None:
            self._stream = current
        return bool(current == self._stream)

    def join(self) -> None:
        """Let the current stream wait for it."""
        if not self.is_current:
            self._module.current_stream(self._device).wait_stream(self._stream)

    def borrow(self, tensor: torch.Tensor) -> None:
        """Have memory of the current stream kept until the lane has done what it queues next.

        For what autograd has made on a user's stream and the lane reads: nobody is kept waiting.
        """
        if not self.is_current:
            tensor.record_stream(self._stream)


class Users:
    """The streams that use what was gathered. One, except where a user runs units on several."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._module = device, module_of(device)
        self._streams: list[Any] = []

    def add(self) -> None:
        """The current stream is one. The first has waited for the gather, others wait for it."""
        if self._module is None:
            return
        current = self._module.current_stream(self._device)
        if current in self._streams:
            return
        if self._streams:
            current.wait_stream(self._streams[0])
        self._streams.append(current)

    def end(self) -> None:
        """The current stream, which is to free the memory, waits for all of them."""
        if self._streams:
            current = current_stream(self._device)
            for stream in self._streams:
                if stream != current:
                    current.wait_stream(stream)
            self._streams.clear()


# Memory


def is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors lie on one device, so that a kernel may use both."""
    if _STAND_INS and one.device.type in _STAND_INS:
        module = _STAND_INS[one.device.type]
        return bool(module.is_on_host(one) == module.is_on_host(other))
    return one.device == other.device


def brought_to(target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """``source``, copied to where ``target`` lies if that is on another device. The host waits."""
    if is_same(target, source):
        return source
    there = _empty_pinned(source.shape, source.dtype) if _STAND_INS else None
    if there is None:
        return source.to(target.device)
    return there.copy_(source)


def empty(
    num_elements: int, dtype: torch.dtype, device: torch.device, *, pins: bool = False
) -> torch.Tensor:
    """A flat, uninitialised tensor.

    Args:
        pins: of one on the CPU: allocate it so that copies to an accelerator are asynchronous.
    """
    if pins and device.type == "cpu":
        return _empty_pinned((num_elements,), dtype)
    return torch.empty(num_elements, dtype=dtype, device=device)


def _empty_pinned(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    module = _STAND_INS.get("cpu")
    if module is not None:
        made: torch.Tensor = module.empty_on_host(shape, dtype)
        return made
    return torch.empty(shape, dtype=dtype, pin_memory=True)


def is_pinned(tensor: torch.Tensor) -> bool:
    """Whether a tensor on the CPU can be copied to an accelerator, and from it, asynchronously."""
    module = _STAND_INS.get("cpu")
    return bool(module.is_on_host(tensor)) if module is not None else tensor.is_pinned()


def pinned(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor on the CPU, copied to memory that is pinned if it is not."""
    if is_pinned(tensor):
        return tensor
    return tensor.pin_memory() if not _STAND_INS else _empty_pinned_like(tensor)


def _empty_pinned_like(tensor: torch.Tensor) -> torch.Tensor:
    return _empty_pinned(tensor.shape, tensor.dtype).copy_(tensor)


def copy_async(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy, and cast, without keeping the host waiting if ``source`` is pinned.

    Torch casts before it moves, on the CPU and into memory that is not pinned; so what comes from
    another device moves first. Memory for that: of the size of ``source``.
    """
    if not is_same(source, target) and source.dtype != target.dtype:
        moved = torch.empty(source.shape, dtype=source.dtype, device=target.device)
        source = moved.copy_(source, non_blocking=True)
    target.copy_(source, non_blocking=True)


def from_host(values: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A flat tensor of numbers that the host has, which does not wait for the device."""
    if not has_streams(device):
        return torch.tensor(values, dtype=dtype, device=device)
    module = _STAND_INS.get(device.type)
    if module is not None:
        staged = module.tensor_on_host(values, dtype)
    else:
        staged = _empty_pinned((len(values),), dtype).copy_(torch.tensor(values, dtype=dtype))
    return torch.empty(len(values), dtype=dtype, device=device).copy_(staged, non_blocking=True)


class Arrival:
    """A copy on its way to pinned memory on the host.

    Attributes:
        value: not to be read before `wait`.
    """

    def __init__(self, value: torch.Tensor, source: torch.Tensor, event: Any) -> None:
        self.value = value
        self._source: torch.Tensor | None = source
        self._event = event

    def wait(self) -> torch.Tensor:
        """Keep the host waiting until it is there."""
        self._event.synchronize()
        self._source = None
        return self.value

    def release(self) -> None:
        """Give up what is copied from. The current stream, which frees it, waits for the copy."""
        if self._source is not None:
            wait_event(self._source.device, self._event)
            self._source = None


_LAST: dict[torch.device, Arrival] = {}  # whose source is still held


def moved_to_host(source: torch.Tensor) -> Arrival:
    """Start to copy ``source``, of a device with streams, to pinned memory, beside the compute.

    ``source`` stays in memory until the copy is waited for, or the next one begins on the
    device: the current stream waits for the copy then.
    """
    device = source.device
    former = _LAST.pop(device, None)
    if former is not None:
        former.release()
    module = module_of(device)
    value = _empty_pinned(source.shape, source.dtype)
    stream = _side_stream(device, "to the host")
    stream.wait_stream(module.current_stream(device))
    with module.stream(stream):
        value.copy_(source, non_blocking=True)
        _LAST[device] = Arrival(value, source, stream.record_event())
    return _LAST[device]


class Copies:
    """Copies of tensors between a device with streams and pinned memory, beside the compute.

    Attributes:
        made: the copies. Not to be read, and the sources not to be freed, before `wait`.
    """

    def __init__(self, made: list[torch.Tensor], device: torch.device, event: Any) -> None:
        self.made, self._device, self._event = made, device, event

    @classmethod
    def to_host(cls, sources: Sequence[torch.Tensor]) -> Copies:
        """Start to copy tensors of one device to pinned memory."""
        made = [_empty_pinned(source.shape, source.dtype) for source in sources]
        return cls(
            made, sources[0].device, _copied(made, sources, sources[0].device, "to the host")
        )

    @classmethod
    def to_device(cls, sources: Sequence[torch.Tensor], device: torch.device) -> Copies:
        """Start to copy tensors in pinned memory to ``device``, to memory of its current stream."""
        made = [torch.empty(each.shape, dtype=each.dtype, device=device) for each in sources]
        return cls(made, device, _copied(made, sources, device, "to the device"))

    def wait(self) -> None:
        """Let the current stream wait for the copies."""
        wait_event(self._device, self._event)


def _copied(
    targets: Sequence[torch.Tensor],
    sources: Sequence[torch.Tensor],
    device: torch.device,
    use: str,
) -> Any:
    """Copy on the stream for this use, after what is queued so far. Returns the event after it."""
    module, stream = module_of(device), _side_stream(device, use)
    stream.wait_stream(module.current_stream(device))
    with module.stream(stream):
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source, non_blocking=True)
        return stream.record_event()


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """The elements in row-major order in the host's memory; the same memory where they are so."""
    if _STAND_INS and not is_pinned(tensor):
        return _empty_pinned(tensor.shape, tensor.dtype).copy_(tensor)
    return tensor.to("cpu", memory_format=torch.contiguous_format).contiguous()


class Staging:
    """Copies of many tensors in the host's memory, for which the host waits once.

    From a device they go to pinned memory, in slabs of 64 MiB (larger tensors have their own), as
    torch's host allocator rounds each request up to a power of two.
    """

    def __init__(self) -> None:
        self._slab = torch.empty(0, dtype=torch.uint8)  # what is left of it
        self._devices: dict[torch.device, None] = {}

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy in row-major order. Not to be read before `wait`."""
        if module_of(tensor.device) is None or (_STAND_INS and is_pinned(tensor)):
            return tensor.to("cpu", copy=True, memory_format=torch.contiguous_format).contiguous()
        num_bytes = tensor.numel() * tensor.dtype.itemsize
        size = -(-num_bytes // _STAGED_ALIGNMENT) * _STAGED_ALIGNMENT
        if size > len(self._slab):
            self._slab = _empty_pinned((max(size, _STAGED_BYTES),), torch.uint8)
        place, self._slab = self._slab[:num_bytes], self._slab[size:]
        staged = place.view(tensor.dtype).view(tensor.shape)
        staged.copy_(tensor, non_blocking=True)
        self._devices[tensor.device] = None
        return staged

    def wait(self) -> None:
        """Keep the host waiting until all copies are there."""
        for device in self._devices:
            current_stream(device).record_event().synchronize()


_STAGED_BYTES, _STAGED_ALIGNMENT = 64 << 20, 64


def private_memory(device: torch.device) -> AbstractContextManager[None]:
    """A context in which this thread allocates what only full buffers share.

    They come and go in few sizes. Among activations they would leave holes that the others cut up.
    Elsewhere than on CUDA: nothing.
    """
    module = _STAND_INS.get(device.type)
    if module is not None:
        entered: AbstractContextManager[None] = module.private_memory()
        return entered
    if device.type != "cuda":
        return _NOTHING
    return allocating_in(_memory_pool(device), device)


def allocating_in(pool: Any, device: torch.device) -> AbstractContextManager[None]:
    """A context in which this thread allocates CUDA memory of ``pool``."""
    return torch.cuda.use_mem_pool(pool, device)


@functools.cache
def _memory_pool(device: torch.device) -> Any:
    return torch.cuda.MemPool()
