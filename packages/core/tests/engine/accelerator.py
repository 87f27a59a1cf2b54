"""An accelerator that is not there, with groups that behave like NCCL's: to find what those refuse.

A tensor on it says that it is on `DEVICE`, and its memory is the CPU's. Operators run on the CPU;
they refuse what those on CUDA refuse, tensors on several devices. Streams do nothing: all runs at
once (`tests/simulator` looks at their order).
"""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from datetime import timedelta
from functools import reduce
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves, tree_map

from vescale_fsdp.ranks import limits

# A type that nothing else uses here, and whose backward runs in the thread of the CPU's.
DEVICE = torch.device("lazy", 0)

# What takes tensors on several devices.
_BETWEEN_DEVICES = {"aten::copy_", "aten::_to_copy", "aten::_foreach_copy_", "aten::index"}
_COLLECTIVES = {"_c10d_functional", "c10d"}  # namespaces of operators
# What changes sizes or memory of a tensor in place.
_RESHAPING = {"aten::set_", "aten::resize_"}
_PINNED: list[torch.UntypedStorage] = []  # all that were asked for, so that no other has its place


class OnDevice(Tensor):
    """A tensor on the accelerator."""

    @staticmethod
    def __new__(cls, values: Tensor) -> OnDevice:
        made: Any = Tensor._make_subclass
        return made(cls, values, False, dispatch_device=True, device_for_backend_keys=DEVICE)

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})

    def tolist(self) -> Any:
        return _values(self).tolist()  # torch has none for subclasses

    def __repr__(self, **_: Any) -> str:
        return f"OnDevice({_values(self)})"


class Accelerator(TorchDispatchMode):
    """While it is entered there is one."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves = tree_leaves((args, kwargs))
        if any(is_traceable_wrapper_subclass(leaf) for leaf in leaves):
            return NotImplemented  # what it wraps comes here by itself
        if any(isinstance(leaf, FakeTensor) for leaf in leaves):
            return func(*args, **(kwargs or {}))  # DTensor asks it for shapes
        return _run(func, args, kwargs or {})


def _values(tensor: Tensor) -> Tensor:
    """The same memory, as a tensor on the CPU."""
    storage = tensor.untyped_storage()
    num_bytes = storage.nbytes()
    with torch._C._DisableTorchDispatch():
        plain = torch.empty(0, dtype=tensor.dtype)
        plain.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())
    if not num_bytes and storage.nbytes():  # it has been freed, and shall be
        storage.resize_(0)
    return plain


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    name, names = func._schema.name, [each.name for each in func._schema.arguments]
    given = dict(zip(names, args, strict=False)) | kwargs
    if name == "prim::device":
        return DEVICE
    if name == "aten::is_pinned":
        storage = given["self"].untyped_storage()._cdata
        return any(storage == each._cdata for each in _PINNED)
    tensors = [leaf for leaf in tree_leaves(given) if isinstance(leaf, Tensor)]
    here = [tensor for tensor in tensors if isinstance(tensor, OnDevice)]
    if here and name not in _BETWEEN_DEVICES:
        _refuse_others(func, tensors)
    device = given.get("device")
    on_device = bool(here) if device is None else torch.device(device).type == DEVICE.type
    if device is not None and on_device:
        given["device"] = torch.device("cpu")
    pins = bool(given.get("pin_memory"))
    if pins:
        given["pin_memory"] = False
    of_values: dict[int, Tensor] = {}  # by the identity of the values, which `made` keeps alive
    made = []

    def values(leaf: Any) -> Any:
        if not isinstance(leaf, OnDevice):
            return leaf
        made.append(_values(leaf))
        of_values[id(made[-1])] = leaf
        return made[-1]

    def placed(leaf: Any) -> Any:
        if type(leaf) not in (Tensor, torch.nn.Parameter):
            return leaf
        if not on_device:
            return leaf.clone() if id(leaf) in of_values else leaf
        return of_values[id(leaf)] if id(leaf) in of_values else OnDevice(leaf)

    given = {key: tree_map(values, value) for key, value in given.items()}
    positional = [given.pop(key) for key in names[: len(args)]]
    if here and func.namespace in _COLLECTIVES:
        with mock.patch.object(NCCLLike, "takes_values", True):
            result = func(*positional, **given)
    else:
        result = func(*positional, **given)
    if name in _RESHAPING and here:
        args[0].data = OnDevice(result)
        return args[0]
    if pins:
        _PINNED.append(result.untyped_storage())
    return tree_map(placed, result)


def _refuse_others(func: Any, tensors: list[Tensor]) -> None:
    """Raise where one is not on the device. Numbers on the CPU may be anywhere."""
    for tensor in tensors:
        if tensor.dim() and not isinstance(tensor, OnDevice):
            raise RuntimeError(
                "Expected all tensors to be on the same device, but found at least two devices, "
                f"{DEVICE} and cpu! ({func})"
            )


class _Nothing:
    """A stream, or an event, of a device where all runs at once."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def wait_stream(self, other: Any) -> None: ...
    def wait_event(self, event: Any) -> None: ...
    def synchronize(self) -> None: ...
    def is_capturing(self) -> bool:
        return False

    def record_event(self, event: Any = None) -> _Nothing:
        return self


_torch_tensor = torch.tensor


def _tensor(data: Any, *, device: Any = None, **options: Any) -> Tensor:
    made = _torch_tensor(data, **options)
    return made if device is None else made.to(device)


_CURRENT = _Nothing()
_MODULE = SimpleNamespace(
    Stream=_Nothing,
    current_device=lambda: DEVICE.index,
    current_stream=lambda device=None: _CURRENT,
    device_count=lambda: 8,
    is_available=lambda: True,
    is_initialized=lambda: True,
    set_device=lambda index: None,
    stream=lambda stream: nullcontext(),
)


@contextmanager
def accelerator() -> Iterator[None]:
    """While it is entered, `DEVICE` is there."""
    get_module = torch.get_device_module

    def get_device_module(device: Any = None) -> Any:
        is_ours = device is not None and torch.device(device).type == DEVICE.type
        return _MODULE if is_ours else get_module(device)

    with ExitStack() as stack:

        def patch(owner: Any, name: str, new: Any) -> None:
            stack.enter_context(mock.patch.object(owner, name, new, create=True))

        patch(torch, DEVICE.type, _MODULE)
        patch(torch, "get_device_module", get_device_module)
        patch(torch, "tensor", _tensor)  # it looks for the device's own kernels
        patch(torch.accelerator, "is_available", lambda: True)
        patch(torch.accelerator, "current_accelerator", lambda *_, **__: torch.device(DEVICE.type))
        patch(torch.accelerator, "current_stream", lambda device=None: _CURRENT)
        patch(limits, "_is_cpu_alone", lambda: False)  # it remembers
        stack.enter_context(Accelerator())
        yield


# --- groups ---------------------------------------------------------------------------------------

_NCCL_KNOWS = {
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
}


_JOINS = {
    dist.ReduceOp.SUM: torch.add,
    dist.ReduceOp.AVG: torch.add,
    dist.ReduceOp.MAX: torch.maximum,
    dist.ReduceOp.MIN: torch.minimum,
}


class _Done(dist.Work):
    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


class NCCLLike(dist.ProcessGroup):
    """A group that takes tensors on `DEVICE` only, and on all ranks of the same sizes.

    Ranks exchange their tensors through the store, and each works out the result for itself. Their
    hosts wait for it: also those that NCCL would let go on, until they wait for the device.
    """

    takes_values = False  # of tensors on the device, where an operator has taken those out

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._store, self._rank, self._size = store, rank, size
        self._number, self._name, self._desc = 0, "", ""
        self.options = SimpleNamespace(_timeout=timeout)
        self.calls: list[tuple[str, torch.dtype, int]] = []
        self.misaligned: list[str] = []
        self.num_aborts = 0

    # What torch asks of a group

    def getBackendName(self) -> str:
        return "nccl-like"

    def getRank(self) -> int:
        return self._rank

    def getSize(self) -> int:
        return self._size

    def getGroupName(self) -> str:
        return self._name

    def setGroupName(self, name: str) -> None:
        self._name = name

    @property
    def group_name(self) -> str:
        return self._name

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(DEVICE.type)]

    def _get_backend(self, device: torch.device) -> Any:
        self._check_device(device)
        return SimpleNamespace(name=lambda: "nccl", options=self.options, abort=self._abort)

    def _abort(self) -> None:
        self.num_aborts += 1

    def _check_device(self, device: torch.device) -> None:
        if not self.takes_values and device.type != DEVICE.type:
            raise RuntimeError(f"No backend type associated with device type {device.type}")

    # Collectives

    def _exchange(self, what: str, *tensors: Tensor, must_match: Any = None) -> list[Tensor]:
        """The first of ``tensors`` of each rank. All have to be such that NCCL takes them."""
        if self.num_aborts:
            raise dist.DistBackendError("NCCL communicator was aborted")
        for tensor in tensors:
            self._check_device(tensor.device)
            if not tensor.is_contiguous():
                raise ValueError("Tensors must be contiguous")
            if tensor.dtype not in _NCCL_KNOWS:
                raise TypeError(f"Input tensor data type is not supported for NCCL: {tensor.dtype}")
            if tensor.data_ptr() % 16:
                self.misaligned.append(f"{what} of {tensor.numel()} {tensor.dtype}")
        sent = _values(tensors[0])
        self.calls.append((what, sent.dtype, sent.numel()))
        self._number += 1
        key = f"{self._number}/{{}}"
        payload = what, str(sent.dtype), must_match, sent.view(-1)
        self._store.set(key.format(self._rank), pickle.dumps(payload))
        keys = [key.format(rank) for rank in range(self._size)]
        deadline = time.monotonic() + self.options._timeout.total_seconds()
        while not self._store.check(keys):
            assert time.monotonic() < deadline, f"not all ranks come to {what}"
            if self.num_aborts:  # its kernels end, and have written anything
                return [payload[3]] * self._size
            time.sleep(0.0005)
        found = [pickle.loads(each) for each in self._store.multi_get(keys)]
        kinds = [each[:3] for each in found]
        assert all(kind == kinds[0] for kind in kinds), f"ranks disagree: {kinds}"
        return [each[3] for each in found]

    def allreduce(self, tensors: list[Tensor], opts: Any) -> Any:
        (tensor,), op = tensors, _op_of(opts)
        parts = self._exchange(f"all-reduce {op.name}", tensor, must_match=tensor.numel())
        _values(tensor).view(-1).copy_(_combined(parts, op))
        return _Done()

    def broadcast(self, tensors: list[Tensor], opts: Any) -> Any:
        (tensor,) = tensors
        parts = self._exchange("broadcast", tensor, must_match=(tensor.numel(), opts.rootRank))
        _values(tensor).view(-1).copy_(parts[opts.rootRank])
        return _Done()

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Any:
        assert output.numel() == self._size * input.numel()
        parts = self._exchange("all-gather", input, output, must_match=input.numel())
        _values(output).view(-1).copy_(torch.cat(parts))
        return _Done()

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any) -> Any:
        assert input.numel() == self._size * output.numel()
        what, op = "reduce-scatter", _op_of(opts)
        parts = self._exchange(f"{what} {op.name}", input, output, must_match=input.numel())
        total = _combined([part.chunk(self._size)[self._rank] for part in parts], op)
        _values(output).view(-1).copy_(total)
        return _Done()

    def all_to_all_single(
        self, output: Tensor, input: Tensor, output_splits: Any, input_splits: Any, opts: Any = None
    ) -> Any:
        parts = self._exchange("all-to-all", input, output)
        splits = pickle.dumps(input_splits or [input.numel() // self._size] * self._size)
        key = f"{self._number}/splits/{{}}"
        self._store.set(key.format(self._rank), splits)
        received = [
            part.split(pickle.loads(self._store.get(key.format(rank))))[self._rank]
            for rank, part in enumerate(parts)
        ]
        if output_splits:
            assert [part.numel() for part in received] == list(output_splits)
        _values(output).view(-1).copy_(torch.cat(received))
        return _Done()

    def barrier(self, opts: Any = None) -> Any:
        self._exchange("barrier", torch.zeros(1, device=DEVICE))
        return _Done()

    # Names that they have in other versions of torch.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single

    def shutdown(self) -> None: ...


def _op_of(opts: Any) -> Any:
    return getattr(opts.reduceOp, "op", opts.reduceOp)


def _combined(parts: list[Tensor], op: Any) -> Tensor:
    total = reduce(_JOINS[op], parts)
    return total / len(parts) if op == dist.ReduceOp.AVG else total


@contextmanager
def nccl_like_world(backend: str | None = "stand_in") -> Iterator[None]:
    """Within it, on a rank of `run_ranks`, the default group is `NCCLLike`.

    Args:
        backend: what ``init_process_group`` is called with.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    store = dist.PrefixStore("nccl-like", dist.distributed_c10d._get_default_store())
    dist.barrier()  # else a rank leaves while another still connects to it
    dist.destroy_process_group()
    if "STAND_IN" not in dist.Backend._plugins:
        dist.Backend.register_backend("stand_in", NCCLLike, devices=[DEVICE.type])
    defaults = {"cpu": "stand_in"}  # by the device that torch finds on this machine
    defaults_of_torch = mock.patch.dict(dist.Backend.default_device_backend_map, defaults)
    # Torch 2.15 would record what groups do, and asks for a backend of C++ for that.
    no_recorder = mock.patch.dict(os.environ, {"TORCH_FR_BUFFER_SIZE": "0"})
    with defaults_of_torch, no_recorder, accelerator():
        timeout = timedelta(seconds=20)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
        yield
        dist.destroy_process_group()
