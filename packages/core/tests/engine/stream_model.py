"""A model of an accelerator's streams, to find races on a machine without one.

Everything runs at once, on the CPU; the model notes on which stream it would have been queued, and
which streams have waited for which. Each stream has a vector clock. A race is an access to memory
while another stream may not have ended with it; so is freeing it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from vescale_fsdp import compat
from vescale_fsdp.dbuffer import memory, streams

Clock = dict["Stream", int]


class Event:
    def __init__(self, clock: Clock) -> None:
        self.clock = dict(clock)


class Stream:
    def __init__(self, name: str) -> None:
        self.name = name
        self.clock: Clock = {self: 0}

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(Event(other.clock))

    def wait_event(self, event: Event) -> None:
        for stream, time in event.clock.items():
            self.clock[stream] = max(self.clock.get(stream, 0), time)

    def record_event(self) -> Event:
        return Event(self.clock)


class Work:
    """A collective on a stream of its own, which waits for the current one when it is issued."""

    def __init__(self, model: Streams, stream: Stream, work: Any) -> None:
        self._model, self._work, self._stream = model, work, stream
        self._end = stream.record_event()

    def wait(self) -> None:
        with mock.patch.object(self._model, "use"):  # gloo copies here
            self._work.wait()
        self._model.current.wait_event(self._end)


class Streams(TorchDispatchMode):
    """Stands for the module of a device while it is entered; collects what goes wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.compute, self.current = Stream("compute"), Stream("none")
        self.current = self.compute
        self.made: list[Stream] = []
        self.races: list[str] = []
        self.num_ops: dict[str, int] = defaultdict(int)
        self._collectives: dict[str, Stream] = {}
        self._accesses: dict[int, list[tuple[Stream, int, bool, str]]] = defaultdict(list)

    # What `torch.get_device_module` has

    def Stream(self, device: torch.device, priority: int) -> Stream:
        self.made.append(Stream(f"side {len(self.made)}"))
        return self.made[-1]

    def current_stream(self, device: torch.device) -> Stream:
        return self.current

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    # What is noted

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        named = [*zip(func._schema.arguments, args, strict=False)]
        named += [(a, kwargs[a.name]) for a in func._schema.arguments if a.name in kwargs]
        for argument, value in named:
            info = argument.alias_info
            self.use(value, writes=info is not None and info.is_write, what=str(func))
        return result

    def use(self, value: Any, *, writes: bool, what: str) -> None:
        """Note an access on the current stream to all tensors in ``value``."""
        stream = self.current
        self.num_ops[stream.name] += 1
        stream.clock[stream] += 1
        for tensor in tree_leaves(value):
            if isinstance(tensor, Tensor):
                local = getattr(tensor, "_local_tensor", tensor)
                storage = local.untyped_storage()._cdata
                self._check(storage, stream, writes, what)
                self._accesses[storage].append((stream, stream.clock[stream], writes, what))

    def _check(self, storage: int, stream: Stream, writes: bool, what: str) -> None:
        for other, time, wrote, before in self._accesses[storage]:
            if (writes or wrote) and stream.clock.get(other, 0) < time:
                self.races.append(f"{what} on {stream.name} after {before} on {other.name}")

    def free(self, storage: int, what: str) -> None:
        """Note that ``storage`` goes back to the compute stream's memory."""
        if self.current is not self.compute:
            self.races.append(f"{what} on {self.current.name}")
        self._check(storage, self.compute, True, what)
        self._accesses.pop(storage, None)

    def collective(self, name: str, original: Any) -> Any:
        def issue(*args: Any) -> Work:
            written, *read = [each for each in args if isinstance(each, Tensor)]
            stream = self._collectives.setdefault(name, Stream(name))
            stream.wait_stream(self.current)
            with self.stream(stream):
                self.use(read, writes=False, what=name)
                self.use(written, writes=True, what=name)
            with mock.patch.object(self, "use"):
                work = original(*args)
            return Work(self, stream, work)

        return issue


@contextmanager
def modelled_streams() -> Iterator[Streams]:
    """Have the engine take the CPU for a device with streams, and look for races."""
    model = Streams()
    take_back, resized = memory.SlabPool.give, (memory.Mapped, memory._Resized)
    with ExitStack() as stack:

        def patch(owner: Any, name: str, new: Any) -> None:
            stack.enter_context(mock.patch.object(owner, name, new))

        for name in ("all_gather_single", "reduce_scatter_single", "all_reduce"):
            patch(compat, name, model.collective(name, getattr(compat, name)))
        patch(streams, "has_streams", lambda device: device.type != "meta")
        patch(torch, "get_device_module", lambda device: model)

        def give(pool: Any, slab: Tensor) -> None:
            model.free(slab.untyped_storage()._cdata, "giving a slab back")
            take_back(pool, slab)

        patch(memory.SlabPool, "give", give)
        for kind in resized:

            def release(region: Any, original: Any = kind.release) -> None:
                if region.is_materialized:
                    model.free(region.storage._cdata, "releasing a buffer")
                original(region)

            patch(kind, "release", release)
        streams._copy_stream.cache_clear()
        stack.callback(streams._copy_stream.cache_clear)
        stack.enter_context(model)
        yield model
