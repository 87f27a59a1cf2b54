"""`CheckpointableTensor`, the protocol of ``torch.distributed.checkpoint`` since torch 2.14.

Ours has its attributes with torch 2.13, too. A saver that knows nothing but the protocol saves and
loads our models, and torch's own functions find the chunks that DCP asks our methods for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner_helpers import _create_chunk_list, _create_write_items
from torch.distributed.checkpoint.utils import find_tensor_shard
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard as stock_fully_shard
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor.debug import CommDebugMode

from vescale_fsdp import Granularity, RaggedShard, RaggedTensor, compat, fully_shard
from vescale_fsdp.ragged.tensor import make_spec, wrap_local
from vescale_fsdp.testing import run_ranks

Protocol = getattr(dcp, "CheckpointableTensor", None)  # None with torch 2.13

Whole = dict[str, Tensor]


class Net(nn.Module):
    """No number of rows is divisible by 2 or 3; a scalar, and one without elements."""

    def __init__(self, *, all_kinds: bool = True) -> None:
        super().__init__()
        self.linear = nn.Linear(13, 7)
        self.conv = nn.Conv2d(3, 5, 3)
        self.row = nn.Parameter(torch.zeros(1, 9, 1))
        if all_kinds:
            self.scale = nn.Parameter(torch.tensor(0.0))
            self.nothing = nn.Parameter(torch.zeros(3, 0))
        with torch.no_grad():
            for number, param in enumerate(self.parameters()):  # different numbers
                param.copy_(torch.arange(param.numel()).view(param.shape) + 1000 * number)


GRANULARITIES: dict[str, Granularity | None] = {
    "anywhere": None,
    "rows": Granularity.rows(1),
    "elements": Granularity.elements(4),
    "owners": Granularity.whole(),
}


def hsdp() -> DeviceMesh:
    return init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("a", "b"))


def make(kind: str) -> nn.Module:
    net = Net()
    mesh = hsdp() if kind == "hsdp" else None
    for module in (net.linear, net):
        fully_shard(module, mesh=mesh, granularity=GRANULARITIES.get(kind))
    return net


def make_stock(kind: str) -> nn.Module:
    net = Net(all_kinds=False)  # which it can shard
    mesh = hsdp() if kind == "hsdp" else None
    for module in (net.linear, net):
        stock_fully_shard(module, mesh=mesh)
    return net


# --- chunks ---------------------------------------------------------------------------------------


def assert_covered(net: nn.Module, chunks_of: Callable[[Tensor], Any], replicas: int) -> None:
    """The chunks of all ranks cover each parameter once for each replica."""
    mine = {
        name: [(tuple(each.offsets), tuple(each.sizes)) for each in chunks_of(param)]
        for name, param in net.named_parameters()
    }
    everyones: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, mine)
    for name, param in net.named_parameters():
        times = torch.zeros(param.shape, dtype=torch.int64)
        for found in everyones:
            for offsets, sizes in found[name]:
                times[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))] += 1
        assert (times == replicas).all(), f"{name}: {everyones}"


def protocol_chunks(tensor: Any) -> Any:
    """By torch's own function, which looks at nothing but the protocol."""
    from torch.distributed.checkpoint.protocol import _get_checkpointable_tensor_chunks

    return _get_checkpointable_tensor_chunks(tensor)


def check_chunks(kinds: list[str]) -> None:
    for kind in kinds:
        replicas = 2 if kind == "hsdp" else 1
        assert_covered(make_stock(kind), _create_chunk_list, replicas)
        net = make(kind)
        assert_covered(net, _create_chunk_list, replicas)
        if Protocol is not None:
            assert_covered(net, protocol_chunks, replicas)
        for param in net.parameters():
            check_attributes(param)


def check_attributes(param: Any) -> None:
    """They and the three methods say the same, and DCP gets views of the shard."""
    with CommDebugMode() as traffic:
        chunks = _create_chunk_list(param)
        items = _create_write_items("w", param)
        if Protocol is not None:
            assert isinstance(param, Protocol)
        assert param.global_shape == tuple(param.shape)
        assert param.global_offsets == param.local_offsets
        assert param.global_offsets == tuple(tuple(chunk.offsets) for chunk in chunks)
        assert param.local_sizes == tuple(tuple(chunk.sizes) for chunk in chunks)
        assert [item.tensor_data.chunk for item in items] == chunks
        shards = [find_tensor_shard(param, item.index) for item in items]
        parts = [part for _, part in boxes(param)]
        if Protocol is not None and param.dim():  # else torch's returns the tensor itself
            from torch.distributed.checkpoint.protocol import _get_checkpointable_tensor_shard

            shards += [_get_checkpointable_tensor_shard(param, item.index) for item in items]
            parts *= 2
    assert traffic.get_total_counts() == 0
    for item in items:
        assert item.tensor_data.size == param.shape
        assert item.tensor_data.properties.dtype == param.dtype
        assert item.tensor_data.properties.pin_memory is False
    for part, shard in zip(parts, shards, strict=True):
        assert type(part) is type(shard) is Tensor
        assert part.shape == shard.shape
        assert part.data_ptr() == shard.data_ptr()


@pytest.mark.parametrize(("world_size", "kinds"), [(3, list(GRANULARITIES)), (4, ["hsdp"])])
def test_chunks_cover_each_parameter_once_as_those_of_fsdp2_do(
    world_size: int, kinds: list[str]
) -> None:
    run_ranks(check_chunks, world_size, kinds)


# --- a saver that knows the protocol only ---------------------------------------------------------


def boxes(tensor: Any) -> Iterator[tuple[tuple[int, ...], Tensor]]:
    """Where each box of a tensor begins in the whole, and its view: all that a saver needs."""
    for at, offsets, sizes in zip(
        tensor.global_offsets, tensor.local_offsets, tensor.local_sizes, strict=True
    ):
        index = tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))
        yield at, tensor[index]


def save_by_protocol(folder: Path, state: dict[str, Any]) -> None:
    found = [
        (name, tuple(tensor.global_shape), at, part.detach().clone())
        for name, tensor in state.items()
        for at, part in boxes(tensor)
    ]
    torch.save(found, folder / f"{dist.get_rank()}.pt")


def load_by_protocol(folder: Path, state: dict[str, Any]) -> None:
    wholes: Whole = {}
    for file in sorted(folder.glob("*.pt")):
        for name, shape, at, part in torch.load(file, weights_only=True):
            whole = wholes.setdefault(name, torch.full(shape, math.nan))
            whole[tuple(slice(o, o + n) for o, n in zip(at, part.shape, strict=True))] = part
    for name, tensor in state.items():
        for at, part in boxes(tensor):
            index = tuple(slice(o, o + n) for o, n in zip(at, part.shape, strict=True))
            part.copy_(wholes[name][index])


def save_net(folder: Path, kind: str) -> None:
    net = make(kind)
    with CommDebugMode() as traffic:
        save_by_protocol(folder, net.state_dict())
    assert traffic.get_total_counts() == 0


def load_net(folder: Path, kinds: list[str]) -> None:
    for kind in kinds:
        net = make(kind)
        with torch.no_grad():
            for param in net.parameters():
                param.fill_(-1.0)
        with CommDebugMode() as traffic:
            load_by_protocol(folder, net.state_dict())
        assert traffic.get_total_counts() == 0
        for name, expected in Net().named_parameters():
            assert torch.equal(net.get_parameter(name).full_tensor(), expected), (kind, name)


@pytest.mark.parametrize(
    ("kind", "world_size", "others", "loaded_by"),
    [
        ("anywhere", 2, ["elements", "rows", "owners"], 3),
        ("owners", 3, ["anywhere", "elements"], 2),
        ("hsdp", 4, ["anywhere"], 3),
    ],
)
def test_a_saver_of_others_saves_and_loads(
    tmp_path: Path, kind: str, world_size: int, others: list[str], loaded_by: int
) -> None:
    run_ranks(save_net, world_size, tmp_path, kind)
    run_ranks(load_net, loaded_by, tmp_path, others)


# --- slices ---------------------------------------------------------------------------------------


def check_slices() -> None:
    mesh, rank = init_device_mesh("cpu", (2,)), dist.get_rank()
    whole = torch.arange(20.0).view(4, 5)
    x = RaggedTensor.distribute(whole, mesh, [RaggedShard((0, 1), (7, 13))])
    # A part of a box, as a saver writes it that has little memory.
    (i, j), (rows, columns) = x.local_offsets[-1], x.local_sizes[-1]
    part = x[i : i + 1, j + 1 : j + columns]
    assert type(part) is Tensor
    i, j = int(i), int(j)
    assert torch.equal(part, whole[i : i + 1, j + 1 : j + columns])
    # What is not in one box is an error, on the rank that asks.
    at = x.local_offsets[0]
    with pytest.raises(IndexError, match=r"must be of one of the boxes of this rank, which are"):
        x[at[0] : 4, at[1] : 5]
    with pytest.raises(IndexError, match="begin with local offsets"):
        x[at[0] :, at[1] :]
    # Other numbers are those of a DTensor.
    for found in (x[0:2], x[0:2, 0:5], x[1, 1:3], x[i : i + rows, j : j + columns], x[None]):
        assert isinstance(found, DTensor)
    assert torch.equal(x[0:2].full_tensor(), whole[0:2])
    assert torch.equal(x[1:2, 1:3].full_tensor(), whole[1:2, 1:3])
    # Of a tensor without dimensions one rank has the number.
    scalar = RaggedTensor.distribute(torch.tensor(3.0), mesh, [RaggedShard.owner(1, 2)])
    assert scalar.local_offsets == (((),) if rank == 1 else ())
    assert type(scalar[()]) is (Tensor if rank == 1 else RaggedTensor)


def test_slices_by_local_offsets_are_views_of_the_shard() -> None:
    run_ranks(check_slices, 2)


# --- who holds nothing, or what is not sharded ----------------------------------------------------


def save_on_some_ranks(path: Path) -> None:
    """The third rank is not in the mesh of the tensors."""
    mesh, whole = DeviceMesh("cpu", [0, 1]), torch.arange(35.0).view(5, 7)
    is_outside = dist.get_rank() == 2
    saved, loaded = (
        RaggedTensor.distribute(each, mesh, [RaggedShard((0, 1), units)])
        if not is_outside
        else wrap_local(
            torch.empty(0), make_spec(mesh, [RaggedShard((0, 1), units)], (5, 7), each.dtype), False
        )
        for each, units in ((whole, (12, 23)), (torch.zeros(5, 7), (30, 5)))
    )
    if is_outside:
        assert saved.global_offsets == saved.local_offsets == saved.local_sizes == ()
    if Protocol is not None:
        assert isinstance(saved, Protocol)
    dcp.save({"w": saved}, checkpoint_id=path)
    dcp.load({"w": loaded}, checkpoint_id=path)
    if not is_outside:
        assert torch.equal(loaded.full_tensor(), whole)


def test_a_rank_outside_of_the_mesh_holds_nothing(tmp_path: Path) -> None:
    run_ranks(save_on_some_ranks, 3, tmp_path)


def check_whole_and_partial(path: Path) -> None:
    net = Net()
    fully_shard(net, sharding="ddp")
    for param in net.parameters():  # as of any DTensor: the whole, which DCP saves once
        (chunk,) = _create_chunk_list(param)
        assert (tuple(chunk.offsets), chunk.sizes) == ((0,) * param.dim(), param.shape)
        shard = find_tensor_shard(param, MetadataIndex("w", chunk.offsets))
        assert shard.data_ptr() == compat.local_tensor(param).data_ptr()
    dcp.save(net.state_dict(), checkpoint_id=path)
    other = make("anywhere")
    with torch.no_grad():
        for param in other.parameters():
            param.fill_(-1.0)
    dcp.load(other.state_dict(), checkpoint_id=path)
    for name, expected in Net().named_parameters():
        assert torch.equal(other.get_parameter(name).full_tensor(), expected), name
    # What is not summed yet is no value to save, or to load into.
    mesh = init_device_mesh("cpu", (2, 1))
    cut = RaggedShard((0,), (4,))
    part = RaggedTensor.from_local(torch.ones(8), mesh, [Partial(), cut], shape=(4, 2))
    for ask in (lambda: _create_write_items("w", part), lambda: _create_chunk_list(part)):
        with pytest.raises(ValueError, match="partial placements"):
            ask()


def test_replicated_parameters_are_one_chunk_and_partial_tensors_are_refused(
    tmp_path: Path,
) -> None:
    run_ranks(check_whole_and_partial, 2, tmp_path)


# --- torch before 2.14 ----------------------------------------------------------------------------


def check_by_hand() -> None:
    from vescale_fsdp.compat import checkpoints

    for kind in GRANULARITIES:
        for name, param in make(kind).named_parameters():
            assert checkpoints.chunks_by_hand(param) == checkpoints.chunk_list(param)
            found = checkpoints.write_items_by_hand(name, param)
            expected = checkpoints.write_items(name, param)
            assert found == expected
            for items in (found, expected):
                assert [each.index.index for each in items] == list(range(len(items)))


def test_older_torch_gets_the_same() -> None:
    run_ranks(check_by_hand, 2)
