"""Gathers of 8 bits: the bits of rounding whole tensors, wherever they are cut."""

from __future__ import annotations

import math
import random
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from vescale_fsdp import MixedPrecisionPolicy, QuantizedGather, fully_shard, unsharded
from vescale_fsdp.dbuffer import BlockCodec
from vescale_fsdp.engine.unit import units_in
from vescale_fsdp.testing import run_ranks

from ..dbuffer.rounding import assert_same_bits, rounded
from .helpers import assert_bit_equal, full_parameters, shard_units
from .models import MLP, TinyGPT, gpt_loss, inputs_of, make, tokens_of
from .recorders import Recorder
from .straight_through import StraightThrough, hidden_matrices

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


# Gathered values


class Odd(nn.Module):
    """Parameters of one to four dimensions, of odd sizes; some have zeros, NaN or infinity."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        sizes = random.Random(seed)
        for k, dims in enumerate((2, 1, 3, 2, 4, 2, 2)):
            shape = [sizes.randint(1, 14 if dims < 3 else 6) for _ in range(dims)]
            setattr(self, f"w{k}", nn.Parameter(torch.randn(shape) * 3.0**k))
        with torch.no_grad():
            self.w3[: len(self.w3) // 2] = 0
            self.w5.view(-1)[-1] = math.inf
            self.w6.view(-1)[0] = math.nan


def check_odd() -> None:
    for seed in range(6):
        dtype, size = [
            ("int8", (3, 4)), ("e4m3", (2, 3)), ("int8", 5), ("e4m3", (4, 2)), ("e4m3", 7)
        ][seed % 5]  # fmt: skip
        torch.manual_seed(seed)
        model = Odd(seed)
        whole = {name: param.detach().clone() for name, param in model.named_parameters()}
        least = math.prod(size) if isinstance(size, tuple) else size
        chosen = {name for name, t in whole.items() if t.numel() >= least and name != "w1"}
        policy = lambda name, _: name in chosen  # noqa: B023, E731  # used within the turn
        to = torch.bfloat16 if seed % 2 else torch.float32
        options: dict[str, Any] = {"mp_policy": BF16} if seed % 2 else {}
        fully_shard(model, gather_codec=QuantizedGather(dtype, size, policy), **options)
        with unsharded(model):
            for name, param in model.named_parameters():
                exact = whole[name]
                expected = rounded(exact, dtype, size) if name in chosen else exact
                assert_same_bits(param.detach(), expected.to(to))
        for name, param in model.named_parameters():
            assert_same_bits(param.full_tensor().detach(), whole[name])


def test_gathered_parameters_are_the_whole_ones_rounded() -> None:
    for world_size in (1, 2, 3, 4):
        run_ranks(check_odd, world_size)


# Training


def train_both(
    gather: QuantizedGather,
    dtype: torch.dtype = torch.float32,
    micro_batches: int = 1,
    **options: Any,
) -> None:
    """Three steps of AdamW, sharded and in one process that rounds its own weights."""
    plain, model = make(TinyGPT), make(TinyGPT)
    reference = StraightThrough(plain, hidden_matrices(gather.dtype, gather.block), dtype)
    policy = BF16 if dtype == torch.bfloat16 else MixedPrecisionPolicy()
    shard_units(model, model.blocks, gather_codec=gather, mp_policy=policy, **options)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.01) for each in (plain, model)]
    for step in range(3):
        batches = [tokens_of(10 * step + k, dist.get_rank()) for k in range(micro_batches)]
        losses = [lambda each, tokens=tokens: gpt_loss(each, tokens) for tokens in batches]
        expected = reference.backward(losses)
        for k, tokens in enumerate(batches):
            model.set_requires_gradient_sync(k == micro_batches - 1)
            loss = gpt_loss(model, tokens)
            loss.backward()
        assert loss.item() == expected, f"step {step}"
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_bit_equal(full_parameters(model), full_parameters(plain))


def check_training() -> None:
    train_both(QuantizedGather("int8", (4, 5)))
    train_both(QuantizedGather("e4m3", 16), torch.bfloat16)
    train_both(QuantizedGather("e4m3", (5, 4)), reshard_after_forward=False)
    train_both(QuantizedGather("int8", (32, 4)), reshard_after_forward=True, micro_batches=2)
    train_both(QuantizedGather("int8", (4, 5)), in_flight=3, sharding="zero2")
    train_both(QuantizedGather("e4m3", (4, 4)), sharding="ddp")


def test_training_is_that_of_one_process_that_rounds_its_weights() -> None:
    run_ranks(check_training, 2)


def check_kept_parts() -> None:
    """Sums of four ranks are in another order than one process has: beside whole gathers."""
    found = []
    for reshard in (True, 2):
        model = make(TinyGPT)
        gather = QuantizedGather("int8", (4, 5))
        shard_units(model, model.blocks, gather_codec=gather, reshard_after_forward=reshard)
        for step in range(2):
            gpt_loss(model, tokens_of(step, dist.get_rank())).backward()
            torch.optim.SGD(model.parameters(), lr=0.1).step()
        found.append(full_parameters(model))
    assert_bit_equal(found[1], found[0])


def test_parts_that_are_kept_from_forward_have_the_same_bits() -> None:
    run_ranks(check_kept_parts, 4)


# Which parameters, and how many bytes


def check_choice() -> None:
    model = make(TinyGPT)
    model.head = nn.Linear(12, 23, bias=False)  # not tied: told by its name and its rows
    shard_units(model, model.blocks, gather_codec=QuantizedGather(block=(4, 4)))
    chosen = [
        fsdp_param.fqn
        for unit in units_in(model).values()
        for group in unit.groups
        for fsdp_param, (gather, _) in zip(group.fsdp_params, group.codings, strict=True)
        if gather
    ]
    assert chosen == ["qkv.weight", "out.weight", "up.weight", "down.weight"] * 2
    root = units_in(model)[""]
    assert all(group.codec is None for group in root.groups)  # its shard travels as it is


def test_hidden_matrices_are_rounded_and_the_root_is_not_encoded() -> None:
    run_ranks(check_choice, 1)


def check_bytes() -> list[tuple[int, int]]:
    found = []
    for options in ({"gather_codec": QuantizedGather("e4m3", (32, 32))}, {}):
        model = make(MLP, 1, 128)
        fully_shard(model.layers[0], mp_policy=BF16, **options)
        with Gathered() as gathered:
            model.layers[0].unshard()
        (num_bytes,) = gathered.num_bytes
        found.append(num_bytes)
    return found


class Gathered(Recorder):
    """The bytes that a rank puts into each gather of two ranks, or each message to the other."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.split("::")[1]
        if name in ("_allgather_base_", "send"):
            self.num_bytes.append(
                args[1].nbytes if name == "_allgather_base_" else args[0][0].nbytes
            )
        return super().__torch_dispatch__(func, types, args, kwargs)


def test_a_gather_sends_a_byte_for_each_weight_and_four_for_each_scale() -> None:
    # 128 x 128 and a bias of 128 on 2 ranks. With rows cut freely: 8,256 elements of two bytes.
    # With tiles of 32 rows a shard has 64 rows and the bias beside them: 8 scales for 64 rows, 128
    # numbers of two bytes, 8,192 codes; the rank without the bias sends as much.
    assert run_ranks(check_bytes, 2) == [[8 * 4 + 2 * 128 + 64 * 128, 2 * 8256]] * 2


# How often weights are encoded


class Counting:
    """Counts encodings within a context."""

    def __enter__(self) -> Counting:
        self.num = 0
        self._original = original = BlockCodec.encode

        def encode(codec: BlockCodec, *args: Any) -> None:
            self.num += 1
            original(codec, *args)

        BlockCodec.encode = encode  # type: ignore[method-assign]
        return self

    def __exit__(self, *exc_info: object) -> None:
        BlockCodec.encode = self._original  # type: ignore[method-assign]


def check_encodings() -> None:
    model = make(MLP, 3, 6)
    shard_units(model, model.layers, gather_codec=QuantizedGather(block=(2, 3)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        with Counting() as counting:
            for sync in (False, True):
                model.set_requires_gradient_sync(sync)
                model(inputs_of(step, dist.get_rank(), 6)).sum().backward()
        assert counting.num == 3, step  # one for each layer: two forwards, two backwards
        optimizer.step()
        optimizer.zero_grad()
    before = model(inputs_of(0, 0, 6))
    model.layers[0].weight.to_local().data.mul_(2.0)  # raises no version that we see
    assert not torch.equal(model(inputs_of(0, 0, 6)), before)


def test_weights_are_encoded_once_for_each_optimizer_step() -> None:
    run_ranks(check_encodings, 2)


def messages_held(model: nn.Module) -> int:
    groups = [group for unit in units_in(model).values() for group in unit.groups]
    return sum(group._encoded_shard._message is not None for group in groups)


def check_memory() -> None:
    model = make(MLP, 3, 6)
    shard_units(model, model.layers, gather_codec=QuantizedGather(block=(2, 3)))
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            out = model(inputs_of(0, dist.get_rank(), 6))
        assert messages_held(model) == (3 if grad else 0)
        if grad:
            out.sum().backward()
            assert messages_held(model) == 0


def test_messages_are_kept_from_forward_to_backward_and_no_longer() -> None:
    run_ranks(check_memory, 2)
