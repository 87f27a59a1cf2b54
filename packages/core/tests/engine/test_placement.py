"""``shard_placement_fn``: even shards along a dimension, and parameters on other meshes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, ShardPlacementResult
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from vescale_fsdp import RaggedTensor, clip_grad_norm_, fully_shard
from vescale_fsdp.testing import run_ranks

from .helpers import averaged_gradients, full_gradients, full_parameters
from .models import inputs_of, make


class Mixed(nn.Module):
    """A matrix, a convolution's kernel and a vector, of sizes that nothing divides."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.conv = nn.Conv1d(1, 3, 3)

    def forward(self, x: Tensor) -> Tensor:  # [batch, 5] -> [batch, 3, 5]
        return self.conv(torch.tanh(self.first(x)).unsqueeze(1))


def by_dim(parameter: nn.Parameter) -> Shard | None:
    return {2: Shard(1), 3: Shard(-1)}.get(parameter.dim())


def check_shards(num_steps: int) -> None:
    rank = dist.get_rank()
    plain, model = make(Mixed), make(Mixed)
    fully_shard(model, shard_placement_fn=by_dim)
    first, conv = model.first.weight, model.conv.weight
    assert (type(first.data), first.placements) == (DTensor, (Shard(1),))
    assert (type(conv.data), conv.placements) == (DTensor, (Shard(2),))
    assert type(model.first.bias.data) is RaggedTensor
    columns = torch.chunk(plain.first.weight, 2, dim=1)[rank]
    assert torch.equal(first.to_local(), columns)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.01) for each in (plain, model)]
    for step in range(num_steps):
        for each in (plain, model):
            each(inputs_of(step, rank)).square().mean().backward()
        expected = averaged_gradients(plain)
        for name, gradient in full_gradients(model).items():
            torch.testing.assert_close(gradient, expected[name], rtol=1e-6, atol=1e-8, msg=name)
        assert first.grad.placements == first.placements
        for parameter, gradient in zip(plain.parameters(), expected.values(), strict=True):
            parameter.grad = gradient
        norms = [
            torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1),
            clip_grad_norm_(model, 0.1),
        ]
        torch.testing.assert_close(norms[1], norms[0], rtol=1e-5, atol=0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    whole = full_parameters(model)
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(whole[name], parameter, rtol=1e-5, atol=1e-6, msg=name)


def test_shard_of_a_dimension_is_honoured_and_trains_alike() -> None:
    run_ranks(check_shards, 2, 5)


def check_conversions() -> None:
    model, plain = make(Mixed), make(Mixed)
    fully_shard(model, shard_placement_fn=by_dim)
    model(inputs_of(0, 0))
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    model.load_state_dict(state)
    torch.testing.assert_close(model(inputs_of(0, 0)), plain(inputs_of(0, 0)))
    model.double()
    plain.double()
    x = inputs_of(0, 0).double()
    torch.testing.assert_close(model(x), plain(x))
    meta = Mixed().to("meta")
    fully_shard(meta, shard_placement_fn=by_dim)
    meta.to_empty(device="cpu")
    meta.load_state_dict(state)
    plain = make(Mixed)
    torch.testing.assert_close(meta(inputs_of(0, 0)), plain(inputs_of(0, 0)))


def test_even_shards_survive_conversion_and_loading() -> None:
    run_ranks(check_conversions, 2)


def check_other_mesh() -> None:
    rank = dist.get_rank()
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("expert", "data"))
    info = FSDPMeshInfo(grid["data"], shard_mesh_dim=0)
    plain, model = make(Mixed), make(Mixed)

    def choose(parameter: nn.Parameter) -> Any:
        return ShardPlacementResult(None, info) if parameter.dim() == 3 else None

    fully_shard(model, shard_placement_fn=choose)
    assert model.conv.weight.device_mesh == grid["data"]
    plain(inputs_of(0, rank)).sum().backward()
    model(inputs_of(0, rank)).sum().backward()
    expected = averaged_gradients(plain)
    pair = dist.new_group([rank // 2 * 2, rank // 2 * 2 + 1], use_local_synchronization=True)
    mean = plain.conv.weight.grad.clone()
    dist.all_reduce(mean, group=pair)
    expected["conv.weight"] = mean / 2
    for name, gradient in full_gradients(model).items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-5, atol=1e-7, msg=name)


def test_a_parameter_may_be_on_another_mesh_than_the_rest_of_its_unit() -> None:
    run_ranks(check_other_mesh, 4)


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(6, 6)
        self.w = nn.Parameter(torch.randn(4, 6, 5))

    def forward(self, x: Tensor) -> Tensor:
        w = self.w.to_local() if isinstance(self.w, DTensor) else self.w
        y: Tensor = torch.einsum("bi,eij->bj", self.router(x), w)
        return y


def check_experts() -> None:
    """As torchtitan shards DeepSeek-V3: experts over their axis first, then over the other."""
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "expert"))
    info = FSDPMeshInfo(grid["data"], shard_mesh_dim=0)
    results = []
    for placement in (None, Shard(0), Shard(1), Shard(2)):  # of 4, 6 and 5
        model = make(Experts)
        w = distribute_tensor(model.w.detach(), grid["expert"], [Shard(0)])
        model.w = nn.Parameter(w)

        def choose(parameter: nn.Parameter, placement: Any = placement) -> Any:
            is_expert = parameter.dim() == 3
            return ShardPlacementResult(placement, info) if is_expert else Shard(0)

        fully_shard(model, shard_placement_fn=choose)
        model(torch.ones(2, 6)).square().sum().backward()
        results.append((full_parameters(model), full_gradients(model)))
    for result in results[1:]:
        torch.testing.assert_close(result, results[0], rtol=0, atol=0)


def test_experts_on_a_mesh_of_their_own_are_cut_along_any_dimension() -> None:
    run_ranks(check_experts, 4)


def check_errors() -> None:
    with pytest.raises(AssertionError, match="Shard dim 1 is invalid for 1D tensor"):
        fully_shard(make(Mixed), shard_placement_fn=lambda _: Shard(1))
    with pytest.raises(ValueError, match="Invalid shard_placement_fn result: R"):
        fully_shard(make(Mixed), shard_placement_fn=lambda _: Replicate())


def test_other_answers_are_refused() -> None:
    run_ranks(check_errors, 2)
