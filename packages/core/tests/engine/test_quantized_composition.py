"""Quantized gathers with what else there is: axes, optimizers, checkpoints, packed weights."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from vescale_fsdp import QuantizedGather, QuantizedReduce, combine, fully_shard, unsharded
from vescale_fsdp.checkpoint import load, save
from vescale_fsdp.engine.unit import units_in
from vescale_fsdp.optim import AdamW8bit, Muon, OptimizerGroup, split_named_params
from vescale_fsdp.testing import run_ranks

from ..dbuffer.rounding import rounded
from .helpers import assert_bit_equal, full_gradients, full_parameters, shard_units
from .models import MLP, TinyGPT, gpt_loss, inputs_of, make, tokens_of
from .straight_through import StraightThrough, hidden_matrices
from .test_quantized_gather import Gathered

GATHER = QuantizedGather("e4m3", (4, 5))


def stepped(model: nn.Module, steps: int = 2, lr: float = 0.1) -> nn.Module:
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    for step in range(steps):
        gpt_loss(model, tokens_of(step, dist.get_rank())).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


# Optimizers


def optimizer_of(model: nn.Module, name: str) -> torch.optim.Optimizer:
    if name == "AdamW8bit":
        return AdamW8bit(model.parameters(), lr=0.01, block_size=16, min_8bit_size=64)
    hidden, rest = split_named_params(model)
    return OptimizerGroup(muon=Muon(hidden, lr=0.02), adamw=torch.optim.AdamW(rest, lr=0.01))  # type: ignore[return-value]


def check_optimizers() -> None:
    for name, gather in (
        ("AdamW8bit", QuantizedGather("int8", (4, 4))),
        ("Muon", QuantizedGather("e4m3", (4, 5))),
    ):
        plain, model = make(TinyGPT), make(TinyGPT)
        reference = StraightThrough(plain, hidden_matrices(gather.dtype, gather.block))
        asked = AdamW8bit.granularity(16, min_8bit_size=64) if name == "AdamW8bit" else None
        granularity = combine(asked, gather.granularity())
        shard_units(model, model.blocks, gather_codec=gather, granularity=granularity)
        optimizers = [optimizer_of(each, name) for each in (plain, model)]
        for step in range(3):
            tokens = tokens_of(step, dist.get_rank())
            reference.backward([lambda each, tokens=tokens: gpt_loss(each, tokens)])
            gpt_loss(model, tokens).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        assert_bit_equal(full_parameters(model), full_parameters(plain))


# Checkpoints and copies


def check_checkpoints(folder: str) -> None:
    model = make(TinyGPT)
    shard_units(model, model.blocks, gather_codec=GATHER)
    stepped(model)
    masters = full_parameters(model)
    assert not torch.equal(
        masters["blocks.0.up.weight"], rounded(masters["blocks.0.up.weight"], "e4m3", (4, 5))
    )
    save(f"{folder}/one", model).wait()
    other = make(TinyGPT, seed=1)
    shard_units(other, other.blocks)  # without: another layout
    load(f"{folder}/one", other)
    assert_bit_equal(full_parameters(other), masters)
    state = {name: value.full_tensor() for name, value in model.state_dict().items()}
    for name, value in masters.items():
        assert torch.equal(state[name], value)
    twin = copy.deepcopy(model)
    stepped(model)
    stepped(twin)
    assert_bit_equal(full_parameters(twin), full_parameters(model))


def check_written_back() -> None:
    model = make(MLP, 1, 8)
    fully_shard(model, gather_codec=GATHER)
    (exact,) = (p for name, p in full_parameters(model).items() if "weight" in name)
    with unsharded(model, writeback=True):
        weight = model.layers[0].weight
        assert torch.equal(weight.detach(), rounded(exact, "e4m3", (4, 5)))
        with torch.no_grad():
            weight[2] = 7.0
    exact[2] = 7.0
    assert torch.equal(model.layers[0].weight.full_tensor(), exact)  # the rest keeps its precision


# Axes


def check_replicas() -> None:
    """Four ranks as 2 x 2 give the bits of themselves as rows of the table of stages."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    model, plain = make(TinyGPT), make(TinyGPT)
    shard_units(model, model.blocks, mesh=mesh, gather_codec=GATHER)
    reference = StraightThrough(plain, hidden_matrices("e4m3", (4, 5)))
    tokens = tokens_of(0, dist.get_rank())
    loss = gpt_loss(model, tokens)
    assert torch.equal(loss, gpt_loss(reference.rounded(), tokens))
    loss.backward()
    reference.backward([lambda each: gpt_loss(each, tokens)])
    expected = full_gradients(plain)
    for name, gradient in full_gradients(model).items():  # sums in another order
        torch.testing.assert_close(gradient, expected[name], rtol=1e-5, atol=1e-7)


def check_cut_outside() -> None:
    """What rests is cut over both axes: messages go over both of them, with the bits of hsdp."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    found = []
    for sharding in ("hsdp", "hsdp_zero1"):
        model = make(TinyGPT)
        reduce = QuantizedReduce((4, 5), error_feedback=True)
        options: dict[str, Any] = {"mesh": mesh, "sharding": sharding, "gather_codec": GATHER}
        shard_units(model, model.blocks, reduce_codec=reduce, **options)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        for step in range(3):
            for sync in (False, True):
                model.set_requires_gradient_sync(sync)
                loss = gpt_loss(model, tokens_of(2 * step + sync, dist.get_rank()))
                loss.backward()
                losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
        masters = full_parameters(model)
        with unsharded(model, writeback=True):
            for name, param in model.named_parameters():
                if "blocks" in name and param.dim() > 1:
                    assert torch.equal(param.detach(), rounded(masters[name], "e4m3", (4, 5)))
            with torch.no_grad():
                model.blocks[0].up.weight[2] = 7.0
        masters["blocks.0.up.weight"][2] = 7.0
        assert_bit_equal(full_parameters(model), masters)
        found.append((losses, masters))
    assert found[0][0] == found[1][0]
    assert_bit_equal(found[1][1], found[0][1])
    with Gathered() as gathered:
        model.blocks[0].unshard()
    (group,) = units_in(model.blocks[0])[""].groups
    # One message to the other replica's rank, then those two to the other one that cuts.
    assert sum(gathered.num_bytes) == 3 * group.codec.num_bytes(group.layout)


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16, bias=False), nn.Linear(16, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        down: Tensor = self.down(torch.tanh(self.up(x)))
        return down


def check_tensor_parallel() -> None:
    """Tensor parallelism that cuts between blocks leaves them as they are."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    model, plain = make(Pair), make(Pair)
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    parallelize_module(model, mesh["tensor"], plan)
    fully_shard(model, mesh=mesh["data"], gather_codec=QuantizedGather("int8", (4, 4)))
    with torch.no_grad():
        for param in plain.parameters():
            param.copy_(rounded(param, "int8", (4, 4)))
    with unsharded(model):
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(ours.full_tensor(), theirs)
    x = inputs_of(0, dist.get_rank() // 2, 8)
    torch.testing.assert_close(model(x), plain(x))


# Weights that are quantized already


class Packed(nn.Module):
    """A frozen matrix, 4 bits a number and a scale for every 16, with a trainable LoRA adapter."""

    def __init__(self, rows: int, columns: int, rank: int = 2) -> None:
        super().__init__()
        whole = torch.randn(rows, columns).view(-1, 16)
        scales = whole.abs().amax(1, keepdim=True) / 7
        codes = ((whole / scales).round() + 8).to(torch.uint8)
        packed = codes.view(-1, 2)
        self.shape = (rows, columns)
        self.packed = nn.Parameter(packed[:, 0] + packed[:, 1] * 16, requires_grad=False)
        self.scales = nn.Parameter(scales[:, 0].clone(), requires_grad=False)
        self.down = nn.Parameter(torch.randn(rank, columns) * 0.1)
        self.up = nn.Parameter(torch.zeros(rows, rank))

    def forward(self, x: Tensor) -> Tensor:
        assert self.packed.dtype == torch.uint8, "bytes are never cast"
        codes = torch.stack([self.packed % 16, self.packed // 16], 1).view(-1, 16)
        whole = (codes.float() - 8) * self.scales.float()[:, None]
        return F.linear(x, whole.view(self.shape).to(x)) + F.linear(F.linear(x, self.down), self.up)


class LowRank(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Packed(8, 8) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def check_packed(folder: str) -> None:
    for options in (
        {},
        {"gather_codec": QuantizedGather(block=(1, 4)), "reduce_codec": QuantizedReduce(8)},
    ):
        plain, model = make(LowRank), make(LowRank)
        shard_units(model, model.layers, **options)
        for k in range(2):
            assert isinstance(model.layers[k].packed, nn.Parameter)
            assert model.layers[k].packed.to_local().dtype == torch.uint8
        optimizers = [
            torch.optim.AdamW([p for p in each.parameters() if p.requires_grad], lr=0.01)
            for each in (plain, model)
        ]
        frozen = full_parameters(model)
        for step in range(3):
            x = inputs_of(step, dist.get_rank(), 8)
            losses = [each(x).square().mean() for each in (plain, model)]
            assert options or torch.equal(*losses)
            for loss, optimizer, each in zip(losses, optimizers, (plain, model), strict=True):
                loss.backward()
                if each is plain:
                    for param in plain.parameters():
                        if param.grad is not None:
                            dist.all_reduce(param.grad)
                            param.grad.mul_(0.5)
                optimizer.step()
                optimizer.zero_grad()
        found = full_parameters(model)
        if not options:
            assert_bit_equal(found, full_parameters(plain))
        for name, value in frozen.items():
            is_frozen = name.endswith(("packed", "scales"))
            assert torch.equal(found[name], value) == is_frozen, name
        save(f"{folder}/packed{len(options)}", model).wait()
        other = make(LowRank, seed=1)
        shard_units(other, other.layers)
        load(f"{folder}/packed{len(options)}", other)
        assert_bit_equal(full_parameters(other), found)


def check_on_two_ranks(folder: str) -> None:
    check_optimizers()
    check_checkpoints(folder)
    check_written_back()


def test_optimizers_checkpoints_and_copies_work_on_the_exact_weights(tmp_path: Path) -> None:
    run_ranks(check_on_two_ranks, 2, str(tmp_path))


def test_packed_weights_and_their_scales_train_adapters(tmp_path: Path) -> None:
    run_ranks(check_packed, 2, str(tmp_path))


def check_on_four_ranks() -> None:
    check_replicas()
    check_cut_outside()
    check_tensor_parallel()


def test_replicas_and_tensor_parallelism_see_the_same_blocks() -> None:
    run_ranks(check_on_four_ranks, 4)
