"""The simulated device under torch's operators and the engine's collectives."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from mmap import mmap
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    is_traceable_wrapper_subclass,
)
from torch.utils._pytree import tree_leaves, tree_map

from vescale_fsdp import devices, transfers
from vescale_fsdp.dbuffer import memory
from vescale_fsdp.ranks import collectives, waits

from .memory import Allocator, Block
from .streams import Collective, Device, Event, SimulationError, Stream

COLLECTIVES = (
    "all_gather_single",
    "all_reduce",
    "all_to_all_single",
    "reduce_scatter_single",
)
_SYNCHRONIZE = ("aten::_local_scalar_dense", "aten::equal", "aten::is_nonzero", "aten::nonzero")
_VIEWS = ("aten::set_", "aten::detach", "aten::lift_fresh", "aten::_unsafe_view")
TO_LIST = Tensor.tolist
_num_simulations = 0


class Simulator(TorchDispatchMode):
    """While entered, operators on CPU tensors are kernels of the device.

    A tensor is a handle: a storage that nobody touches, and a block of the arena in which its data
    is. What existed before is copied to the arena at its first use. Tensors made by
    `devices.empty(pins=True)`, and what operators make of those alone, are of the host.

    It stands for the device's module too (`stand_in`).

    Args:
        blocks: keep the host where NCCL and CUDA do. A collective that is the first on its
            communicator of its kind and about its size connects, and returns when all ranks have
            come to it. A kernel that is the first of its kind is loaded when all that runs on the
            device has ended.
        options: as of `Device`.
    """

    def __init__(self, num_bytes: int = 1 << 27, *, blocks: bool = False, **options: Any) -> None:
        super().__init__()
        self._blocks_host, self._known = blocks, set[object]()
        self.device = Device(**options)
        runs = self.device.runs
        self.allocator = Allocator(num_bytes if runs else 1 << 60, as_cuda=not runs)
        if self.device.runs:
            # Zeros that take memory, and time, only where they are used.
            self._arena = torch.frombuffer(mmap(-1, num_bytes), dtype=torch.uint8)
        self._blocks: dict[int, Block] = {}
        self._on_host: set[int] = set()
        self._communicators: dict[str, Stream] = {}
        self._numbers: dict[str, int] = {}
        self.num_collectives: dict[str, int] = {}

    # What a device's module has

    def Stream(self, device: Any = None, priority: int = 0) -> Stream:
        return self.device.new_stream(f"side {len(self.device.streams)}")

    def Event(self, **_: Any) -> Event:
        return Event(self.device)

    def current_stream(self, device: Any = None) -> Stream:
        return self.device.current

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        with stream:
            yield

    def is_on_host(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._on_host

    def empty_on_host(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        with _disable_current_modes():
            return self._of_host(torch.empty(tuple(shape), dtype=dtype))

    def tensor_on_host(self, values: Sequence[int], dtype: torch.dtype) -> Tensor:
        with _disable_current_modes():
            return self._of_host(torch.tensor(values, dtype=dtype))

    def _of_host(self, tensor: Tensor) -> Tensor:
        key = tensor.untyped_storage()._cdata
        self._on_host.add(key)
        weakref.finalize(tensor.untyped_storage(), self._on_host.discard, key)
        return tensor

    # Memory

    def _take(self, num_bytes: int) -> Block:
        block = self.allocator.take(num_bytes, self.device.current)
        if self.device.runs:
            raw = self._arena[block.offset : block.offset + block.size]
            # NaN: the next owner may write from here on.
            self.device.current.queue.append(("kernel", lambda: raw.fill_(0xFF)))
        return block

    def take_free(self, stream: Stream) -> None:
        """Let a stream write to all memory that the allocator would give it."""
        for block in self.allocator.free_of(stream):
            raw = self._arena[block.offset : block.offset + block.size]
            stream.queue.append(("kernel", partial(raw.fill_, 0xFF)))

    def _own(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        self._keep(storage, self._take(storage.nbytes()))

    def _keep(self, storage: torch.UntypedStorage, block: Block) -> None:
        key = storage._cdata
        self._blocks[key] = block
        weakref.finalize(storage, self._died, key)

    def _died(self, key: int) -> None:
        block = self._blocks.pop(key, None)
        if block is not None:
            self.allocator.give(block)

    def resize(self, storage: torch.UntypedStorage, num_bytes: int, original: Any) -> None:
        """As ``UntypedStorage.resize_``."""
        key = storage._cdata
        was = storage.nbytes()
        original(storage, num_bytes)
        if key in self._on_host or num_bytes == was:
            return
        block = self._blocks.pop(key, None)
        if block is not None:
            self.allocator.give(block)
        if num_bytes:
            self._keep(storage, self._take(num_bytes))

    def record_stream(self, tensor: Tensor, stream: Stream) -> None:
        """As ``Tensor.record_stream``."""
        block = self._blocks.get(tensor.untyped_storage()._cdata)
        if block is not None and block.pool[0] is not stream and stream not in block.users:
            block.users.append(stream)

    def _raw(self, tensor: Tensor) -> Tensor:
        """The data of a handle, in the arena."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._on_host:
            return tensor
        if key not in self._blocks:
            self._adopt(storage)
        start = self._blocks[key].offset // tensor.dtype.itemsize + tensor.storage_offset()
        raw = torch.empty(0, dtype=tensor.dtype)
        return raw.set_(self._arena.untyped_storage(), start, tensor.shape, tensor.stride())

    def _adopt(self, storage: torch.UntypedStorage) -> None:
        data = torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),), (1,))
        block = self.allocator.take(len(data), "before")
        self._arena[block.offset : block.offset + len(data)] = data
        self._keep(storage, block)

    # Operators

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if any(is_traceable_wrapper_subclass(x) for x in tensors):
            return NotImplemented
        name = func._schema.name
        returns = func._schema.returns
        is_view = any(r.alias_info is not None and not r.alias_info.is_write for r in returns)
        if is_view or name in _VIEWS:
            return func(*args, **kwargs)
        hosts = [x for x in tensors if self.is_on_host(x)]
        if tensors and len(hosts) == len(tensors):
            return self._on_the_host(func, args, kwargs)
        if hosts:
            return self._between(func, name, args, kwargs)
        if name in _SYNCHRONIZE:
            return self._synchronized(func, args)
        if not tensors:
            return self._made(func, name, args, kwargs)
        return self._kernel(func, args, kwargs)

    def _on_the_host(self, func: Any, args: Any, kwargs: Any) -> Any:
        with _disable_current_modes():
            made = func(*args, **kwargs)
        for each in tree_leaves(made):
            if isinstance(each, Tensor) and not self.is_on_host(each):
                self._of_host(each)
        return made

    def _between(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """A copy from the host or to it."""
        if name != "aten::copy_":
            raise SimulationError(f"{name} of tensors on the host and on the device")
        target, source = args[:2]
        is_async = (len(args) > 2 and args[2]) or kwargs.get("non_blocking", False)
        to, of = (self._raw(each) if self.device.runs else each for each in (target, source))
        self.device.enqueue(lambda: to.copy_(of))
        if not is_async:
            self.device.current.synchronize()
        return target

    def _synchronized(self, func: Any, args: Any) -> Any:
        self.device.current.synchronize()
        if not self.device.runs:
            return True if func._schema.name == "aten::equal" else 0
        raws = tree_map(lambda x: self._raw(x) if isinstance(x, Tensor) else x, args)
        with _disable_current_modes():
            return func(*raws)

    def _made(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """By a factory, of numbers that the host has."""
        made = func(*args, **kwargs)
        if isinstance(made, Tensor) and made.device.type == "cpu":
            self._own(made)
            if "empty" not in name and self.device.runs:
                with _disable_current_modes():
                    data, raw = made.clone(), self._raw(made)
                self.device.enqueue(lambda: raw.copy_(data))
        return made

    def _kernel(self, func: Any, args: Any, kwargs: Any) -> Any:
        metas: dict[int, tuple[Tensor, Tensor]] = {}

        def to_meta(x: Any) -> Any:
            if isinstance(x, Tensor):
                if id(x) not in metas:
                    stand_in = torch.empty_strided(
                        x.shape, x.stride(), dtype=x.dtype, device="meta"
                    )
                    metas[id(x)] = (stand_in, x)
                return metas[id(x)][0]
            is_cpu = isinstance(x, torch.device) and x.type == "cpu"
            return torch.device("meta") if is_cpu else x

        with _disable_current_modes():
            inferred = func(*tree_map(to_meta, args), **tree_map(to_meta, kwargs))
        known = {id(meta): x for meta, x in metas.values()}
        fresh: list[Tensor] = []

        def to_handle(meta: Any) -> Any:
            if not isinstance(meta, Tensor):
                return meta
            if id(meta) in known:
                return known[id(meta)]
            with _disable_current_modes():
                handle = torch.empty_strided(meta.shape, meta.stride(), dtype=meta.dtype)
            self._own(handle)
            fresh.append(handle)
            return handle

        result = tree_map(to_handle, inferred)
        if self._is_new((func, *(x.dtype for _, x in metas.values()))):
            self.device.synchronize()
        if not self.device.runs:
            self.device.enqueue(lambda: None)
            return result
        with _disable_current_modes():
            raw_args, raw_kwargs = tree_map(
                lambda x: self._raw(x) if isinstance(x, Tensor) else x, (args, kwargs)
            )
            places = [self._raw(handle) for handle in fresh]

        def kernel() -> None:
            found = [x for x in tree_leaves(func(*raw_args, **raw_kwargs)) if isinstance(x, Tensor)]
            new = found[len(found) - len(places) :]
            for place, value in zip(places, new, strict=True):
                place.copy_(value)

        self.device.enqueue(kernel)
        return result

    def value(self, tensor: Tensor) -> Tensor:
        """What a tensor holds when everything has ended."""
        with _disable_current_modes():
            if self.is_on_host(tensor):
                return tensor.clone()
            raw = self._raw(tensor)
            self.device.synchronize()
            return raw.clone()

    def to_list(self, tensor: Tensor) -> Any:
        """As ``Tensor.tolist``, which reads memory past all operators."""
        if not self.is_on_host(tensor):
            self.device.current.synchronize()
        with _disable_current_modes():
            return TO_LIST(self._raw(tensor) if self.device.runs else tensor)

    def _is_new(self, kind: object) -> bool:
        """Whether the host is kept, because nothing of this kind was there before."""
        if not self._blocks_host or kind in self._known:
            return False
        self._known.add(kind)
        return True

    # Collectives

    def _connect(self, name: str, group: dist.ProcessGroup, num_bytes: int) -> None:
        """Wait on the host until all ranks have come here. The device goes on."""
        about = 1 << (num_bytes - 1).bit_length()
        what = f"{name} of about {about} bytes on {group.group_name}"
        if not self._is_new(what):
            return
        store, key = dist.distributed_c10d._get_default_store(), f"{_num_simulations}/{what}"
        store.add(key, 1)
        self.device.run_until(
            lambda: store.add(key, 0) == dist.get_world_size(group), f"to connect, in {what}"
        )

    def collective(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        """In place of ``original``: queued on a stream of its communicator."""

        def issue(*args: Any, **kwargs: Any) -> Work:
            self.num_collectives[name] = self.num_collectives.get(name, 0) + 1
            groups = [x for x in (*args, *kwargs.values()) if isinstance(x, dist.ProcessGroup)]
            group = groups[0] if groups else dist.group.WORLD
            assert group is not None, "there is a collective"
            tensors = [x for x in tree_leaves(args) if isinstance(x, Tensor)]
            for tensor in tensors:
                if self.is_on_host(tensor):
                    raise SimulationError(f"{name} of a tensor on the host")
            with _disable_current_modes():
                raws = args
                if self.device.runs:
                    raws = tree_map(lambda x: self._raw(x) if isinstance(x, Tensor) else x, args)
            key = group.group_name  # all of a communicator are on one stream
            stream = self._communicators.get(key)
            if stream is None:
                stream = self._communicators[key] = self.device.new_stream(name)
            sizes: Any = [(tuple(x.shape), str(x.dtype)) for x in tensors]
            if any(isinstance(x, int) for x in tree_leaves(args)):  # uneven: each rank its own
                sizes = "several sizes"

            def run() -> None:
                self._compare(group, f"{name} of {sizes}")
                original(*raws, **kwargs).wait()

            self._connect(name, group, sum(x.nbytes for x in tensors))
            stream.wait_stream(self.device.current)
            if self.device.runs:
                stream.queue.append(("collective", Collective(f"{name} of {sizes}", run)))
            with stream:
                return Work(self.device, stream.record_event())

        return issue

    def _compare(self, group: dist.ProcessGroup, what: str) -> None:
        """Raise if another rank has started something else at this place on the communicator."""
        name = group.group_name
        number = self._numbers[name] = self._numbers.get(name, 0) + 1
        store = dist.distributed_c10d._get_default_store()
        me = dist.get_rank()
        # The first rank to come writes what it does, and the others read that.
        key, mine = f"simulation {_num_simulations}/{name}/{number}", f"{what} on rank {me}"
        first = store.compare_set(key, "", mine).decode()
        if first.rpartition(" on rank ")[0] != what:
            raise SimulationError(f"number {number} on {name} is {mine} and {first}")


class Work:
    """A collective that was issued."""

    def __init__(self, device: Device, event: Event) -> None:
        self._device, self._event = device, event

    def wait(self, timeout: Any = None) -> bool:
        self._device.current.wait_event(self._event)
        return True

    def is_completed(self) -> bool:
        if not self._event.query():
            self._device.step()  # it goes on while the host asks again and again
        return self._event.query()


def several(one: Callable[..., Any]) -> Callable[..., Any]:
    """In place of one operation of NCCL: one after the other, with gloo."""

    def start(outputs: list[Tensor], inputs: list[Tensor], *rest: Any) -> Several:
        pairs = zip(outputs, inputs, strict=True)
        return Several([lambda o=o, i=i: one(o, i, *rest).wait() for o, i in pairs])

    return start


class Several:
    def __init__(self, parts: list[Callable[[], object]]) -> None:
        self._parts = parts

    def wait(self) -> None:
        for part in self._parts:
            part()


@contextmanager
def simulated(policy: str = "random", seed: int = 0, **options: Any) -> Iterator[Simulator]:
    """Have the engine take the CPU for a device. Enter what it gives to have kernels deferred.

    Args:
        options: as of `Simulator`.
    """
    global _num_simulations
    _num_simulations += 1
    simulator = Simulator(policy=policy, seed=seed, **options)
    original = torch.UntypedStorage.resize_
    wait = waits.wait_for_keys

    def wait_for_keys(store: Any, keys: list[str], seconds: float, *rest: Any) -> None:
        # The device goes on while the host waits.
        end = time.monotonic() + seconds
        while not store.check(keys) and time.monotonic() < end:
            if not simulator.device.step():
                time.sleep(0.0005)
        wait(store, keys, max(end - time.monotonic(), 0.001), *rest)

    def resize(storage: Any, num_bytes: int) -> Any:
        simulator.resize(storage, num_bytes, original)
        return storage

    with ExitStack() as stack:

        def patch(owner: Any, name: str, new: Any) -> None:
            stack.enter_context(mock.patch.object(owner, name, new))

        originals = {name: getattr(collectives, name) for name in COLLECTIVES}
        for name, original_one in originals.items():
            patch(collectives, name, simulator.collective(name, original_one))
        for name in ("all_gather", "reduce_scatter"):
            many = several(originals[f"{name}_single"])
            patch(collectives, f"{name}_many", simulator.collective(f"{name}_many", many))
        patch(memory, "_POOLS", weakref.WeakValueDictionary())  # and so lanes of this simulation
        patch(transfers, "_LAST", {})
        patch(waits, "wait_for_keys", wait_for_keys)
        patch(torch.UntypedStorage, "resize_", resize)
        patch(Tensor, "tolist", lambda tensor: simulator.to_list(tensor))
        patch(Tensor, "record_stream", lambda *args: simulator.record_stream(*args))
        stack.enter_context(mock.patch.dict("os.environ", {"VESCALE_FSDP_REDUCE": "native"}))
        stand_in(simulator, patch)
        stack.callback(devices.side_stream.cache_clear)
        yield simulator


def stand_in(simulator: Simulator, patch: Callable[[Any, str, Any], None]) -> None:
    """Let the functions of `devices` take the CPU for a device whose module is the simulator."""
    devices.side_stream.cache_clear()
    module_of = devices.module_of

    def is_on_host(tensor: Tensor) -> bool:
        return tensor.device.type == "cpu" and simulator.is_on_host(tensor)

    def pinned(tensor: Tensor) -> Tensor:
        if simulator.is_on_host(tensor):
            return tensor
        return simulator.empty_on_host(tensor.shape, tensor.dtype).copy_(tensor)

    for name, new in {
        "module_of": lambda device: simulator if device.type == "cpu" else module_of(device),
        "has_accelerator": lambda: True,
        "has_streams": lambda device: device.type != "meta",
        "is_on_host": is_on_host,
        "is_pinned": simulator.is_on_host,
        "empty_on_host": lambda shape, dtype, **_: simulator.empty_on_host(shape, dtype),
        "pinned_numbers": simulator.tensor_on_host,
        "pinned": pinned,
    }.items():
        patch(devices, name, new)
