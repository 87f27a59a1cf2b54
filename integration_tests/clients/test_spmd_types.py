"""Plain parameters with types of ``spmd_types``, as torchtitan's default backend makes them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import DataParallelMeshDims

from vescale_fsdp import fully_shard
from vescale_fsdp.testing import run_ranks

from .helpers import in_double

WIDTH, HIDDEN, BATCH = 6, 8, 4


class SumOver(torch.autograd.Function):
    """An all-reduce, through which gradients pass as they are."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class Block(nn.Module):
    """A scale, and two products that are cut by hand if there is a group for it."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(WIDTH) + 0.5)
        self.up = nn.Parameter(torch.randn(HIDDEN, WIDTH) / 2)
        self.down = nn.Parameter(torch.randn(WIDTH, HIDDEN) / 2)
        self.group = group

    def forward(self, x: Tensor) -> Tensor:
        # On each rank of a group the gradient of the scale is a part of a sum.
        out = torch.tanh((x.detach() * self.scale) @ self.up.t()) @ self.down.t()
        return out if self.group is None else SumOver.apply(out, self.group)  # type: ignore[no-any-return]


def cut_and_typed(block: Block, mesh: DeviceMesh, of_scale: Any) -> Block:
    """Keep this rank's part of each parameter, and say by types what it is."""
    import spmd_types as spmd

    block.group = mesh.get_group("tp")
    rank, size = mesh.get_local_rank("tp"), mesh.size(1)
    types = {"scale": of_scale, "up": spmd.S(0), "down": spmd.S(1)}
    for name, kind in types.items():
        whole: Tensor = getattr(block, name).data
        if kind in (spmd.S(0), spmd.S(1)):
            whole = whole.chunk(size, kind.dim)[rank].contiguous()
        param = nn.Parameter(whole)
        setattr(block, name, param)
        spmd.assert_type(param, {mesh.get_group("dp"): spmd.R, block.group: kind})
    return block


def batch(step: int) -> Tensor:
    return torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(step))


def train(model: nn.Module, rank: int, size: int) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for step in range(3):
        model(batch(step).chunk(size)[rank]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@in_double()
def beside_one_process() -> None:
    import spmd_types as spmd

    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    plain = Block()
    torch.manual_seed(0)
    sharded = fully_shard(
        cut_and_typed(Block(), mesh, spmd.R),
        mesh=mesh,
        dp_mesh_dims=DataParallelMeshDims(shard="dp"),
    )
    train(plain, 0, 1)
    train(sharded, mesh.get_local_rank("dp"), 2)
    for name, param in sharded.named_parameters():
        expected = plain.get_parameter(name)
        assert param.shape == expected.shape
        torch.testing.assert_close(param.full_tensor(), expected.data, msg=name)  # type: ignore[attr-defined]
    typed = cut_and_typed(Block(), mesh, spmd.V)
    with pytest.raises(ValueError, match="types of spmd_types on parameter 'scale' need R, I or"):
        fully_shard(typed, mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard="dp"))
    typed = cut_and_typed(Block(), mesh, spmd.R)
    with pytest.raises(
        ValueError, match="parameter 'scale' has types of spmd_types: pass the mesh"
    ):
        fully_shard(typed, mesh=mesh["dp"])
    values = {name: 0.5 * param for name, param in sharded.named_parameters()}
    with pytest.raises(ValueError, match="sharded by an inner parallelism too"):
        torch.func.functional_call(sharded, values, (batch(0),))
    with pytest.raises(ValueError, match="Got plain tensor for parameter 'scale'"):
        fully_shard(Block(), mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard="dp"))


def test_types_say_what_is_cut_and_which_gradients_are_summed() -> None:
    run_ranks(beside_one_process, 4)
