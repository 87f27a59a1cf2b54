from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from vescale_fsdp import RaggedShard
from vescale_fsdp.optim import transport as module
from vescale_fsdp.optim.base import local_of
from vescale_fsdp.optim.layout import Matrix, layout_of, matrices_of
from vescale_fsdp.optim.routes import Run, routes_of, traffic_of
from vescale_fsdp.optim.transport import Transport, from_tensors
from vescale_fsdp.ranks import collectives
from vescale_fsdp.testing import run_ranks

from .preconditioning import randn, sharded

SHAPES = [(6, 4), (3, 4, 5), (5, 7)]


class World:
    """Parameters on three ranks, cut by a ragged shard, rows and columns; owners in turn."""

    def __init__(self, bucket_elements: int, scale: int = 1) -> None:
        self.mesh = init_device_mesh("cpu", (3,))
        shapes = [(*shape[:-1], shape[-1] * scale) for shape in SHAPES]
        ragged = RaggedShard((0, 1, 2), (7, 0, 53))
        cuts = [Shard(0), ragged, Shard(1)]
        self.wholes = [randn(index, shape) for index, shape in enumerate(shapes)]
        self.params = [
            sharded(whole, self.mesh, [cut]) for whole, cut in zip(self.wholes, cuts, strict=True)
        ]
        layouts = [layout_of(param) for param in self.params]
        self.matrices: list[Matrix] = []
        for index, layout in enumerate(layouts):
            self.matrices += matrices_of(layout, index)
        self.owners = [index % 3 for index in range(len(self.matrices))]
        self.grids = [layout.grid() for layout in layouts]
        costs = [1] * len(self.matrices)
        self.routes = routes_of(
            self.matrices,
            self.owners,
            costs,
            self.grids,
            range(3),
            dist.get_rank(),
            bucket_elements,
        )

    def transport(self, gather: torch.dtype, scatter: torch.dtype) -> Transport:
        return Transport(
            self.matrices,
            self.routes,
            collectives.mesh_group(self.mesh, 0),
            gather_dtype=gather,
            scatter_dtype=scatter,
            device=torch.device("cpu"),
        )

    def run(
        self,
        compute: Callable[[int, Tensor], Tensor],
        gather: torch.dtype = torch.float32,
        scatter: torch.dtype = torch.float32,
    ) -> list[Tensor]:
        """Results in the local tensors."""
        results = [torch.full_like(local_of(param), float("nan")) for param in self.params]
        flat = [result.view(-1) for result in results]

        def sink(run: Run, index: int, values: Tensor) -> None:
            assert flat[run.param][run.start : run.stop].isnan().all(), "there is a result already"
            assert self.matrices[index].param == run.param
            flat[run.param][run.start : run.stop] = values

        source = from_tensors([local_of(param) for param in self.params])
        self.transport(gather, scatter).run(source, compute, sink)
        return results

    def matrix(self, index: int) -> Tensor:
        matrix = self.matrices[index]
        whole = self.wholes[matrix.param].reshape(-1)
        return whole[matrix.first : matrix.first + matrix.numel].view(matrix.rows, matrix.cols)

    def expected(self, result_of: Callable[[Tensor], Tensor]) -> list[Tensor]:
        """The local parts of results of all matrices."""
        parts = []
        for whole, param in zip(self.wholes, self.params, strict=True):
            result = torch.stack([result_of(m) for m in whole.view(-1, *whole.shape[-2:])])
            parts.append(local_of(sharded(result.view_as(whole), self.mesh, param.placements)))
        return parts


def times_its_norm(matrix: Tensor) -> Tensor:
    return matrix * matrix.norm()


def results_are_those_of_whole_matrices() -> None:
    for bucket_elements, scale in ((1 << 20, 1), (1, 1)):
        world = World(bucket_elements, scale)
        seen = []

        def compute(index: int, matrix: Tensor, world: World = world, seen: Any = seen) -> Tensor:
            seen.append(index)
            assert world.owners[index] == dist.get_rank()
            assert torch.equal(matrix, world.matrix(index))
            return times_its_norm(matrix)

        found = world.run(compute)
        assert all(map(torch.equal, found, world.expected(times_its_norm)))
        assert sorted(seen) == [i for i, o in enumerate(world.owners) if o == dist.get_rank()]


def results_may_be_transposed_views() -> None:
    world = World(8)
    found = world.run(lambda index, matrix: (matrix.t() * 2.0).t())
    assert all(map(torch.equal, found, world.expected(lambda matrix: matrix * 2)))


def each_way_has_a_dtype_on_the_wire() -> None:
    """The values are cast before they are sent, the results after they are computed."""
    world = World(8)
    dtypes = set()

    def compute(index: int, matrix: Tensor) -> Tensor:
        dtypes.add(matrix.dtype)
        return matrix.double() / 3

    found = world.run(compute, torch.bfloat16, torch.float16)
    expected = world.expected(lambda m: (m.bfloat16().double() / 3).half().float())
    assert dtypes <= {torch.bfloat16}
    assert all(map(torch.equal, found, expected))


def bytes_sent_are_those_that_were_predicted(shortest_bytes: int) -> None:
    sent, num_isends = [0], [0]
    all_to_all, isend = dist.all_to_all_single, dist.isend

    def counted_all_to_all(output: Tensor, input: Tensor, *args: Any, **kwargs: Any) -> Any:
        sent[0] += input.nbytes
        return all_to_all(output, input, *args, **kwargs)

    def counted_isend(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        sent[0] += tensor.nbytes
        num_isends[0] += 1
        return isend(tensor, *args, **kwargs)

    world = World(8)
    traffic = traffic_of(world.matrices, world.owners, world.grids, range(3))
    rank = dist.get_rank()
    with (
        mock.patch.object(dist, "all_to_all_single", counted_all_to_all),
        mock.patch.object(dist, "isend", counted_isend),
        mock.patch.object(module, "SHORTEST_BYTES", shortest_bytes),
    ):
        found = world.run(lambda index, matrix: matrix, torch.bfloat16, torch.float32)
    assert (num_isends[0] > 0) == (shortest_bytes == 1)
    assert sent[0] == 2 * traffic.gathers[rank] + 4 * traffic.scatters[rank]
    assert all(map(torch.equal, found, world.expected(lambda m: m.bfloat16().float())))


def the_next_gather_and_the_last_scatter_run_under_the_compute() -> None:
    """With four buckets: what is issued, computed and waited for, in order."""
    world = World(1)
    world.wholes = [torch.zeros(8 * 3, 1 << 16)]
    world.params = [sharded(world.wholes[0], world.mesh, [Shard(1)])]
    layout = layout_of(world.params[0])
    world.matrices = matrices_of(layout, 0, 2)  # twelve matrices; four for each rank
    world.owners, world.grids = [index % 3 for index in range(12)], [layout.grid()]
    rank, costs = dist.get_rank(), [1] * 12
    world.routes = routes_of(
        world.matrices, world.owners, costs, world.grids, range(3), rank, 1 << 17
    )
    assert len(world.routes.buckets) == 3
    events: list[str] = []
    numbers = itertools.count()
    exchange, wait = Transport._exchange, module._InFlight.wait

    def noted_exchange(self: Transport, *args: Any, **kwargs: Any) -> Any:
        moving: Any = exchange(self, *args, **kwargs)
        moving.number = next(numbers)
        events.append(f"start {moving.number}")
        return moving

    def noted_wait(self: Any) -> Tensor:
        events.append(f"wait {self.number}")
        return wait(self)

    def compute(index: int, matrix: Tensor) -> Tensor:
        if events[-1] != "compute":
            events.append("compute")
        return matrix

    with (
        mock.patch.object(Transport, "_exchange", noted_exchange),
        mock.patch.object(module._InFlight, "wait", noted_wait),
    ):
        world.run(compute)
    # 0: gather 0, 1: gather 1, 2: scatter 0, 3: gather 2, 4: scatter 1, 5: scatter 2
    assert events == [
        *("start 0", "start 1", "wait 0", "compute", "start 2"),
        *("start 3", "wait 1", "compute", "start 4", "wait 2"),
        *("wait 3", "compute", "start 5", "wait 4", "wait 5"),
    ]


def everything_on_three_ranks() -> None:
    results_are_those_of_whole_matrices()
    results_may_be_transposed_views()
    each_way_has_a_dtype_on_the_wire()
    bytes_sent_are_those_that_were_predicted(1 << 19)
    bytes_sent_are_those_that_were_predicted(1)  # sends and receives
    the_next_gather_and_the_last_scatter_run_under_the_compute()


def test_matrices_travel_to_their_owners_and_results_back() -> None:
    run_ranks(everything_on_three_ranks, 3)


def test_one_rank_needs_no_group() -> None:
    param = nn.Parameter(randn(0, (2, 4, 3)))
    matrices = matrices_of(layout_of(param))
    routes = routes_of(matrices, [0, 0], [1, 1], [[[0]]], [0], 0, 8)
    transport = Transport(
        matrices,
        routes,
        None,
        gather_dtype=torch.float32,
        scatter_dtype=torch.float32,
        device=torch.device("cpu"),
    )
    found = torch.zeros(24)

    def sink(run: Run, index: int, values: Tensor) -> None:
        found[run.start : run.stop] = values

    transport.run(from_tensors([param.detach()]), lambda index, matrix: matrix + index, sink)
    assert torch.equal(found.view(2, 4, 3), param + torch.tensor([0.0, 1.0]).view(2, 1, 1))
