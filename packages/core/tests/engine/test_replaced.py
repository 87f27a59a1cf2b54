"""Parameters that are replaced by other DTensors, between ``fully_shard`` and the first forward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from vescale_fsdp import Granularity, fully_shard
from vescale_fsdp.ragged import RaggedShard, distribute_tensor
from vescale_fsdp.testing import run_ranks

from .helpers import full_gradients, full_parameters
from .libraries import Library, observe_all
from .subclasses import Narrow, wrap_weights


class Normed(nn.Module):
    """As in a test of FSDP2: one parameter is made of others, which are sharded by then."""

    def __init__(self) -> None:
        super().__init__()
        self.layer1 = nn.Linear(3, 3, bias=False)
        self.layer2 = nn.Linear(3, 3, bias=False)
        self.weight_norm = nn.Parameter(torch.empty(3))

    def init_weight_norm(self) -> None:
        with torch.no_grad():
            norm = torch.linalg.norm(self.layer1.weight, dim=1)
            norm = norm + torch.linalg.norm(self.layer2.weight, dim=1)
        self.weight_norm = nn.Parameter(norm)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer2(self.layer1(x)).sum() + (self.weight_norm * x).sum()


def norms_of_weights(library: Library) -> Any:
    with torch.device("meta"):
        model = Normed()
    library.shard(model, model.layer1, model.layer2)
    model.layer1.to_empty(device="cpu")
    model.layer2.to_empty(device="cpu")
    with torch.no_grad():
        nn.init.ones_(model.layer1.weight)
        nn.init.constant_(model.layer2.weight, 2.0)
    model.init_weight_norm()
    loss = model(torch.ones(3, 3))
    loss.backward()
    gradient = model.weight_norm.grad
    return round(loss.item(), 4), gradient.full_tensor().tolist()


def test_norms_of_sharded_weights_as_with_fsdp2() -> None:
    found = observe_all([norms_of_weights], 2)
    # 9 sums of 3 ones by 2, and 3 times 3 norms of sqrt(3) and sqrt(12)
    assert found["ours", "norms_of_weights"][0][1] == (208.7654, [3.0] * 3), found
    assert found["ours", "norms_of_weights"] == found["fsdp2", "norms_of_weights"]


SHAPE = (5, 3)


class Matrix(nn.Module):
    """One unit with a matrix between others, so that its place in the shard is not the first."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Parameter(torch.ones(7))
        self.weight = nn.Parameter(torch.zeros(SHAPE))
        self.after = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.weight).sum() * self.before.sum() * self.after.sum()


def values() -> Tensor:
    return torch.arange(15.0).view(SHAPE) + 1


def as_placed(mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    """`values`, with these placements; what is partial is a sum of different terms."""
    if not any(placement.is_partial() for placement in placements):
        return distribute_tensor(values(), mesh, list(placements))
    partial = placements.index(Partial())
    size, place = mesh.size(partial), mesh.get_local_rank(partial)
    terms = [values() * (1 + rank) for rank in range(size)]
    whole = terms[place] * 2 / (size * (size + 1))
    return DTensor.from_local(whole, mesh, placements, run_check=False)


def check_replaced(placements: Sequence[Placement], how: str, options: dict[str, Any]) -> None:
    two = len(placements) == 2
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner")) if two else None
    model = Matrix()
    fully_shard(model, mesh=mesh, **options)
    given, own = as_placed(model.weight.device_mesh, placements), model.weight.placements
    if how == "load":
        model.load_state_dict(model.state_dict() | {"weight": given}, assign=True)
    else:
        model.weight = nn.Parameter(given)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model(torch.ones(SHAPE)).backward()
    assert full_gradients(model)["weight"].tolist() == torch.full(SHAPE, 14.0).tolist()  # 7 * 2
    assert model.weight.placements == own
    torch.testing.assert_close(full_parameters(model)["weight"], values(), rtol=1e-6, atol=0)
    optimizer.step()  # it was made after the parameter was replaced, and holds the new one
    torch.testing.assert_close(full_parameters(model)["weight"], values() - 7)


def check_all(cases: list[list[Placement]], options: dict[str, Any]) -> None:
    for how in ("replace", "load"):
        for placements in cases:
            check_replaced(placements, how, options)


def first_columns(param: nn.Parameter) -> Shard | None:
    return Shard(1) if param.dim() == 2 else None


ONE_AXIS = [[Replicate()], [Shard(0)], [Shard(1)], [Partial()]]
TWO_AXES = [
    [Replicate(), Shard(0)],
    [Replicate(), Replicate()],
    [Partial(), Replicate()],
    [Shard(0), Shard(1)],
]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_tensor_of_other_placements_is_resharded(world_size: int) -> None:
    run_ranks(check_all, world_size, ONE_AXIS, {}, timeout_s=60)


def test_where_rows_stay_whole() -> None:
    ragged = [[RaggedShard.owner(1, 2)], [RaggedShard((0, 1), (4, 11))]]
    run_ranks(check_all, 2, [*ONE_AXIS, *ragged], {"granularity": Granularity.rows(1)})


def test_where_columns_are_cut() -> None:
    run_ranks(check_all, 2, ONE_AXIS, {"shard_placement_fn": first_columns}, timeout_s=60)


def test_with_replicas() -> None:
    run_ranks(check_all, 4, TWO_AXES, {}, timeout_s=60)


def load_in_two_parts() -> None:
    with torch.device("meta"):
        model = Matrix()
        fully_shard(model)
    placed = {
        name: distribute_tensor(torch.full(param.shape, 2.0), param.device_mesh, param.placements)
        for name, param in model.named_parameters()
    }
    for names in (["weight"], ["before", "after"]):
        part = {name: placed[name] for name in names}
        model.load_state_dict(part, assign=True, strict=False)
    model(torch.ones(SHAPE)).backward()
    for param in full_parameters(model).values():
        assert param.unique().tolist() == [2.0]


def test_a_model_on_meta_takes_its_tensors_in_several_loads() -> None:
    run_ranks(load_in_two_parts, 2, timeout_s=60)


def replace_what_is_unsharded() -> None:
    """As fairseq2 does, to show plain parameters: between `unshard` and `reshard` by hand."""
    model = Matrix()
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    before = dict(model.named_parameters())
    model.unshard()  # type: ignore[operator]
    for name, param in list(model.named_parameters()):
        setattr(model, name, nn.Parameter(param.detach()))
    assert model.state_dict()["weight"].shape == SHAPE
    model.reshard()  # type: ignore[operator]
    assert all(param is before[name] for name, param in model.named_parameters())
    model(torch.ones(SHAPE)).backward()
    optimizer.step()
    assert full_parameters(model)["weight"].tolist() == torch.full(SHAPE, -7.0).tolist()


def test_what_replaces_unsharded_parameters_is_dropped_at_reshard() -> None:
    run_ranks(replace_what_is_unsharded, 2)


def check_refused() -> None:
    def run(weight: Tensor) -> None:
        model = Matrix()
        fully_shard(model)
        model.weight = nn.Parameter(weight)
        model(torch.ones(SHAPE))

    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("other",))
    with pytest.raises(ValueError, match="'weight' was replaced by a plain tensor"):
        run(values())
    with pytest.raises(ValueError, match=r"'weight' was replaced by one of shape \(3, 5\)"):
        run(distribute_tensor(values().t().contiguous(), mesh, [Shard(0)]))
    with pytest.raises(ValueError, match=r"'weight' was replaced by one on .*other"):
        run(distribute_tensor(values(), mesh, [Shard(0)]))


def test_plain_tensors_and_other_shapes_and_meshes_are_refused_by_name() -> None:
    run_ranks(check_refused, 2, timeout_s=60)


def replace_one_that_gathers_itself() -> None:
    layer = wrap_weights(nn.Linear(3, 4, bias=False), Narrow)
    fully_shard(layer)
    mesh, own = layer.weight.device_mesh, layer.weight.placements
    whole = Narrow(torch.arange(12.0).view(4, 3))
    layer.weight = nn.Parameter(DTensor.from_local(whole, mesh, [Replicate()], run_check=False))
    assert layer(torch.ones(1, 3)).tolist() == [[3.0, 12.0, 21.0, 30.0]]
    layer.reshard()
    assert layer.weight.placements == own
    assert layer.weight.to_local().first.shape == (2, 3)


def test_a_parameter_that_gathers_itself() -> None:
    run_ranks(replace_one_that_gathers_itself, 2, timeout_s=60)
