"""Tensor parallelism first (``parallelize_module``), then ``fully_shard``."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import DataParallelMeshDims
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, ShardPlacementResult
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from vescale_fsdp import (
    Granularity,
    PlanError,
    RaggedShard,
    clip_grad_norm_,
    fully_shard,
    unsharded,
)
from vescale_fsdp.optim import SOAP, AdamW8bit, Muon, flatten_
from vescale_fsdp.ragged import redistribute
from vescale_fsdp.testing import run_ranks

from .models import make

WIDTH = 8


class Pair(nn.Module):
    """Two linear layers, cut by columns and by rows, and a norm that every rank has."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.pairs = nn.ModuleList([Pair() for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        for pair in self.pairs:
            x = pair(x)
        return x


def parallelized(mesh: DeviceMesh) -> Stack:
    model = make(Stack)
    for pair in model.pairs:
        parallelize_module(pair, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


def batch(step: int, data_rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + data_rank)
    return torch.randn(3, WIDTH, generator=generator)


def check_against_fsdp2(names: tuple[str, ...], sizes: tuple[int, ...], num_steps: int) -> None:
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    data = mesh[names[:-1]] if len(names) > 2 else mesh[names[0]]
    data_rank = dist.get_rank() // sizes[-1]
    models = [parallelized(mesh["tensor"]), parallelized(mesh["tensor"])]
    for model, shard in zip(models, (fully_shard, torch_fully_shard), strict=True):
        for pair in model.pairs:
            shard(pair, mesh=data)
        shard(model, mesh=data)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in models]
    for step in range(num_steps):
        losses, norms = [], []
        for model, optimizer in zip(models, optimizers, strict=True):
            loss = model(batch(step, data_rank)).square().mean()
            loss.backward()
            if step % 2:
                norms.append(_clip(model, 0.1))
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        torch.testing.assert_close(losses[0], losses[1], rtol=1e-6, atol=1e-6)
        if norms:
            torch.testing.assert_close(norms[0], norms[1], rtol=1e-5, atol=1e-6)
    expected = dict(models[1].named_parameters())
    for name, parameter in models[0].named_parameters():
        ours, theirs = parameter.full_tensor(), expected[name].full_tensor()
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5, msg=name)


def _clip(model: nn.Module, limit: float) -> Tensor:
    """By our function for ours; by hand for FSDP2, whose norm cannot mix meshes."""
    gradients = [parameter.grad for parameter in model.parameters()]
    if any(isinstance(p, RaggedShard) for g in gradients for p in g.placements):
        return clip_grad_norm_(model, limit)
    total = torch.stack([gradient.full_tensor().norm() for gradient in gradients]).norm()
    scale = torch.clamp(limit / (total + 1e-6), max=1.0)
    for gradient in gradients:
        gradient.to_local().mul_(scale)
    return total


@pytest.mark.parametrize(
    ("names", "sizes"),
    [(("data", "tensor"), (2, 2)), (("data", "tensor"), (1, 4)), (("data", "tensor"), (4, 1))],
)
@pytest.mark.sampled(2)
def test_training_equals_fsdp2_after_tensor_parallelism(
    names: tuple[str, ...], sizes: tuple[int, ...]
) -> None:
    run_ranks(check_against_fsdp2, 4, names, sizes, 6)


def test_hybrid_sharding_after_tensor_parallelism() -> None:
    run_ranks(check_against_fsdp2, 4, ("replicate", "data", "tensor"), (2, 1, 2), 4)


def check_placements() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    model = parallelized(mesh["tensor"])
    whole = {name: _whole(p) for name, p in model.named_parameters()}
    for pair in model.pairs:
        fully_shard(pair, mesh=mesh["data"], granularity=Granularity.rows(1))
    fully_shard(model, mesh=mesh["data"])
    pair = model.pairs[0]
    up, down, norm = pair.up.weight, pair.down.weight, pair.norm.weight
    assert up.shape == (4 * WIDTH, WIDTH)
    assert up.placements[1] == Shard(0)
    assert up.placements[0].split_factor == (2 if up.placements[0].dims else 1)
    assert down.placements[1] == Shard(1)
    assert isinstance(norm.placements[0], RaggedShard)
    assert len(norm.placements) == 1
    assert pair.down.bias.placements[1] == Replicate()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.full_tensor(), whole[name]), name
    seen = []
    pair.up.register_forward_pre_hook(lambda module, _: seen.append(module.weight))
    model(batch(0, 0))
    assert type(seen[0].data) is DTensor
    assert seen[0].placements == (Shard(0),)


def _whole(parameter: Tensor) -> Tensor:
    whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
    return whole.detach().clone()


def test_parameters_are_one_dtensor_over_all_axes_at_rest() -> None:
    run_ranks(check_placements, 4)


NUM_TOKENS, HIDDEN = 17, 5  # over four ranks: 5, 5, 5 and 2 rows; 2, 2, 1 and none


class Words(nn.Module):
    """A language model of which neither the vocabulary nor the hidden width can be halved."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(NUM_TOKENS, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)
        self.head = nn.Linear(WIDTH, NUM_TOKENS)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        x = x + self.down(torch.tanh(self.up(self.norm(x))))
        logits: Tensor = self.head(x)
        return logits


PLAN = {
    "embedding": RowwiseParallel(input_layouts=Replicate()),
    "up": ColwiseParallel(use_local_output=False),  # of a local one torch expects equal parts
    "down": RowwiseParallel(),
    "head": ColwiseParallel(output_layouts=Replicate()),
}


def words_and_next(step: int, num_sequences: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(NUM_TOKENS, (num_sequences, 9), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def sharded_words(mesh: DeviceMesh, data: DeviceMesh, **options: Any) -> Words:
    model = make(Words)
    parallelize_module(model, mesh["tensor"], PLAN)
    for module in (model.embedding, model.up, model):
        fully_shard(module, mesh=data, **options)
    return model


def train_words(
    model: nn.Module, optimizer: torch.optim.Optimizer, data_rank: int, num_data_ranks: int
) -> list[Tensor]:
    """Three steps with a sequence for each data rank. Returns the norms of the gradients."""
    norms = []
    for step in range(3):
        tokens, targets = words_and_next(step, 4)
        mine = slice(data_rank, None, num_data_ranks)
        logits = model(tokens[mine])
        nn.functional.cross_entropy(logits.flatten(0, 1), targets[mine].flatten()).backward()
        norms.append(clip_grad_norm_(model, 0.5))
        optimizer.step()
        optimizer.zero_grad()
    return norms


def check_words(names: tuple[str, ...], sizes: tuple[int, ...], options: dict[str, Any]) -> None:
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    data = mesh[names[:-1]] if len(names) > 2 else mesh[names[0]]
    num_data_ranks = mesh.size() // sizes[-1]
    plain, model = make(Words), sharded_words(mesh, data, **options)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.full_tensor(), plain.get_parameter(name)), name
    optimizers = [torch.optim.AdamW(each.parameters(), 0.01) for each in (plain, model)]
    expected = train_words(plain, optimizers[0], 0, 1)
    norms = train_words(model, optimizers[1], dist.get_rank() // sizes[-1], num_data_ranks)
    torch.testing.assert_close(norms, expected, rtol=1e-5, atol=1e-6)
    for name, parameter in model.named_parameters():
        before = plain.get_parameter(name)
        torch.testing.assert_close(parameter.full_tensor(), before, rtol=1e-5, atol=1e-5, msg=name)
        for key, state in optimizers[0].state[before].items():
            found = optimizers[1].state[parameter][key]
            found = found.full_tensor() if isinstance(found, DTensor) else found
            torch.testing.assert_close(found, state, rtol=1e-4, atol=1e-6, msg=f"{name}/{key}")


_TWO = (("data", "tensor"), (2, 2))


@pytest.mark.parametrize(
    ("names", "sizes", "options"),
    [
        (*_TWO, {}),
        (*_TWO, {"granularity": Granularity.rows(1)}),
        (*_TWO, {"sharding": "ddp"}),
        (("data", "tensor"), (1, 4), {}),
        (("replicate", "data", "tensor"), (2, 1, 2), {}),
        (("replicate", "data", "tensor"), (1, 2, 2), {}),
    ],
)
@pytest.mark.sampled(3)
def test_uneven_tensor_parallelism_equals_one_process(
    names: tuple[str, ...], sizes: tuple[int, ...], options: dict[str, Any]
) -> None:
    run_ranks(check_words, 4, names, sizes, options)


def test_uneven_tensor_parallelism_on_two_ranks_equals_one_process() -> None:
    run_ranks(check_words, 2, ("data", "tensor"), (1, 2), {})


def check_uneven_optimizers() -> None:
    """Steps on the same gradients as one process: the same bits."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    rows = {"granularity": AdamW8bit.granularity(WIDTH, min_8bit_size=1)}
    each: list[tuple[Any, dict[str, Any]]] = [
        (lambda params: flatten_(torch.optim.AdamW(params)), {}),
        (lambda params: Muon(params, lr=0.1), {}),
        (lambda params: SOAP(params, lr=0.1), {}),
        (
            lambda params: AdamW8bit(params, block_size=WIDTH, min_8bit_size=NUM_TOKENS * WIDTH),
            rows,
        ),
    ]
    for make_optimizer, options in each:
        plain, model = make(Words), sharded_words(mesh, mesh["data"], **options)
        pairs = [
            (p, model.get_parameter(name)) for name, p in plain.named_parameters() if p.dim() == 2
        ]
        optimizers = [make_optimizer(list(params)) for params in zip(*pairs, strict=True)]
        for step in range(2):
            model(words_and_next(step, 2)[0]).square().mean().backward()
            for before, parameter in pairs:
                before.grad = parameter.grad.full_tensor()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        for before, parameter in pairs:
            assert torch.equal(parameter.full_tensor(), before)
    # Blocks of 16 are two rows of 8, and the first part has 3 of the 5 rows.
    model = sharded_words(mesh, mesh["data"])
    with pytest.raises(PlanError, match=r"parameter 0 of group 0 of shape .* is split inside"):
        AdamW8bit([model.up.weight], block_size=16, min_8bit_size=1)


def test_optimizers_of_uneven_parts_equal_one_process() -> None:
    run_ranks(check_uneven_optimizers, 4)


def check_uneven_states(path: Path) -> None:
    """Whole state dicts, torch's checkpoints, copies and conversions; then it still trains."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    plain, model = make(Words), sharded_words(mesh, mesh["data"])
    weights = {name: parameter.detach() for name, parameter in plain.named_parameters()}
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    torch.testing.assert_close(whole, weights, rtol=0, atol=0)
    dcp.save(model.state_dict(), checkpoint_id=path)
    loaded = {name: torch.zeros_like(weight) for name, weight in weights.items()}
    dcp.load(loaded, checkpoint_id=path)
    torch.testing.assert_close(loaded, weights, rtol=0, atol=0)
    for parameter in model.parameters():
        with torch.no_grad():
            parameter.zero_()
    dcp.load(model.state_dict(), checkpoint_id=path)
    embedding = model.embedding.weight
    assert embedding.placements[0].elements_per_unit is not None
    for placements in ([Shard(0), Replicate()], [Replicate(), Shard(0)], [Shard(1), Shard(0)]):
        moved = embedding.redistribute(placements=placements)
        assert torch.equal(moved.full_tensor(), weights["embedding.weight"])
        assert torch.equal(
            redistribute(moved, placements=embedding.placements).to_local(), embedding.to_local()
        )
    torch.testing.assert_close(embedding.mean().full_tensor(), weights["embedding.weight"].mean())
    twin = copy.deepcopy(model).double()
    for name, parameter in (*model.named_parameters(), *twin.named_parameters()):
        assert torch.equal(parameter.full_tensor().float(), weights[name]), name
    with unsharded(model):
        assert torch.equal(model.head.weight.full_tensor(), weights["head.weight"])
    tokens, _ = words_and_next(0, 2)
    expected = plain(tokens)
    torch.testing.assert_close(model(tokens), expected)
    torch.testing.assert_close(twin(tokens).float(), expected)


def test_states_of_uneven_parts(tmp_path: Path) -> None:
    run_ranks(check_uneven_states, 4, tmp_path / "dcp")


def on_whole_mesh(mesh: DeviceMesh, model: nn.Module) -> nn.Module:
    """All parameters as DTensors on all axes: the weights of ``up`` and ``down`` are cut."""
    cuts = {"up.weight": Shard(0), "up.bias": Shard(0), "down.weight": Shard(1)}
    tensor = mesh.mesh_dim_names.index("tensor")
    for name, parameter in list(model.named_parameters()):
        placements = [Replicate()] * mesh.ndim
        placements[tensor] = cuts.get(name, Replicate())
        owner, _, attribute = name.rpartition(".")
        whole = distribute_tensor(parameter.data, mesh, placements)
        setattr(model.get_submodule(owner), attribute, nn.Parameter(whole))
    return model


def check_named_axes(
    names: tuple[str, ...], sizes: tuple[int, ...], dims: Any, of_each: bool = False
) -> None:
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    whole = {name: p.detach().clone() for name, p in make(Pair).named_parameters()}
    models = [on_whole_mesh(mesh, make(Pair)) for _ in range(2)]
    for model, shard in zip(models, (fully_shard, torch_fully_shard), strict=True):
        options: dict[str, Any] = {"mesh": mesh, "dp_mesh_dims": dims}
        if of_each:  # as torchtitan does for experts
            info = FSDPMeshInfo(mesh["data"], shard_mesh_dim=0, dp_mesh_dims=dims, spmd_mesh=mesh)
            placed = ShardPlacementResult(Shard(0), info)
            options["shard_placement_fn"] = lambda _, placed=placed: placed
        shard(model, **options)
    for name, parameter in models[0].named_parameters():
        assert torch.equal(parameter.full_tensor(), whole[name]), name
    placements = [Replicate()] * mesh.ndim
    placements[names.index("data")] = Shard(0)
    for step in range(2):
        batch_of_all = torch.cat([batch(step, rank) for rank in range(2)])
        for model in models:
            model.zero_grad()
            model(distribute_tensor(batch_of_all, mesh, placements)).square().mean().backward()
        expected = dict(models[1].named_parameters())
        for name, parameter in models[0].named_parameters():
            ours, theirs = parameter.grad.full_tensor(), expected[name].grad.full_tensor()
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7, msg=name)


@pytest.mark.parametrize(
    ("names", "sizes", "dims"),
    [
        (("data", "tensor"), (2, 2), DataParallelMeshDims(shard="data")),
        (("data", "tensor"), (2, 2), DataParallelMeshDims(replicate="data")),  # DDP
        (("data", "pod", "tensor"), (2, 1, 2), DataParallelMeshDims(shard=("data", "pod"))),
        (
            ("pod", "data", "tensor"),
            (1, 2, 2),
            DataParallelMeshDims(shard="data", replicate="pod"),
        ),
    ],
)
@pytest.mark.sampled(1)
def test_axes_of_a_whole_mesh_by_name(
    names: tuple[str, ...], sizes: tuple[int, ...], dims: Any
) -> None:
    run_ranks(check_named_axes, 4, names, sizes, dims)


def test_axes_by_name_for_each_parameter() -> None:
    dims = DataParallelMeshDims(shard="data")
    run_ranks(check_named_axes, 4, ("data", "tensor"), (2, 2), dims, True)


def check_named_axes_errors() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    dims = DataParallelMeshDims(shard="data")
    with pytest.raises(ValueError, match=r"Got plain tensor for parameter 'norm\.weight'"):
        fully_shard(Pair(), mesh=mesh, dp_mesh_dims=dims)
    with pytest.raises(ValueError, match="Mesh dim name 'dp' not found"):
        fully_shard(Pair(), mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard="dp"))
    with pytest.raises(ValueError, match="mesh must have mesh_dim_names"):
        fully_shard(Pair(), mesh=init_device_mesh("cpu", (4,)), dp_mesh_dims=dims)
    with pytest.raises(ValueError, match="dp_mesh_dims must be a torch"):
        fully_shard(Pair(), mesh=mesh, dp_mesh_dims="data")
    model = on_whole_mesh(mesh, Pair())
    sharded = distribute_tensor(torch.zeros(WIDTH), mesh, [Shard(0), Replicate()])
    model.norm.weight = nn.Parameter(sharded)
    with pytest.raises(ValueError, match=r"Expected Replicate\(\) on DP dim 'data' but got"):
        fully_shard(model, mesh=mesh, dp_mesh_dims=dims)


def test_wrong_named_axes_are_refused() -> None:
    run_ranks(check_named_axes_errors, 4)
