"""Taking the gradients of matrices to where their states rest, and the updates back."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from vescale_fsdp import compat
from vescale_fsdp.optim.base import local_of
from vescale_fsdp.optim.matrices.layout import Matrix, layout_of, matrices_of
from vescale_fsdp.optim.matrices.routes import routes_of
from vescale_fsdp.optim.matrices.transport import Sink, Transport, from_tensors
from vescale_fsdp.optim.preconditioned.resting import Line, counts_of

_BUCKET_ELEMENTS = 1 << 24  # 64 MiB of fp32: two buckets each way are in memory at a time
_MOST_KEPT = 4  # sets of parameters that step together

# The update of a matrix: from the index of its parameter, its number there, and its gradient.
Compute = Callable[[int, int, torch.Tensor], torch.Tensor]


class Courier:
    """A transport for matrices of parameters on the same line, owned as their states rest.

    Each replica of the parameters (HSDP) has its own: nothing travels between replicas.

    Args:
        line: of all parameters.
        params: of at least two dimensions.
        states: of each, one that rests whole with the owner of each matrix.
        costs: of a matrix of each.
        dtype: of the gradients; updates have that of the states.
    """

    def __init__(
        self,
        line: Line,
        params: Sequence[torch.Tensor],
        states: Sequence[torch.Tensor],
        costs: Sequence[int],
        dtype: torch.dtype,
    ) -> None:
        self._key = _key(params, states, dtype)
        group = compat.mesh_group(line.mesh, line.axis)
        ranks = compat.axis_ranks(line.mesh, line.axis)
        self._matrices: list[tuple[int, int]] = []  # (parameter, number)
        matrices: list[Matrix] = []
        owners: list[int] = []
        for index, (param, state) in enumerate(zip(params, states, strict=True)):
            found = matrices_of(layout_of(param), index)
            matrices += found
            self._matrices += [(index, number) for number in range(len(found))]
            counts = counts_of(state, len(found))
            owners += [rank for rank, n in zip(ranks, counts, strict=True) for _ in range(n)]
        routes = routes_of(
            matrices,
            owners,
            [costs[index] for index, _ in self._matrices],
            [[ranks]] * len(params),
            dist.get_process_group_ranks(group),
            dist.get_rank(),
            _BUCKET_ELEMENTS,
        )
        self._transport = Transport(
            matrices,
            routes,
            group,
            gather_dtype=dtype,
            scatter_dtype=states[0].dtype,
            device=local_of(states[0]).device,
        )

    @staticmethod
    def known(
        couriers: list[Courier],
        params: Sequence[torch.Tensor],
        states: Sequence[torch.Tensor],
        dtype: torch.dtype,
    ) -> Courier | None:
        """The courier among ``couriers`` for tensors that lie so. Drops those long not used."""
        key = _key(params, states, dtype)
        for courier in couriers:
            if courier._key == key:
                couriers.remove(courier)
                couriers.append(courier)
                return courier
        del couriers[: 1 - _MOST_KEPT]
        return None

    def run(self, grads: Sequence[torch.Tensor], compute: Compute, sink: Sink) -> None:
        """Compute each matrix on its owner and give the updates to the sink of who holds parts.

        Collective on the line.

        Args:
            grads: this rank's parts, one per parameter.
            compute: called for the matrices that rest here.
            sink: as of `Transport`.
        """

        def of_index(index: int, grad: torch.Tensor) -> torch.Tensor:
            return compute(*self._matrices[index], grad)

        self._transport.run(from_tensors(grads), of_index, sink)


def _key(
    params: Sequence[torch.Tensor], states: Sequence[torch.Tensor], dtype: torch.dtype
) -> list[object]:
    """What the routes depend on; equal for tensors that lie alike."""
    specs = [each._spec for each in (*params, *states) if isinstance(each, DTensor)]
    return [dtype, *specs]
