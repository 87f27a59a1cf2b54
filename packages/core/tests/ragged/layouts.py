"""Layouts for tests of operators: cuts of any shape on one axis, and mixtures on two."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from vescale_fsdp import RaggedShard, RaggedTensor
from vescale_fsdp.compat import NormPartial

from .helpers import make_mesh


def cuts_of(shape: Sequence[int], num_shards: int) -> list[RaggedShard]:
    """Rows and single elements, as even as they go and not, with ranks that hold nothing."""
    numel, rows = math.prod(shape), shape[0] if shape else 1
    if not numel:
        return [RaggedShard((), [0] * num_shards)]
    row = numel // rows
    lists = [
        [numel] + [0] * (num_shards - 1),
        [0] * (num_shards - 1) + [numel],
        [1] * (num_shards - 1) + [numel - num_shards + 1],
        [numel // 2] + [0] * (num_shards - 2) + [numel - numel // 2],
        [row] * (num_shards - 1) + [numel - row * (num_shards - 1)],
        [row * (rows - 1)] + [0] * (num_shards - 2) + [row],
    ]
    fitting = [units for units in lists if len(units) == num_shards and min(units) >= 0]
    cuts = {
        RaggedShard.from_runs_of_elements([(1, n) for n in units], shape): None for units in fitting
    }
    return list(cuts)


def layouts_of(whole: Tensor) -> Iterator[RaggedTensor]:
    """The tensor in each of the cuts of its shape."""
    mesh = make_mesh()
    for cut in cuts_of(whole.shape, dist.get_world_size()):
        yield RaggedTensor.distribute(whole, mesh, [cut])


def grid() -> DeviceMesh:
    """2 x 2 ranks."""
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))


# Of a tensor of shape (4, 6, 2), on a mesh of 2 x 2.
COMPOSED: list[list[Placement]] = [
    [Replicate(), RaggedShard((0,), (1, 3))],
    [RaggedShard((0, 1), (5, 19)), Replicate()],
    [Shard(0), RaggedShard((0,), (1, 1))],
    [Shard(1), RaggedShard((0,), (3, 1))],
    [Shard(2), RaggedShard((0, 1), (7, 17))],
    [RaggedShard((0,), (1, 1), split_factor=2), Shard(0)],
    [RaggedShard((0,), (1, 3)), Shard(1)],
    [RaggedShard((0, 1), (5, 7), split_factor=2), Shard(1)],
    [RaggedShard.owner(1, 2), Shard(2)],
    [RaggedShard((0, 1, 2), (5, 7), split_factor=2, elements_per_unit=2), Shard(0)],
]


def composed(whole: Tensor) -> Iterator[RaggedTensor]:
    """A tensor of shape (4, 6, 2) beside other placements."""
    mesh = grid()
    for placements in COMPOSED:
        yield RaggedTensor.distribute(whole, mesh, placements)


def whole_of(tensor: Tensor) -> Tensor:
    """The plain tensor of a DTensor, ragged or not."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def same(found: Tensor, expected: Tensor, name: object = "", rtol: float = 2e-6) -> None:
    """``found``, of any layout, has the numbers of the plain ``expected``."""
    found = whole_of(found)
    assert found.shape == expected.shape, (name, found.shape, expected.shape)
    assert found.dtype == expected.dtype, (name, found.dtype, expected.dtype)
    torch.testing.assert_close(
        found, expected, rtol=rtol, atol=rtol, equal_nan=True, msg=lambda text: f"{name}: {text}"
    )


class Results:
    """Results on a mesh of one axis, compared with plain ones after a single exchange."""

    def __init__(self) -> None:
        self._named: list[tuple[object, Placement, Tensor]] = []
        self._locals: list[Tensor] = []

    def add(self, result: Tensor, expected: Tensor, name: object) -> None:
        assert result.shape == expected.shape, (name, result.shape, expected.shape)
        assert result.dtype == expected.dtype, (name, result.dtype, expected.dtype)
        (placement,) = result.placements
        self._named.append((name, placement, expected))
        self._locals.append(result._local_tensor)

    def check(self, rtol: float = 2e-6) -> None:
        """All ranks call it."""
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, self._locals)
        for i, (name, placement, expected) in enumerate(self._named):
            found = _combined([parts[i] for parts in gathered], placement)
            same(found.view(expected.shape).to(expected.dtype), expected, name, rtol)


def _combined(parts: list[Tensor], placement: Placement) -> Tensor:
    """What the parts of all ranks mean, worked out without torch's placements."""
    if isinstance(placement, RaggedShard):
        return torch.cat(parts)
    stacked = torch.stack(parts)
    if isinstance(placement, NormPartial):
        return torch.linalg.vector_norm(stacked, placement.norm_type, 0)
    if placement.is_replicate():
        assert all(torch.allclose(part, parts[0], 0, 0, equal_nan=True) for part in parts)
        return parts[0]
    assert placement.is_partial()
    return stacked.prod(0) if placement.reduce_op == "product" else stacked.sum(0)


@contextmanager
def counted_collectives() -> Iterator[list[str]]:
    """The names of the collectives that are called inside.

    torch's ``CommDebugMode`` does not see what a tensor subclass does in its dispatch.
    """
    seen: list[str] = []
    with ExitStack() as patches:
        names = [name for name in dir(dist) if name.startswith(("all_", "reduce", "broadcast"))]
        places = [(dist, name) for name in names] + [(funcol, "all_reduce")]
        for module, name in places:
            original = getattr(module, name)
            if callable(original):
                patches.enter_context(mock.patch.object(module, name, _noting(seen, original)))
        yield seen


def _noting(seen: list[str], original: Any) -> Any:
    def called(*args: Any, **kwargs: Any) -> Any:
        seen.append(original.__name__)
        return original(*args, **kwargs)

    return called
