"""The process groups that this package makes, and collectives on them.

A collective is looked up in ``torch.distributed`` at each call. So tools that replace it there, to
count collectives for example, see ours too.

A thread of gloo drops the tensors of a collective after it has ended, and needs the interpreter for
it. If the process has begun to exit by then, the thread ends it with SIGABRT. So the process waits
for tensors that threads still have, before the interpreter is taken down.
"""

from __future__ import annotations

import atexit
import datetime
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp, Work
from torch.distributed.device_mesh import DeviceMesh

from vescale_fsdp import backends, compat, devices
from vescale_fsdp.ranks import waits
from vescale_fsdp.ranks.limits import timeout_of

_MOST_WAIT_S = 1.0  # at exit
_with_threads: deque[weakref.ref[Tensor]] = deque(maxlen=64)  # the latest, dead when dropped


def _for_thread(tensor: Tensor) -> Tensor:
    """Return an alias of a tensor that a collective gets, and nobody else has."""
    if tensor.device.type != "cpu":
        return tensor
    alias = tensor.detach()
    _with_threads.append(weakref.ref(alias))
    return alias


def _wait_for_threads() -> None:
    end = time.monotonic() + _MOST_WAIT_S
    while any(ref() is not None for ref in _with_threads) and time.monotonic() < end:
        time.sleep(0.001)


atexit.register(_wait_for_threads)


def _start(
    start: Callable[..., Work],
    what: str,
    group: ProcessGroup,
    output: Tensor,
    *inputs: Tensor,
    **options: Any,
) -> Work:
    """Start a collective.

    If the group has no backend for a tensor's device, the collective runs on a copy.

    Args:
        output: the tensor that is written as a whole. Without inputs it is also read.
    """
    there, device = output, backends.collective_device(group, output.device)
    if device != output.device:
        there = torch.empty_like(output, device=device) if inputs else output.to(device)
    sent = [each.to(backends.collective_device(group, each.device)) for each in inputs]
    passed = [_for_thread(each) for each in (there, *sent)]
    with waits.asking:
        work = start(*passed, group=group, async_op=True, **options)
    passed.clear()
    work = waits.bounded(work, there, group, what)
    return work if there is output else cast(Work, backends.Detour(work, there, output))


def all_gather_single(output: Tensor, input: Tensor, group: ProcessGroup) -> Work:
    """Start an even all-gather into one flat tensor."""
    if input.dtype.itemsize == 1:  # gloo does not support 8-bit floats
        output, input = output.view(torch.uint8), input.view(torch.uint8)
    return _start(dist.all_gather_single, "an all-gather", group, output, input)


def reduce_scatter_single(output: Tensor, input: Tensor, op: Any, group: ProcessGroup) -> Work:
    """Start an even reduce-scatter of one flat tensor."""
    return _start(dist.reduce_scatter_single, "a reduce-scatter", group, output, input, op=op)


def all_gather_uneven(outputs: list[Tensor], input: Tensor, group: ProcessGroup) -> Work:
    """Start an all-gather of parts of different sizes. ``input`` may be this rank's output."""
    parts = [_for_thread(each) for each in outputs]
    with waits.asking:
        work = dist.all_gather(parts, _for_thread(input), group=group, async_op=True)
    return waits.bounded(work, input, group, "an all-gather")


def gather_uneven(
    outputs: list[Tensor], input: Tensor, receiver: int, group: ProcessGroup
) -> devices.Waitable | None:
    """Start a gather of parts of different sizes to one rank of the group.

    Empty parts are sent too, because NCCL needs all ranks to set up a communicator.

    Args:
        outputs: the parts of all ranks, used on the receiver. Its own part is not written.
        input: the part of this rank, used on the others.
    """
    if dist.get_rank(group) == receiver:
        each = enumerate(outputs)
        pairs = [(dist.irecv, part, rank) for rank, part in each if rank != receiver]
    else:
        pairs = [(dist.isend, input, receiver)]  # type: ignore[list-item]
    operations = [
        dist.P2POp(kind, part, group=group, group_peer=peer) for kind, part, peer in pairs
    ]
    with waits.asking:
        return _All(dist.batch_isend_irecv(operations)) if operations else None


class _All:
    """Several ``Work`` objects that wait like one."""

    def __init__(self, works: list[Work]) -> None:
        self._works = works

    def wait(self) -> None:
        """Wait for each."""
        for work in self._works:
            work.wait()


def all_to_all_single(
    output: Tensor,
    input: Tensor,
    group: ProcessGroup,
    output_splits: list[int] | None = None,
    input_splits: list[int] | None = None,
) -> Work:
    """Start an all-to-all of one flat tensor.

    It is even, unless the numbers of elements from and for each rank are passed.
    """
    splits = {"output_split_sizes": output_splits, "input_split_sizes": input_splits}
    return _start(dist.all_to_all_single, "an all-to-all", group, output, input, **splits)


def all_reduce(tensor: Tensor, group: ProcessGroup, op: Any = ReduceOp.SUM) -> Work:
    """Start an all-reduce over the ranks of ``group``, in place."""
    return _start(dist.all_reduce, "an all-reduce", group, tensor, op=op)


def broadcast(tensor: Tensor, source: int, group: ProcessGroup) -> Work:
    """Start a broadcast from a global rank."""
    return _start(dist.broadcast, "a broadcast", group, tensor, src=source)


def all_gather_many(outputs: list[Tensor], inputs: list[Tensor], group: ProcessGroup) -> Any:
    """Start several even all-gathers, as one operation if the backend can coalesce them."""
    with waits.asking, compat.coalescing(group) as several:
        for output, input in zip(outputs, inputs, strict=True):
            all_gather_single(output, input, group)
    return several


def reduce_scatter_many(
    outputs: list[Tensor], inputs: list[Tensor], op: Any, group: ProcessGroup
) -> Any:
    """Start several even reduce-scatters, as one operation if the backend can coalesce them."""
    with waits.asking, compat.coalescing(group) as several:
        for output, input in zip(outputs, inputs, strict=True):
            reduce_scatter_single(output, input, op, group)
    return several


def allocates(group: ProcessGroup, device: torch.device) -> bool:
    """Whether the backend of ``group`` can allocate memory for its collectives."""
    return bool(backends.backend_of(group, device).supports_tensor_alloc(device))


def symmetric_memory(device: torch.device) -> AbstractContextManager[None]:
    """A context in which this thread allocates symmetric memory, which all ranks can access."""
    return devices.allocating_in(compat.symmetric_pool(device), device)


def uses_symmetric_memory(collective: object) -> bool:
    """Whether a custom all-gather is FSDP2's all-gather through symmetric memory."""
    return is_fsdp2_collective(collective) and "SymmMem" in type(collective).__name__


def is_fsdp2_collective(collective: object) -> bool:
    """Whether a custom all-gather or reduce-scatter is one of FSDP2's own."""
    return type(collective).__module__.startswith("torch.distributed.fsdp.")


def new_group(ranks: list[int], like: ProcessGroup | None = None) -> ProcessGroup:
    """Make a communicator for these global ranks, in this order. Only these ranks call it.

    Args:
        like: the new group has the same backends as this one, for example a mesh's group. None
            for the default group.
    """
    like = like or dist.group.WORLD
    assert like is not None, "a group is made in an initialised torch.distributed"
    # The timeout of `init_process_group`: new groups do not inherit it.
    timeout = timeout_of(dist.group.WORLD)
    options: dict[str, Any] = {"backend": backends.spelling_of(like), "timeout": timeout}
    found = backends.backends_of(like) if dist.is_nccl_available() else {}
    kinds = [kind for kind, name in found.items() if name == "nccl"]
    if kinds:
        options["pg_options"] = nccl_options(timeout, like, kinds[0])
    with _not_split():
        group = dist.new_group(ranks, use_local_synchronization=True, sort_ranks=False, **options)
    assert isinstance(group, ProcessGroup), "the caller is one of the ranks"
    waits.register(group)
    return group


def new_gloo_group() -> ProcessGroup | None:
    """Make a gloo group of all ranks, for messages on the CPU that may take long.

    All ranks call it. Its timeout is that of the default group, but at least 30 minutes. Returns
    None, which stands for the default group, if torch was built without gloo.
    """
    if not dist.is_gloo_available():
        return None
    default, long = timeout_of(dist.group.WORLD), datetime.timedelta(minutes=30)
    with _not_split():
        timeout = long if default is None else max(default, long)
        group: ProcessGroup = dist.new_group(backend="gloo", timeout=timeout)
    return group


def nccl_options(timeout: datetime.timedelta | None, like: ProcessGroup, device_type: str) -> Any:
    """The NCCL configuration of the group ``like``, with streams of high priority as in FSDP2.

    A collective has few thread blocks. With high priority they start before the waiting blocks of
    a long kernel that was queued earlier.
    """
    nccl: Any = dist.ProcessGroupNCCL  # not in builds for CPUs
    options = nccl.Options(is_high_priority_stream=True)
    # A user sets in it how collectives run, for example by copy engines.
    given = backends.backend_of(like, device_type).options
    options.config = getattr(given, "config", options.config)
    if timeout is not None:
        options._timeout = timeout
    return options


@contextmanager
def _not_split() -> Iterator[None]:
    """A context in which new groups are not split from the default group.

    After ``init_process_group(device_id=...)``, NCCL splits new groups from the default group, and
    all of its ranks have to call. But ranks of another pipeline stage do not call.
    """
    world = dist.group.WORLD
    device = None if world is None else world.bound_device_id
    if world is None or device is None:
        yield
        return
    world.bound_device_id = None
    try:
        yield
    finally:
        world.bound_device_id = device


# Groups by the default group, because a new default group needs new communicators. Meshes by group.
_GROUPS: weakref.WeakKeyDictionary[ProcessGroup, dict[Any, ProcessGroup]]
_MESHES: weakref.WeakKeyDictionary[ProcessGroup, dict[str, DeviceMesh]]
_GROUPS, _MESHES = weakref.WeakKeyDictionary(), weakref.WeakKeyDictionary()


def group_over(ranks: list[int], like: ProcessGroup) -> ProcessGroup:
    """The communicator for these global ranks, in this order. Made at first use and kept.

    All of these ranks call it. It has the backends of ``like``, and is the default group if that
    has the same ranks and backends.
    """
    world = dist.group.WORLD
    assert world is not None, "a device mesh has initialised torch.distributed"
    spelling = backends.spelling_of(like)
    if ranks == [*range(dist.get_world_size())] and spelling == backends.spelling_of(world):
        return world
    known, key = _GROUPS.setdefault(world, {}), (spelling, tuple(ranks))
    if key not in known:
        known[key] = new_group(ranks, like)
    return known[key]


def mesh_over(ranks: list[int], like: DeviceMesh) -> DeviceMesh:
    """A mesh of one axis over these global ranks, with the device type of ``like``.

    Its group is that of `group_over`.
    """
    group, device_type = group_over(ranks, mesh_group(like, 0)), like.device_type
    known = _MESHES.setdefault(group, {})
    if device_type not in known:
        known[device_type] = DeviceMesh.from_group(group, device_type, mesh_dim_names=("data",))
    return known[device_type]


def mesh_group(mesh: DeviceMesh, axis: int) -> ProcessGroup:
    """The process group along one axis of a mesh.

    Raises:
        NotImplementedError: ``torch.compile`` traces. It would leave the collectives out.
    """
    compat.refuse_tracing("a collective on a sharded tensor")
    group: ProcessGroup = mesh.get_group(axis)
    return group


def axis_ranks(mesh: DeviceMesh, axis: int) -> list[int]:
    """The global ranks along one axis of a mesh, through the calling rank, in the axis' order.

    Placements count ranks in this order. The order in the mesh's process group may differ.
    """
    coordinate = mesh.get_coordinate()
    assert coordinate is not None, "the caller is part of the mesh"
    index = tuple(slice(None) if a == axis else c for a, c in enumerate(coordinate))
    ranks: list[int] = mesh.mesh[index].tolist()
    return ranks
