"""Process groups of our own, and collectives on them.

A collective is looked up in ``torch.distributed`` at the time of the call, so that tools can count.
"""

from __future__ import annotations

import datetime
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp, Work
from torch.distributed.device_mesh import DeviceMesh

from vescale_fsdp import backends, devices, waiting


def _start(
    start: Callable[..., Work],
    what: str,
    group: ProcessGroup,
    output: Tensor,
    *inputs: Tensor,
    **options: Any,
) -> Work:
    """Start a collective, on copies where the group cannot reach a tensor.

    Args:
        output: written as a whole; if there are no inputs, it is read too.
    """
    there, device = output, backends.collective_device(group, output.device)
    if device != output.device:
        there = torch.empty_like(output, device=device) if inputs else output.to(device)
    sent = [each.to(backends.collective_device(group, each.device)) for each in inputs]
    work = start(there, *sent, group=group, async_op=True, **options)
    work = waiting.bounded(work, there, group, what)
    return work if there is output else cast(Work, backends.Detour(work, there, output))


def all_gather_single(output: Tensor, input: Tensor, group: ProcessGroup) -> Work:
    """Start an even all-gather into one flat tensor."""
    if input.dtype.itemsize == 1:  # gloo does not know floats of eight bits
        output, input = output.view(torch.uint8), input.view(torch.uint8)
    return _start(dist.all_gather_single, "an all-gather", group, output, input)


def reduce_scatter_single(output: Tensor, input: Tensor, op: Any, group: ProcessGroup) -> Work:
    """Start an even reduce-scatter of one flat tensor."""
    return _start(dist.reduce_scatter_single, "a reduce-scatter", group, output, input, op=op)


def all_gather_uneven(outputs: list[Tensor], input: Tensor, group: ProcessGroup) -> Work:
    """Start an all-gather of parts of several sizes. ``input`` may be this rank's output."""
    work = dist.all_gather(outputs, input, group=group, async_op=True)
    return waiting.bounded(work, input, group, "an all-gather")


def gather_uneven(
    outputs: list[Tensor], input: Tensor, receiver: int, group: ProcessGroup
) -> devices.Waitable | None:
    """Start a gather of parts of several sizes to one rank of the group.

    Empty parts are sent too: NCCL sets a communicator up when all of its ranks come.

    Args:
        outputs: on the receiver; nothing is done with its own one.
        input: on the others.
    """
    if dist.get_rank(group) == receiver:
        each = enumerate(outputs)
        pairs = [(dist.irecv, part, rank) for rank, part in each if rank != receiver]
    else:
        pairs = [(dist.isend, input, receiver)]  # type: ignore[list-item]
    operations = [
        dist.P2POp(kind, part, group=group, group_peer=peer) for kind, part, peer in pairs
    ]
    return _All(dist.batch_isend_irecv(operations)) if operations else None


class _All:
    """Several works. Waits like one."""

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
    """Start an all-to-all of one flat tensor: even, or by the elements for and from each rank."""
    splits = {"output_split_sizes": output_splits, "input_split_sizes": input_splits}
    return _start(dist.all_to_all_single, "an all-to-all", group, output, input, **splits)


def all_reduce(tensor: Tensor, group: ProcessGroup, op: Any = ReduceOp.SUM) -> Work:
    """Start a sum over the ranks of ``group``, or what ``op`` says, in place."""
    return _start(dist.all_reduce, "an all-reduce", group, tensor, op=op)


def broadcast(tensor: Tensor, source: int, group: ProcessGroup) -> Work:
    """Start a broadcast from a global rank."""
    return _start(dist.broadcast, "a broadcast", group, tensor, src=source)


def all_gather_many(outputs: list[Tensor], inputs: list[Tensor], group: ProcessGroup) -> Any:
    """Start several even all-gathers as one operation, where the group's backend has that."""
    with dist.distributed_c10d._coalescing_manager(group, async_ops=True) as several:
        for output, input in zip(outputs, inputs, strict=True):
            all_gather_single(output, input, group)
    return several


def reduce_scatter_many(
    outputs: list[Tensor], inputs: list[Tensor], op: Any, group: ProcessGroup
) -> Any:
    """Start several even reduce-scatters as one operation, where the group's backend has that."""
    with dist.distributed_c10d._coalescing_manager(group, async_ops=True) as several:
        for output, input in zip(outputs, inputs, strict=True):
            reduce_scatter_single(output, input, op, group)
    return several


def allocates(group: ProcessGroup, device: torch.device) -> bool:
    """Whether the backend of ``group`` can allocate memory for its collectives."""
    return bool(backends.backend_of(group, device).supports_tensor_alloc(device))


def symmetric_memory(device: torch.device) -> AbstractContextManager[None]:
    """A context in which this thread allocates memory that all ranks can reach."""
    from torch.distributed import _symmetric_memory as symmetric

    return devices.allocating_in(symmetric.get_mem_pool(device), device)


def uses_symmetric_memory(collective: object) -> bool:
    """Whether a custom gather is FSDP2's, through symmetric memory."""
    return is_fsdp2_collective(collective) and "SymmMem" in type(collective).__name__


def is_fsdp2_collective(collective: object) -> bool:
    """Whether a custom gather or reduce-scatter is one of FSDP2's own."""
    return type(collective).__module__.startswith("torch.distributed.fsdp.")


def new_group(ranks: list[int], like: ProcessGroup | None = None) -> ProcessGroup:
    """A communicator of its own for these global ranks, in this order; only they have to call.

    Args:
        like: a group whose backends it shall have, such as that of a mesh; None for the default
            group.
    """
    like = like or dist.group.WORLD
    assert like is not None, "a group is made in an initialised torch.distributed"
    # The timeout of `init_process_group`, which new groups do not take over by themselves.
    timeout = waiting.timeout_of(dist.group.WORLD)
    options: dict[str, Any] = {"backend": backends.spelling_of(like), "timeout": timeout}
    kinds = [kind for kind, name in backends.backends_of(like).items() if name == "nccl"]
    if kinds and dist.is_nccl_available():
        options["pg_options"] = nccl_options(timeout, like, kinds[0])
    with _not_split():
        group = dist.new_group(ranks, use_local_synchronization=True, sort_ranks=False, **options)
    assert isinstance(group, ProcessGroup), "the caller is one of the ranks"
    waiting.register(group)
    return group


def new_gloo_group() -> ProcessGroup | None:
    """A group of all ranks for messages on the CPU, for a long wait. All ranks call.

    None, the default group, in a build without gloo.
    """
    if not dist.is_gloo_available():
        return None
    default, long = waiting.timeout_of(dist.group.WORLD), datetime.timedelta(minutes=30)
    with _not_split():
        timeout = long if default is None else max(default, long)
        group: ProcessGroup = dist.new_group(backend="gloo", timeout=timeout)
    return group


def nccl_options(timeout: datetime.timedelta | None, like: ProcessGroup, device_type: str) -> Any:
    """Those of the group ``like``, but on streams of high priority, as FSDP2's are.

    A collective is a few blocks. They start before those of a long kernel that was queued earlier.
    """
    nccl: Any = dist.ProcessGroupNCCL  # not in builds for CPUs
    options = nccl.Options(is_high_priority_stream=True)
    # With it a user says how collectives run, by copy engines for example.
    given = backends.backend_of(like, device_type).options
    options.config = getattr(given, "config", options.config)
    if timeout is not None:
        options._timeout = timeout
    return options


@contextmanager
def _not_split() -> Iterator[None]:
    """Within it, new groups are not split from the default group.

    Where that was given its device (``init_process_group(device_id=...)``) NCCL would split it, and
    all of its ranks would have to call. Those of another pipeline stage do not.
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


# By default group: a new world has new communicators. Meshes by their group.
_GROUPS: weakref.WeakKeyDictionary[ProcessGroup, dict[Any, ProcessGroup]]
_MESHES: weakref.WeakKeyDictionary[ProcessGroup, dict[str, DeviceMesh]]
_GROUPS, _MESHES = weakref.WeakKeyDictionary(), weakref.WeakKeyDictionary()


def group_over(ranks: list[int], like: ProcessGroup) -> ProcessGroup:
    """A communicator over these global ranks, in this order, made at first use and kept.

    All of them call. It has the backends of ``like``.
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
    """A mesh of one axis over global ranks as in `group_over`, with the devices of ``like``."""
    group, device_type = group_over(ranks, mesh_group(like, 0)), like.device_type
    known = _MESHES.setdefault(group, {})
    if device_type not in known:
        known[device_type] = DeviceMesh.from_group(group, device_type, mesh_dim_names=("data",))
    return known[device_type]


def mesh_group(mesh: DeviceMesh, axis: int) -> ProcessGroup:
    """The process group along one axis of a mesh."""
    group: ProcessGroup = mesh.get_group(axis)
    return group


def axis_ranks(mesh: DeviceMesh, axis: int) -> list[int]:
    """The global ranks along one axis of a mesh through the caller, in the order of the axis.

    That order is the one that placements go by; the mesh's own process group may have another.
    """
    coordinate = mesh.get_coordinate()
    assert coordinate is not None, "the caller is part of the mesh"
    index = tuple(slice(None) if a == axis else c for a, c in enumerate(coordinate))
    ranks: list[int] = mesh.mesh[index].tolist()
    return ranks
