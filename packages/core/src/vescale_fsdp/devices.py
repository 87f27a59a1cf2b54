"""Devices: everything that this package asks of an accelerator. On a CPU most of it does nothing.

::

    the engine's stream | unit i - 1 |           unit i            |         unit i + 1
    copy stream                      | cast of i + 1 |
    NCCL's streams                                   | gather i + 1 |

There is one rule for memory on an accelerator: **one stream allocates and frees every buffer of
a model's engine** (`Lane`). It is the stream on which the forward of the root begins: the stream
of the model's compute. Before it frees a buffer, it waits for the streams that use the
buffer. It can allocate freed memory again at once, however far the host is ahead. So peak memory
does not depend on the host, memory is not fragmented, and these buffers need no
``record_stream``. The price: an all-gather starts only when the compute that was queued before it
has ended. That compute used the memory that the all-gather writes to. With two full buffers, an
earlier start is impossible.

A user may run a unit on another stream. That stream waits for the unit's all-gather. The engine's
stream waits for that stream before it frees the unit's memory (`Users`).

Tasks on the copy stream keep to the rule in two ways:

* A task begins after all work that the current stream has queued so far. Until then, that work may
  use the memory that the task reads or writes. Memory that the task allocates itself is safe for
  the same reason.
* The caller of a task waits for the task's result before a buffer that the task uses is freed.

Nothing else in this package names ``torch.cuda``, ``torch.accelerator``, ``is_pinned`` or
``get_device_module``; a test checks this (tests/test_devices.py). So a simulator of streams can
replace functions of this module alone. The alternatives are in docs/design/cuda.md.
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

_HIGH_PRIORITY = -1  # all-gathers wait for these short kernels, so they run before a long one ends
_NOTHING = nullcontext()


class Waitable(Protocol):
    """An operation under way: a ``Work``, or an object that waits like one."""

    def wait(self) -> object:
        """Wait until it has ended. On CUDA, the current stream waits, not the host."""


def free_bytes(device: torch.device) -> int:
    """The bytes that this rank can allocate on a device.

    On an accelerator: free memory, and unused memory that torch's allocator has cached. On a CPU:
    the available memory of the machine, divided by its ranks (``LOCAL_WORLD_SIZE``; all ranks of
    the job if that is not set). For a CPU on a system other than Linux: 0.
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
    """Torch's module for a device with streams, for example ``torch.cuda``; else None."""
    return None if device.type in ("cpu", "meta") else torch.get_device_module(device)


# Which devices there are


def has_accelerator() -> bool:
    """Whether this machine has an accelerator that torch can use."""
    return torch.accelerator.is_available()


def accelerator_type(*, warns: bool = False) -> str | None:
    """The type of this machine's accelerator, for example "cuda"; None if there is none.

    A CUDA build of torch on a machine without a GPU returns None.

    Args:
        warns: let torch warn why it finds none.
    """
    if not (warns or torch.accelerator.is_available()):
        return None
    found = torch.accelerator.current_accelerator(check_available=True)
    return None if found is None else found.type


def current_device(device_type: str) -> torch.device:
    """The device of this type that this process uses.

    Raises:
        ValueError: torch finds none on this machine.
    """
    if device_type == "cpu":
        return torch.device("cpu")
    module = torch.get_device_module(device_type)
    if not module.is_available():
        raise ValueError(
            f"the mesh is of {device_type!r} devices, and torch {torch.__version__} finds none on "
            "this machine. On CPUs leave mesh out, or make it with init_device_mesh('cpu', ...); "
            "vescale-fsdp doctor says what torch finds"
        )
    return torch.device(device_type, module.current_device())


def made_current(device: torch.device) -> AbstractContextManager[None]:
    """A context in which kernels are launched on ``device``. Does nothing except on CUDA."""
    return torch.cuda.device(device) if device.type == "cuda" else _NOTHING


def describe_all() -> dict[str, Any]:
    """The accelerators of this machine: their type, names and memory."""
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
    return found


def capability(device: torch.device) -> tuple[int, int]:
    """The compute capability of a CUDA device."""
    return torch.cuda.get_device_capability(device)


def generator_state() -> torch.Tensor | None:
    """The state of the current CUDA device's random generator; None if CUDA is not in use."""
    used = torch.cuda.is_available() and torch.cuda.is_initialized()
    return torch.cuda.get_rng_state() if used else None


def set_generator_state(state: torch.Tensor) -> None:
    """Set the state of the current CUDA device's random generator. Does nothing without CUDA."""
    if torch.cuda.is_available():
        torch.cuda.set_rng_state(state)


def default_generator(device: torch.device) -> torch.Generator:
    """The generator that random operators on ``device`` use by default."""
    if device.type == "cpu":
        return torch.default_generator
    module = torch.get_device_module(device)
    index = module.current_device() if device.index is None else device.index
    generator: torch.Generator = module.default_generators[index]
    return generator


# Streams


def has_streams(device: torch.device) -> bool:
    """Whether work on ``device`` is queued on streams."""
    return device.type not in ("cpu", "meta")


def current_stream(device: torch.device) -> Any:
    """The stream on which this thread queues work now; None on a device without streams."""
    module = module_of(device)
    return None if module is None else module.current_stream(device)


def synchronize(device: torch.device) -> None:
    """Wait for all work of the current stream. Does nothing on a device without streams."""
    stream = current_stream(device)
    if stream is not None:
        stream.record_event().synchronize()


def wait_event(device: torch.device, event: Any) -> None:
    """Let the current stream wait for an event. Does nothing on a device without streams.

    The stream comes from the device's own module. A stream of ``torch.accelerator`` silently
    ignores the events of ``torch.cuda``.
    """
    stream = current_stream(device)
    if stream is not None:
        stream.wait_event(event)


def start_beside(device: torch.device, start: Callable[[], Waitable | None]) -> Waitable | None:
    """Call ``start`` on the copy stream, after all work that the current stream has queued so far.

    Returns a `Waitable`. Its ``wait`` lets the current stream wait for all work that ``start`` has
    queued, and for the `Waitable` that ``start`` returned. On a device without streams, this just
    calls ``start`` and returns its result.

    Cost on the host: two events.
    """
    module = module_of(device)
    if module is None:
        return start()
    stream = side_stream(device, "to the device")
    stream.wait_stream(module.current_stream(device))
    with module.stream(stream):
        work = start()
        return _Beside(device, stream.record_event(), work)


@contextmanager
def on_stream(device: torch.device, stream: Any) -> Iterator[None]:
    """A context in which work is queued on ``stream``.

    ``stream`` first waits for all work that the current stream has queued. At the end, the current
    stream waits for ``stream``. Does nothing if ``stream`` is None, or on a device without streams.
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
    """A task of the copy stream, and the collective or copy that it has started."""

    def __init__(self, device: torch.device, event: Any, work: Waitable | None) -> None:
        self._device, self._event, self._work = device, event, work

    def wait(self) -> None:
        """Let the current stream wait for both."""
        wait_event(self._device, self._event)
        if self._work is not None:
            self._work.wait()


@functools.cache
def side_stream(device: torch.device, use: str) -> Any:
    """A stream of a device, made at first use and shared by all models."""
    return module_of(device).Stream(device=device, priority=_HIGH_PRIORITY)


class Lane:
    """The one stream that allocates and frees the buffers of a group of parameters.

    It is the stream that is current when the forward of the root begins (`follow`), so that of the
    model's compute; in the pass other streams may be current. Before the first forward it is the
    stream of the first use. All groups of a model have the same one, and each model its own. If two
    models run on two streams, neither lane moves; but they share the copy stream, so an all-gather
    of one may wait for compute of the other.

    Args:
        device: the device of the buffers.

    Attributes:
        stream: None before the first use, and on a device without streams.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self._module = device, module_of(device)
        self.stream: Any = None

    def entered(self) -> AbstractContextManager[None]:
        """A context in which work is queued on this stream.

        The stream first waits for all work that the current stream has queued so far.

        Cost on the host: a comparison; if another stream is current, an event and a wait for it.
        """
        if self.is_current:
            return _NOTHING
        self.stream.wait_stream(self._module.current_stream(self.device))
        entered: AbstractContextManager[None] = self._module.stream(self.stream)
        return entered

    @property
    def is_current(self) -> bool:
        """Whether this is the current stream (always, on a device without streams)."""
        if self._module is None:
            return True
        current = self._module.current_stream(self.device)
        if self.stream is None:
            self.stream = current
        return bool(current == self.stream)

    def join(self) -> None:
        """Let the current stream wait for this one."""
        if not self.is_current:
            self._module.current_stream(self.device).wait_stream(self.stream)

    def borrow(self, tensor: torch.Tensor) -> None:
        """Keep the memory of a tensor of the current stream until this stream has read it.

        It is for gradients that autograd made on a user's stream. It uses ``record_stream``, so no
        stream waits.
        """
        if not self.is_current:
            tensor.record_stream(self.stream)


def follow(lanes: Sequence[Lane]) -> list[bool]:
    """Make the current stream the lane of a model that has nothing under way. Returns what moved.

    A model may make its first step on a stream for warm-up, and the next ones on another, which
    would exchange events with the first in each unit if the lane stayed there.

    The current stream waits once for the former one, so all that the engine has queued there comes
    first. The caching allocator keeps what the former stream has allocated for that stream:

    * What is free stays reserved for it, and the new stream reserves as much again, until memory is
      short or ``empty_cache()`` is called.
    * What is in use (units that stay unsharded, gradients that wait for more) is used and freed by
      the new stream from now on. For these the caller calls ``record_stream``: the former
      stream gets the memory when the new one is through with it, whatever is queued there.
    * Gradients that were published are the user's, as in torch where backwards run on two streams.

    Cost on the host: a comparison for each lane; if one moves, an event and a wait for it.
    """
    current = {device: current_stream(device) for device in {lane.device for lane in lanes}}
    former: list[Any] = []
    moved = []
    for lane in lanes:
        before, lane.stream = lane.stream, current[lane.device]
        moved.append(before is not None and before != lane.stream)
        if moved[-1] and before not in former:
            lane.stream.wait_stream(before)
            former.append(before)
    return moved


class Users:
    """The streams that use a unit's unsharded parameters.

    There is one, unless a user runs the unit on several streams.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._module = device, module_of(device)
        self._streams: list[Any] = []

    def add(self) -> None:
        """Add the current stream.

        The first stream has already waited for the all-gather. Each other one waits for the first.
        """
        if self._module is None:
            return
        current = self._module.current_stream(self._device)
        if current in self._streams:
            return
        if self._streams:
            current.wait_stream(self._streams[0])
        self._streams.append(current)

    def end(self) -> None:
        """Let the current stream, which frees the memory next, wait for all of them."""
        if self._streams:
            current = current_stream(self._device)
            for stream in self._streams:
                if stream != current:
                    current.wait_stream(stream)
            self._streams.clear()


# Memory


def is_on_host(tensor: torch.Tensor) -> bool:
    """Whether a tensor is in the host's memory."""
    return tensor.device.type == "cpu"


def is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are on one device, so that one kernel can use both."""
    return one.device == other.device and is_on_host(one) == is_on_host(other)


def empty(
    num_elements: int, dtype: torch.dtype, device: torch.device, *, pins: bool = False
) -> torch.Tensor:
    """A flat, uninitialised tensor.

    Args:
        pins: allocate a CPU tensor in pinned memory, so that copies to an accelerator are
            asynchronous.
    """
    if pins and device.type == "cpu":
        return empty_pinned((num_elements,), dtype)
    return torch.empty(num_elements, dtype=dtype, device=device)


def empty_on_host(shape: Sequence[int], dtype: torch.dtype, *, pins: bool = False) -> torch.Tensor:
    """An uninitialised tensor in the host's memory, which may be pinned."""
    return torch.empty(shape, dtype=dtype, device="cpu", pin_memory=pins)


def empty_pinned(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """An uninitialised tensor in pinned memory of the host."""
    return empty_on_host(shape, dtype, pins=True)


def pinned_numbers(values: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A flat tensor of numbers in pinned memory of the host."""
    return empty_pinned((len(values),), dtype).copy_(torch.tensor(values, dtype=dtype))


def is_pinned(tensor: torch.Tensor) -> bool:
    """Whether a CPU tensor is in pinned memory: copies to and from an accelerator are async."""
    return tensor.is_pinned()


def pinned(tensor: torch.Tensor) -> torch.Tensor:
    """A CPU tensor in pinned memory. It is copied if it is not pinned yet."""
    return tensor if is_pinned(tensor) else tensor.pin_memory()


def allocating_in(pool: Any, device: torch.device) -> AbstractContextManager[None]:
    """A context in which this thread allocates CUDA memory of ``pool``."""
    return torch.cuda.use_mem_pool(pool, device)
