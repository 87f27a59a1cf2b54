"""The oracle of the redistribution tests: who holds which element, from the definition alone.

Nothing here uses the arithmetic of the library. A layout is a placement per mesh axis. `held`
cuts a tensor of element numbers with `torch.chunk` and slices; all else follows from it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import product

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.distributed.tensor.placement_types import Placement
from torch.utils._python_dispatch import TorchDispatchMode

from vescale_fsdp import RaggedShard, RaggedTensor

Shape = tuple[int, ...]
Layout = tuple[Placement, ...]


# --- who holds what -------------------------------------------------------------------------------


def held(shape: Shape, layout: Layout, sizes: Sequence[int], coordinate: Sequence[int]) -> Tensor:
    """Numbers of the elements at a coordinate of a mesh of ``sizes``, as its local tensor has them.

    The ``Shard``s cut first, from left to right; the ragged cut divides the storage of the rest.
    """
    part = torch.arange(math.prod(shape)).view(shape)
    for placement, size, index in zip(layout, sizes, coordinate, strict=True):
        if isinstance(placement, Shard):
            chunks = torch.chunk(part, size, placement.dim)
            missing = part.narrow(placement.dim, 0, 0)  # torch.chunk may give fewer than asked
            part = chunks[index] if index < len(chunks) else missing
    for placement, index in zip(layout, coordinate, strict=True):
        if isinstance(placement, RaggedShard):
            units = placement.local_units
            unit = part.numel() // sum(units) if sum(units) else 0
            unit = placement.elements_per_unit or unit  # then what is past the end is not there
            start = sum(units[:index]) * unit
            part = part.reshape(-1)[start : start + units[index] * unit]
    return part


def coordinates(sizes: Sequence[int]) -> list[tuple[int, ...]]:
    return list(product(*map(range, sizes)))


def is_ragged(layout: Layout) -> bool:
    return any(isinstance(placement, RaggedShard) for placement in layout)


def part_of(whole: Tensor, mesh: DeviceMesh, layout: Layout) -> Tensor:
    """What this rank's local tensor must be."""
    mine = held(tuple(whole.shape), layout, tuple(mesh.shape), mesh.get_coordinate())
    return whole.detach().reshape(-1)[mine]


def lay_out(
    whole: Tensor, mesh: DeviceMesh, layout: Layout, requires_grad: bool = False
) -> DTensor:
    """Of a tensor that every rank has. Along a ``Partial`` axis it is this rank's contribution."""
    return wrap(part_of(whole, mesh, layout).requires_grad_(requires_grad), whole, mesh, layout)


def wrap(local: Tensor, whole: Tensor, mesh: DeviceMesh, layout: Layout) -> DTensor:
    """Differentiable: ``local.grad`` is the gradient of the part."""
    if is_ragged(layout):
        return RaggedTensor.from_local(local, mesh, layout, shape=whole.shape)
    stride = torch.empty(whole.shape).stride()
    return DTensor.from_local(
        local, mesh, layout, run_check=False, shape=whole.shape, stride=stride
    )


def same_bits(x: Tensor, y: Tensor) -> bool:
    """Also NaN, -0.0, and dtypes that have no comparison."""
    if (x.dtype, x.shape) != (y.dtype, y.shape):
        return False
    first, second = (z.detach().contiguous().reshape(-1).view(torch.uint8) for z in (x, y))
    return torch.equal(first, second)


def assert_laid_out(x: Tensor, whole: Tensor, mesh: DeviceMesh, layout: Layout) -> None:
    """``x`` says that it is ``whole`` in this layout, and its part is that, bit for bit."""
    assert type(x) is (RaggedTensor if is_ragged(layout) else DTensor)
    assert x.placements == layout
    assert x.device_mesh == mesh
    assert x.shape == whole.shape
    assert x.dtype == whole.dtype
    assert x.stride() == torch.empty(whole.shape).stride()
    with torch.no_grad():
        local, expected = x.to_local(), part_of(whole, mesh, layout)
    assert same_bits(local, expected), (layout, tuple(whole.shape), local, expected)
    assert local.is_contiguous() or not is_ragged(layout)  # torch leaves gaps after padding


# --- layouts to try -------------------------------------------------------------------------------


def compositions(total: int, num_parts: int) -> Iterator[tuple[int, ...]]:
    """All ways to write ``total`` as so many numbers, zeros included, in order."""
    if num_parts == 1:
        yield (total,)
        return
    for first in range(total + 1):
        for rest in compositions(total - first, num_parts - 1):
            yield (first, *rest)


def unit_vectors(shape: Shape, num_shards: int) -> list[RaggedShard]:
    """Every RaggedShard that fits: owners, rows, columns, elements. None twice."""
    cuts: dict[RaggedShard, None] = {}
    for num_dims in range(len(shape) + 1):
        num_units = math.prod(shape[:num_dims])
        for units in compositions(num_units, num_shards):
            cuts[RaggedShard(range(num_dims), units)] = None
    return list(cuts)


def numbers(shape: Shape, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Normal numbers, the same on every rank; floating ones with what breaks arithmetic."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(shape, generator=generator) * 8
    if dtype.is_complex:
        return torch.complex(drawn, drawn.flip(0) if shape else -drawn).to(dtype)
    if dtype.is_floating_point and drawn.numel() > 4:
        drawn.view(-1)[1:4] = torch.tensor([float("nan"), -0.0, float("inf")])
    return (drawn > 0) if dtype == torch.bool else drawn.to(dtype)


def whole_numbers(shape: Shape, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Small integers: sums and products of a few are exact in any order. Multiples of 12."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randint(-3, 4, shape, generator=generator) * 12).to(dtype)


# --- traffic --------------------------------------------------------------------------------------


class Traffic(TorchDispatchMode):
    """Counts the collectives of this rank and the bytes that it gives to and gets from others.

    Sees every call of a process group from Python, also those of DTensor. What it does not know
    it refuses, so that nothing is forgotten. A broadcast of n bytes to three others sends 3 n.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []
        self.num_bytes_sent = 0
        self.num_bytes_received = 0
        self.num_bytes_gathered = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # what it does inside comes here again
        if func.namespace in ("c10d", "_c10d_functional"):
            self._count(func._schema.name.split("::")[1], args)
        return func(*args, **(kwargs or {}))

    def _count(self, name: str, args: Sequence[object]) -> None:
        if name in ("wait_tensor", "_wrap_tensor_autograd"):
            return
        self.calls.append(name)
        sent, received = _bytes_of(name, args, self)
        self.num_bytes_sent += sent
        self.num_bytes_received += received

    def __repr__(self) -> str:
        return f"{self.calls}: {self.num_bytes_sent} sent, {self.num_bytes_received} received"


def _bytes_of(name: str, args: Sequence[object], traffic: Traffic) -> tuple[int, int]:
    """Bytes to and from other ranks of one call, by the definition of the collective."""
    tensors = [arg for arg in args if isinstance(arg, Tensor)]
    if name == "alltoall_base_":
        output, sent = tensors
        rank, size = _rank_and_size(args[2])
        output_splits, input_splits = args[3:5]
        outgoing = input_splits or [sent.numel() // size] * size
        incoming = output_splits or [output.numel() // size] * size
        return (
            (sum(outgoing) - outgoing[rank]) * sent.element_size(),
            (sum(incoming) - incoming[rank]) * output.element_size(),
        )
    if name == "all_to_all_single":
        (sent,), (_, incoming, outgoing, group_name) = tensors, args
        rank = dist.distributed_c10d._resolve_process_group(group_name).rank()
        return (
            (sum(outgoing) - outgoing[rank]) * sent.nbytes // max(sent.numel(), 1),
            (sum(incoming) - incoming[rank]) * sent.nbytes // max(sent.numel(), 1),
        )
    if name == "_allgather_base_":
        output, part = tensors
        others = _rank_and_size(args[2])[1] - 1
        traffic.num_bytes_gathered += output.nbytes
        return part.nbytes * others, part.nbytes * others
    if name == "all_gather_into_tensor":
        others = args[1] - 1
        traffic.num_bytes_gathered += tensors[0].nbytes * args[1]
        return tensors[0].nbytes * others, tensors[0].nbytes * others
    if name == "broadcast_":
        (tensor,), group, root = args[:3]
        rank, size = _rank_and_size(group)
        return (tensor.nbytes * (size - 1), 0) if rank == root else (0, tensor.nbytes)
    if name in ("allreduce_", "all_reduce", "all_reduce_"):
        tensor = args[0][0] if isinstance(args[0], list | tuple) else args[0]
        return tensor.nbytes * 2, tensor.nbytes * 2  # at least; the tests only say "none"
    if name in ("_reduce_scatter_base_", "reduce_scatter_tensor"):
        size = args[2] if name == "reduce_scatter_tensor" else _rank_and_size(args[2])[1]
        given = tensors[-1]
        return given.nbytes * (size - 1) // size, given.nbytes * (size - 1) // size
    raise AssertionError(f"unknown collective: {name}")


def _rank_and_size(boxed: object) -> tuple[int, int]:
    group = dist.ProcessGroup.unbox(boxed)
    return group.rank(), group.size()


def num_elements_moved(
    shape: Shape, source: Layout, target: Layout, sizes: Sequence[int]
) -> tuple[dict[tuple[int, ...], int], dict[tuple[int, ...], int]]:
    """The least numbers of elements to send and to receive by coordinate; no ``Partial``s.

    Element by element: who needs it and does not have it. Where it has several holders it does
    not matter here which of them sends: the first is counted.
    """
    has, needs = (
        {at: set(held(shape, it, sizes, at).reshape(-1).tolist()) for at in coordinates(sizes)}
        for it in (source, target)
    )
    sent = dict.fromkeys(has, 0)
    received = {at: len(needs[at] - has[at]) for at in has}
    for element in range(math.prod(shape)):
        holder = next(at for at in has if element in has[at])
        sent[holder] += sum(element in needs[at] and element not in has[at] for at in has)
    return sent, received


# --- partial values -------------------------------------------------------------------------------


def contribution(shape: Shape, rank: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """What ``rank`` adds to a partial tensor. Every rank can compute that of every other."""
    return whole_numbers(shape, seed=100 + rank, dtype=dtype)


def combined(contributions: Sequence[Tensor], reduce_op: str) -> Tensor:
    """The whole tensor that the contributions stand for, one after the other."""
    stack = torch.stack(list(contributions))
    if reduce_op in ("sum", "avg"):
        total = contributions[0].clone()
        for other in contributions[1:]:
            total = total + other
        return total / len(contributions) if reduce_op == "avg" else total
    if reduce_op == "product":
        return stack.prod(0).to(stack.dtype)
    return stack.amin(0) if reduce_op == "min" else stack.amax(0)


def is_partial(layout: Layout) -> bool:
    return any(isinstance(placement, Partial) for placement in layout)
