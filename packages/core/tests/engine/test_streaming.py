"""``stream_parameters``: whole parameters, a bucket in one collective."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from vescale_fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    RankMismatchError,
    fully_shard,
    stream_parameters,
    unsharded,
)
from vescale_fsdp.engine import buckets
from vescale_fsdp.testing import RankError, run_ranks

from ..allocations import peak_of, traced

WIDTH = 12


class Block(nn.Module):
    def __init__(self, *, frozen: bool = False) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.q = nn.Linear(WIDTH, WIDTH, bias=False)
        self.k = nn.Linear(WIDTH, 5, bias=False)
        self.v = nn.Linear(WIDTH, 7, bias=False)
        self.scale = nn.Parameter(torch.randn(()), requires_grad=not frozen)
        self.empty = nn.Parameter(torch.randn(0, 3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        return self.q(x) * self.scale + self.k(x).sum(-1, True) + self.v(x).sum(-1, True)


class Model(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(17, WIDTH)
        self.blocks = nn.ModuleList([Block(frozen=i == 1) for i in range(3)])
        self.head = nn.Linear(WIDTH, 17, bias=False)
        self.head.weight = self.embed.weight
        self.blocks.to(dtype)
        self.blocks[2].norm.float()

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x.to(block.q.weight.dtype)).to(x.dtype)
        return self.head(x)


def sharded(model: Model | None = None, **options: Any) -> Model:
    model = model or Model()
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def expected(model: nn.Module, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """What every rank has by ``full_tensor`` of each parameter."""
    found = {}
    for name, param in model.named_parameters():
        full = param.full_tensor() if isinstance(param, DTensor) else param
        found[name] = full.detach().to(dtype or full.dtype)
    return found


def assert_same(found: dict[str, Tensor | None], wanted: dict[str, Tensor]) -> None:
    assert list(found) == list(wanted)
    for name, tensor in found.items():
        assert tensor is not None
        assert type(tensor) is Tensor
        assert not tensor.requires_grad
        assert tensor.is_contiguous()
        assert tensor.dtype == wanted[name].dtype
        assert torch.equal(tensor, wanted[name]), name


# Every layout, any size of buckets


def layouts(world: int) -> dict[str, Any]:
    flat = init_device_mesh("cpu", (world,))
    made: dict[str, Any] = {
        "plain": lambda: Model(),
        "zero3": lambda: sharded(),
        "bf16": lambda: sharded(Model(torch.bfloat16)),
        "ddp": lambda: sharded(sharding="ddp"),
        "zero1": lambda: sharded(sharding="zero1"),
        "Shard(1)": lambda: sharded(
            shard_placement_fn=lambda p: Shard(1) if p.ndim == 2 else None, mesh=flat
        ),
        "offload": lambda: sharded(offload_policy=CPUOffloadPolicy(pin_memory=False)),
        "root only": lambda: fully_shard(Model()),
        "part": lambda: part_sharded(),
    }
    if world == 4:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
        made["hsdp"] = lambda: sharded(mesh=mesh)
        made["hsdp_zero1"] = lambda: sharded(mesh=mesh, sharding="hsdp_zero1")
        made["tensor parallel"] = lambda: tensor_parallel(mesh)
    return made


def part_sharded() -> Model:
    """One block is sharded, the rest is plain."""
    model = Model()
    fully_shard(model.blocks[1])
    return model


def tensor_parallel(mesh: Any) -> Model:
    model = Model()
    for block in model.blocks:
        for name, dim in (("q", 0), ("k", 1)):
            linear = getattr(block, name)
            placed = distribute_tensor(linear.weight.detach(), mesh["inner"], [Shard(dim)])
            linear.weight = nn.Parameter(placed)
    return sharded(model, mesh=mesh["outer"])


def check_layouts(seed: int) -> None:
    draw = random.Random(seed)
    world = dist.get_world_size()
    for name, make in layouts(world).items():
        model = make()
        for _ in range(3):
            bucket_bytes = draw.choice([1, 100, 1000, 3000, 1 << 20])
            dtype = draw.choice([None, torch.bfloat16, torch.float64])
            wanted = expected(model, dtype)
            to = draw.choice(["all", "cpu"])
            found = dict(stream_parameters(model, bucket_bytes=bucket_bytes, dtype=dtype, to=to))
            assert_same(found, wanted)
            receiver = draw.randrange(world)
            found = dict(
                stream_parameters(model, bucket_bytes=bucket_bytes, dtype=dtype, to=receiver)
            )
            if dist.get_rank() == receiver:
                assert_same(found, wanted)
            else:
                assert list(found) == list(wanted), name
                assert set(found.values()) == {None}


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_all_layouts_give_what_full_tensor_gives(world: int) -> None:
    run_ranks(check_layouts, world, world)


# Around training


def check_training() -> None:
    model, other = sharded(), sharded()
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.1) for each in (model, other)]
    for step in range(3):
        tokens = torch.randint(17, (2, 5), generator=torch.Generator().manual_seed(step))
        for each, optimizer in zip((model, other), optimizers, strict=True):
            each(tokens).square().mean().backward()
            if each is model:
                assert_same(dict(stream_parameters(each)), expected(each))
            optimizer.step()
            optimizer.zero_grad()
            if each is model:
                with torch.no_grad():
                    each(tokens)  # the root stays unsharded
                assert_same(dict(stream_parameters(each, bucket_bytes=700)), expected(each))
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one.to_local(), two.to_local())
    with unsharded(model):
        found = dict(stream_parameters(model))
    assert_same(found, expected(model))
    forward = model.blocks[0].register_forward_hook(
        lambda *_: found.update(stream_parameters(model))
    )
    with torch.no_grad():
        model(tokens)
    forward.remove()
    assert_same(found, expected(model))


def test_training_goes_on_with_the_same_bits() -> None:
    run_ranks(check_training, 2)


def check_compiled_and_wrapped() -> None:
    model = sharded()
    wanted = expected(model)
    wrapped = nn.ModuleDict({"inner": torch.compile(model, backend="eager")})
    found = dict(stream_parameters(wrapped))
    assert_same(found, {f"inner.{name}": value for name, value in wanted.items()})
    assert isinstance(model, FSDPModule)


def test_names_are_those_of_the_model_itself() -> None:
    run_ranks(check_compiled_and_wrapped, 2)


# Leaving early


def fail_within(stream: Iterator[tuple[str, Tensor | None]]) -> None:
    for name, _ in stream:
        raise KeyError(name)


def check_leaving() -> None:
    model = sharded()
    wanted = expected(model)
    for count in range(len(wanted) + 1):
        found = {}
        for name, tensor in stream_parameters(model, bucket_bytes=600):
            if len(found) == count:
                break
            found[name] = tensor
        assert list(found) == list(wanted)[:count]
    with pytest.raises(KeyError):
        fail_within(stream_parameters(model, bucket_bytes=600))
    stream_parameters(model)  # never begun
    assert_same(dict(stream_parameters(model, bucket_bytes=600)), wanted)


def test_all_ranks_may_leave_after_any_parameter() -> None:
    run_ranks(check_leaving, 2)


# Names


def check_names() -> None:
    model = sharded()
    wanted = expected(model)
    found = dict(stream_parameters(model, tied="each"))
    assert list(found)[:2] == ["embed.weight", "head.weight"]
    assert found["embed.weight"] is found["head.weight"]

    def rename(name: str) -> str | None:
        return None if name.endswith("norm.bias") else name.replace("blocks.", "layers.")

    merge = {"*.qkv": ["*.q.weight", "*.k.weight", "*.v.weight"]}
    for bucket_bytes in (1, 1000, 1 << 20):
        found = dict(
            stream_parameters(model, bucket_bytes=bucket_bytes, rename=rename, merge=merge)
        )
        assert list(found) == [
            "embed.weight",
            *(
                f"layers.{i}.{name}"
                for i in range(3)
                for name in ("scale", "empty", "norm.weight", "qkv")
            ),
        ]
        for i in range(3):
            parts = [wanted[f"blocks.{i}.{name}.weight"] for name in "qkv"]
            assert torch.equal(found[f"layers.{i}.qkv"], torch.cat(parts))
            assert torch.equal(found[f"layers.{i}.scale"], wanted[f"blocks.{i}.scale"])


def test_renamed_merged_and_tied_names() -> None:
    run_ranks(check_names, 2)


class Tied(nn.Module):
    """Two blocks with the same weights; ``v`` of the third is its ``k``."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        for name in ("q", "k", "v"):
            setattr(self.blocks[1], name, getattr(self.blocks[0], name))
        self.blocks[2].v.weight = self.blocks[2].k.weight


def check_tied_parts() -> None:
    model = fully_shard(Tied())
    wanted = expected(model)
    merge = {"*.qkv": ["*.q.weight", "*.k.weight", "*.v.weight"]}
    first = torch.cat([wanted[f"blocks.0.{name}.weight"] for name in "qkv"])
    last = torch.cat([wanted[f"blocks.2.{name}.weight"] for name in "qkk"])
    for tied in ("once", "each"):
        for bucket_bytes in (1, 1 << 20):
            options: dict[str, Any] = {"merge": merge, "tied": tied, "bucket_bytes": bucket_bytes}
            found = dict(stream_parameters(model, **options))
            assert not any(name.endswith((".q.weight", ".k.weight", ".v.weight")) for name in found)
            assert torch.equal(found["blocks.0.qkv"], first)
            assert torch.equal(found["blocks.2.qkv"], last)
            assert ("blocks.1.qkv" in found) == (tied == "each")
            if tied == "each":
                assert found["blocks.1.qkv"] is found["blocks.0.qkv"]


def test_parts_that_are_tied() -> None:
    run_ranks(check_tied_parts, 2)


def test_a_plain_model_needs_no_process_group() -> None:
    model = Model()
    for to in ("all", "cpu", 0):
        found = dict(stream_parameters(model, to=to))
        assert_same(found, expected(model))


# Errors come before any communication


def check_errors() -> None:
    model = sharded()
    for options, message in [
        ({"bucket_bytes": 0}, "bucket_bytes must be at least 1"),
        ({"dtype": torch.int8}, "dtype must be a floating-point type"),
        ({"to": "rank"}, 'to must be "all", "cpu" or a rank from 0 to 1'),
        ({"to": 2}, "a rank from 0 to 1, got 2"),
        ({"to": True}, "a rank from 0 to 1, got True"),
        ({"tied": "twice"}, 'tied must be "once" or "each"'),
        ({"rename": lambda name: "one"}, "embed.weight and blocks.0.scale would both be 'one'"),
        ({"merge": {"a": ["blocks.0.q.weight", "none"]}}, "none is no parameter"),
        ({"merge": {"a": ["*.q.weight", "*.k.weight"]}}, "would both be 'a'"),
        ({"merge": {"a": ["*.q.weight"]}}, "would both be 'a'"),
        (
            {"merge": {"*.a": ["*.q.weight", "*.k.weight"], "*.b": ["*.k.weight", "*.v.weight"]}},
            "blocks.0.k.weight is no parameter, or part of another one",
        ),
        ({"merge": {"a": ["embed.weight", "blocks.0.norm.weight"]}}, "cannot be merged"),
        ({"merge": {"embed.weight": ["blocks.0.q.weight"]}}, "would both be 'embed.weight'"),
        ({"merge": {"blocks.2.q.weight": ["embed.weight"]}}, "would both be"),
    ]:
        with pytest.raises(ValueError, match=message):
            stream_parameters(model, **options)
    with torch.device("meta"):
        blank = Model()
    with pytest.raises(RuntimeError, match="is on meta"):
        stream_parameters(sharded(blank))


def test_arguments_are_checked() -> None:
    run_ranks(check_errors, 2)


def check_disagreement(what: str) -> None:
    rank = dist.get_rank()
    model = sharded()
    options: dict[str, Any] = {
        "to": {"to": rank},
        "dtype": {"dtype": torch.bfloat16 if rank else None},
        "bucket": {"bucket_bytes": 1000 + rank},
        "names": {"rename": lambda name: None if rank and "norm" in name else name},
    }[what]
    with pytest.raises(RankMismatchError, match="stream"):
        stream_parameters(model, **options)
    assert_same(dict(stream_parameters(model)), expected(model))


@pytest.mark.parametrize("what", ["to", "dtype", "bucket", "names"])
def test_ranks_that_differ_are_told(what: str) -> None:
    run_ranks(check_disagreement, 2, what)


def check_a_rank_that_leaves_alone() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VESCALE_FSDP_TIMEOUT_S", "2")
        for index, _ in enumerate(stream_parameters(sharded(), bucket_bytes=1)):
            if dist.get_rank() and index == 2:
                raise KeyError("this rank leaves")


def test_a_rank_that_leaves_alone_is_named() -> None:
    with pytest.raises(RankError, match="stream_parameters"):
        run_ranks(check_a_rank_that_leaves_alone, 2)


# Cost


class Many(nn.Module):
    """300 small parameters, in 30 units."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.ParameterList(torch.randn(16, 8 + j) for j in range(10)) for _ in range(30)
        )


def many() -> nn.Module:
    model = Many()
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


def check_collectives() -> None:
    model = many()
    started: list[int] = []
    all_gather = buckets._all_gather

    def counted(parts: list[Tensor], mine: Tensor, group: Any) -> Any:
        started.append(sum(part.nbytes for part in parts) - mine.nbytes)
        return all_gather(parts, mine, group)

    total = sum(param.numel() for param in model.parameters()) * 4
    own = sum(param.to_local().numel() for param in model.parameters()) * 4
    with mock.patch.object(buckets, "_all_gather", counted):
        for bucket_bytes, num_buckets in ((1 << 20, 1), (total // 2, 3), (1, 300)):
            started.clear()
            found = dict(stream_parameters(model, bucket_bytes=bucket_bytes))
            assert len(found) == 300
            assert len(started) == num_buckets
            assert sum(started) == total - own  # each element that is elsewhere, once
        started.clear()
        dict(stream_parameters(model, dtype=torch.bfloat16))
        assert sum(started) == (total - own) // 2


def test_one_collective_a_bucket_and_no_byte_twice() -> None:
    run_ranks(check_collectives, 2)


def check_memory(bucket_bytes: int) -> int:
    model = many()

    def stream() -> None:
        for _, tensor in stream_parameters(model, bucket_bytes=bucket_bytes):
            assert tensor is not None

    stream()
    return peak_of(traced(stream))[0]


def test_memory_is_at_most_two_buckets() -> None:
    for bucket_bytes in (1 << 14, 1 << 16):
        for peak in run_ranks(check_memory, 2, bucket_bytes):
            assert peak <= 2 * bucket_bytes
