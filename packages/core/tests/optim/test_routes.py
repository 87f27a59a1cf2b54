"""All ranks of a world that does not exist: their routes must fit together."""

import math
from itertools import product

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import Replicate, Shard

from vescale_fsdp import RaggedShard
from vescale_fsdp.optim.layout import Layout, Matrix, matrices_of
from vescale_fsdp.optim.routes import Bucket, Run, routes_of, traffic_of
from vescale_fsdp.ragged.holdings import holding_of

RANKS = (0, 1, 2, 3)
WORLD = tuple(
    Layout(shape, placements, mesh_shape, RANKS)
    for shape, placements, mesh_shape in [
        ((6, 4), (RaggedShard((0, 1), (5, 0, 11, 8)),), (4,)),
        ((3, 4, 5), (RaggedShard((0, 1, 2), (10, 30, 13, 7)),), (4,)),
        ((8, 3), (Shard(0),), (4,)),
        ((4, 6), (RaggedShard((0,), (1, 1), split_factor=2), Shard(0)), (2, 2)),
        ((4, 6), (RaggedShard((0,), (1, 3)), Shard(1)), (2, 2)),
        ((5, 4), (Replicate(), RaggedShard((0, 1), (7, 13))), (2, 2)),
        ((5, 4), (Replicate(), RaggedShard.owner(1, 2)), (2, 2)),
        ((4, 4), (RaggedShard.owner(2, 4),), (4,)),
    ]
)
MATRICES: list[Matrix] = [m for i, layout in enumerate(WORLD) for m in matrices_of(layout, i)]
# Each owner has something, also of what it holds no part of.
OWNERS = [(3 * index + 1) % 4 for index in range(len(MATRICES))]
GRIDS = [layout.grid() for layout in WORLD]


def locals_of(layout: Layout) -> dict[int, Tensor]:
    """The flat local tensor of each rank; elements are their places in the parameter."""
    whole = torch.arange(math.prod(layout.shape)).view(layout.shape)
    coordinates = product(*map(range, layout.mesh_shape))
    found = {}
    for rank, at in zip(layout.ranks, coordinates, strict=True):
        boxes = holding_of(layout.shape, layout.placements, layout.mesh_shape, at).boxes
        found[rank] = torch.cat([whole.new_empty(0), *(b.of(whole).reshape(-1) for b in boxes)])
    return found


def all_routes(order: tuple[int, ...] = RANKS, bucket_elements: int = 8) -> dict[int, list[Bucket]]:
    costs = [m.numel for m in MATRICES]
    return {
        rank: routes_of(MATRICES, OWNERS, costs, GRIDS, order, rank, bucket_elements).buckets
        for rank in RANKS
    }


def delivered(
    packed: dict[int, Tensor], counts: dict[int, list[int]], order: tuple[int, ...]
) -> dict[int, Tensor]:
    """What an all-to-all gives to each rank."""
    chunks = {rank: packed[rank].split(counts[rank]) for rank in order}
    return {r: torch.cat([chunks[s][place] for s in order]) for place, r in enumerate(order)}


@pytest.mark.parametrize("order", [RANKS, (2, 0, 3, 1)])
def test_matrices_arrive_whole_and_results_go_to_all_who_hold_parts(order: tuple[int, ...]) -> None:
    routes = all_routes(order)
    values = [locals_of(layout) for layout in WORLD]
    results = [{rank: torch.full_like(v[rank], -1) for rank in RANKS} for v in values]
    whole = [torch.arange(m.first, m.first + m.numel).view(m.rows, m.cols) for m in MATRICES]
    computed = []
    assert len({len(buckets) for buckets in routes.values()}) == 1

    def flat(tensors: list[Tensor]) -> Tensor:
        return torch.cat([torch.empty(0, dtype=torch.long), *(t.reshape(-1) for t in tensors)])

    for buckets in zip(*(routes[rank] for rank in RANKS), strict=True):
        here = dict(zip(RANKS, buckets, strict=True))
        sent = {
            rank: flat([values[run.param][rank][run.start : run.stop] for run in bucket.sends])
            for rank, bucket in here.items()
        }
        received = delivered(sent, {r: b.send_counts for r, b in here.items()}, order)
        for rank, bucket in here.items():
            assert len(received[rank]) == sum(bucket.receive_counts)
            for index in [*bucket.ready, *bucket.gathered]:
                computed.append(index)
                assert OWNERS[index] == rank
                matrix, found = MATRICES[index], torch.full_like(whole[index], -1)
                parts = bucket.assembly.get(index) or [(part, None) for part in matrix.parts]
                for part, start in parts:
                    if start is None:
                        values_here = values[matrix.param][rank][part.local :][: part.numel]
                    else:
                        values_here = received[rank][start : start + part.numel]
                    part.of(found).copy_(values_here.view(part.of(found).shape))
                    if start is None:
                        results[matrix.param][rank][part.local :][: part.numel] = values_here
                assert torch.equal(found, whole[index])
        returned = {
            rank: flat([part.of(whole[index]) for index, part in bucket.returns])
            for rank, bucket in here.items()
        }
        arrived = delivered(returned, {r: b.return_counts for r, b in here.items()}, order)
        for rank, bucket in here.items():
            at = 0
            for run, _ in bucket.arrivals:
                length = run.stop - run.start
                results[run.param][rank][run.start : run.stop] = arrived[rank][at : at + length]
                at += length
            assert at == len(arrived[rank]) == sum(bucket.arrival_counts)
    assert sorted(computed) == list(range(len(MATRICES)))
    for found, expected in zip(results, values, strict=True):
        for rank in RANKS:
            assert torch.equal(found[rank], expected[rank])


def test_traffic_is_what_the_buckets_send() -> None:
    routes = all_routes()
    traffic = traffic_of(MATRICES, OWNERS, GRIDS, RANKS)
    for place, rank in enumerate(RANKS):
        assert traffic.gathers[place] == sum(sum(b.send_counts) for b in routes[rank])
        assert traffic.scatters[place] == sum(sum(b.return_counts) for b in routes[rank])
    assert all(b.send_counts[rank] == 0 for rank in RANKS for b in routes[rank])
    assert traffic.num_whole == sum(len(b.ready) for buckets in routes.values() for b in buckets)


def test_a_matrix_that_is_whole_on_its_owner_is_not_sent() -> None:
    layout = Layout((4, 4), (RaggedShard.owner(2, 4),), (4,), RANKS)
    (matrix,) = matrices_of(layout)
    traffic = traffic_of([matrix], [2], [layout.grid()], RANKS)
    assert (traffic.gathers, traffic.scatters, traffic.num_whole) == ((0,) * 4, (0,) * 4, 1)
    (bucket,) = routes_of([matrix], [2], [1], [layout.grid()], RANKS, 2, 9).buckets
    assert (bucket.ready, bucket.longest_send, bucket.longest_return) == ([0], 0, 0)


def test_a_replica_gathers_inside_and_all_replicas_get_the_result() -> None:
    layout = Layout((4, 5), (Replicate(), RaggedShard((0,), (1, 3))), (2, 2), RANKS)
    (matrix,) = matrices_of(layout)
    traffic = traffic_of([matrix], [3], [layout.grid()], RANKS)
    # Rank 2 is in the replica of rank 3 and has a row of 5. Back go 5 to it, 5 to 0, 15 to 1.
    assert traffic.gathers == (0, 0, 5, 0)
    assert traffic.scatters == (0, 0, 0, 25)


def test_runs_that_follow_each_other_are_one() -> None:
    """Six experts, of which rank 0 holds four: three for rank 1 to compute leave in one run."""
    layout = Layout((6, 2, 3), (RaggedShard((0,), (4, 2)),), (2,), (0, 1))
    matrices, owners = matrices_of(layout), [0, 1, 1, 1, 1, 1]
    costs, grids = [1] * 6, [layout.grid()]
    (bucket,) = routes_of(matrices, owners, costs, grids, (0, 1), 0, 10**6).buckets
    assert bucket.sends == [Run(0, 6, 24)]
    assert bucket.arrivals == [(Run(0, 6, 24), 1)]


def test_buckets_have_equal_shares_of_each_owner() -> None:
    """32 matrices of 2^16 elements on 2 ranks, each missing half of each: 2^20 to gather a rank."""
    layout = Layout((32, 256, 256), (Shard(1),), (2,), (0, 1))
    matrices = matrices_of(layout)
    owners = [index % 2 for index in range(32)]
    for bucket_elements, num_buckets in ((1 << 30, 4), (1 << 19, 4), (1 << 17, 4), (1 << 16, 8)):
        buckets = routes_of(
            matrices, owners, [1] * 32, [layout.grid()], (0, 1), 0, bucket_elements
        ).buckets
        assert [len(bucket.gathered) for bucket in buckets] == [16 // num_buckets] * num_buckets


def test_what_is_ready_is_spread_over_the_buckets() -> None:
    """So that every gather has something to hide under."""
    ready = Layout((16, 256, 256), (RaggedShard.owner(0, 2),), (2,), (0, 1))
    split = Layout((16, 256, 256), (Shard(1),), (2,), (0, 1))
    matrices = [*matrices_of(ready), *matrices_of(split, 1)]
    grids = [ready.grid(), split.grid()]
    buckets = routes_of(matrices, [0] * 32, [1] * 32, grids, (0, 1), 0, 1 << 17).buckets
    assert [(len(b.ready), len(b.gathered)) for b in buckets] == [(8, 8)] * 2
