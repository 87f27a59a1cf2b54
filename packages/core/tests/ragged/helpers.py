"""What the tests of ragged tensors do again and again, inside a rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from vescale_fsdp import RaggedShard, RaggedTensor

# A row fills a whole number of vector registers; see `assert_holds`.
SHAPE = (6, 16)

# Cuts of a tensor of SHAPE by world size: rows and single elements, with empty ranks in each place.
CUTS = {
    1: [RaggedShard((0,), (6,))],
    2: [
        RaggedShard((0,), (1, 5)),
        RaggedShard((0, 1), (7, 89)),
        RaggedShard.owner(0, 2),
        RaggedShard.owner(1, 2),
    ],
    3: [
        RaggedShard((0,), (2, 1, 3)),
        RaggedShard((0, 1), (5, 0, 91)),
        RaggedShard((0,), (0, 4, 2)),
        RaggedShard.owner(1, 3),
    ],
}


def make_mesh() -> DeviceMesh:
    """One axis over all ranks."""
    return init_device_mesh("cpu", (dist.get_world_size(),))


def cuts() -> list[RaggedShard]:
    """The cuts of SHAPE for this world size."""
    return CUTS[dist.get_world_size()]


def random(shape: Sequence[int] = SHAPE, seed: int = 0, dtype: torch.dtype | None = None) -> Tensor:
    """The same normal numbers on every rank."""
    numbers = torch.randn(tuple(shape), generator=torch.Generator().manual_seed(seed))
    return numbers if dtype is None else numbers.to(dtype)


def distributed(*wholes: Tensor) -> Iterator[list[RaggedTensor]]:
    """The same tensors of SHAPE in each of the cuts."""
    mesh = make_mesh()
    for cut in cuts():
        yield [RaggedTensor.distribute(whole, mesh, [cut]) for whole in wholes]


def assert_holds(ragged: Tensor, whole: Tensor, like: RaggedTensor) -> None:
    """``ragged`` is cut like ``like``, and its part has the numbers of that part of ``whole``.

    Bit for bit, unless the part begins or ends within a vector register: torch's kernels take
    another code path for what does not fill one, and may round differently there.
    """
    assert type(ragged) is RaggedTensor
    assert ragged.placements == like.placements
    assert ragged.device_mesh == like.device_mesh
    assert ragged.shape == whole.shape
    assert ragged.dtype == whole.dtype
    assert ragged._spec.tensor_meta.dtype == whole.dtype
    start, stop = ragged.local_range
    local = ragged._local_tensor
    assert local.shape == (stop - start,)
    expected = whole.detach().reshape(-1)[start:stop]
    exact = not whole.is_floating_point() or (start % 16 == 0 and stop % 16 == 0)
    tolerance = 0.0 if exact else 1e-6
    torch.testing.assert_close(local, expected, rtol=tolerance, atol=tolerance, equal_nan=True)
