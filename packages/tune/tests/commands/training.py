"""A small GPT trained on every rank, with a ledger of what the engine really holds and sends.

Imports nothing of the command line: it is what the command's figures are compared with.
"""

from __future__ import annotations

import os
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from vescale_fsdp import Granularity, MixedPrecisionPolicy, fully_shard, repeated_blocks
from vescale_fsdp.dbuffer import buffer, codec, collectives, gradients, memory, transport
from vescale_fsdp.dbuffer.transport import SHORTEST_BYTES
from vescale_fsdp.planner import PaddingWarning
from vescale_fsdp.program.window import Window

VOCAB, WIDTH, LENGTH = 131, 24, 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:  # [batch, LENGTH, WIDTH], and so the result
        return x + self.down(F.gelu(self.up(self.mix(self.norm(x)))))


class GPT(nn.Module):
    """Embedding, blocks, norm and head."""

    def __init__(self, num_blocks: int, vocab: int = VOCAB) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(num_blocks)])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, vocab, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:  # [batch, LENGTH] -> [batch, LENGTH, vocab]
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def gpt_with_last_blocks_trained() -> nn.Module:
    """The root and the first two of five blocks are frozen."""
    model = GPT(5).requires_grad_(False)
    for block in model.blocks[2:]:
        block.requires_grad_(True)
    return model


def gpt_with_frozen_matrices() -> nn.Module:
    """Two groups in each unit."""
    model = GPT(4)
    for block in model.blocks:
        block.up.weight.requires_grad_(False)
    model.head.requires_grad_(False)
    return model


class Stack(nn.Module):
    """Blocks alone: the root has no parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(4)])

    def forward(self, tokens: Tensor) -> Tensor:
        x = F.one_hot(tokens % WIDTH, WIDTH).to(torch.bfloat16)
        for block in self.blocks:
            x = block(x)
        return x


class Ledger:
    """Bytes that are there now, and the most there were; bytes sent."""

    def __init__(self) -> None:
        self.now = self.peak = self.sent = 0
        self.lasting = 0  # of what keeps its memory from step to step

    def add(self, num_bytes: int) -> None:
        self.now += num_bytes
        self.peak = max(self.peak, self.now)

    def drop(self, num_bytes: int) -> None:
        self.now -= num_bytes


class CountedRegion:
    """A region that tells a ledger when it has memory."""

    def __init__(self, region: memory.Region, ledger: Ledger, *, keeps: bool) -> None:
        self._region, self._ledger, self.storage = region, ledger, region.storage
        self._keeps = keeps
        self._num_bytes = region.storage.nbytes()

    @property
    def is_materialized(self) -> bool:
        return self._region.is_materialized

    def materialize(self) -> None:
        if not self._region.is_materialized:
            self._ledger.add(self._num_bytes)
        self._region.materialize()
        if self._keeps:
            self._ledger.lasting += self._num_bytes
            self._num_bytes = 0

    def release(self, *, keeps: bool = False) -> None:
        assert not keeps, "no training here keeps the memory of unsharded parameters"
        if self._region.is_materialized:
            self._ledger.drop(self._num_bytes)
        self._region.release()


@contextmanager
def counted(ledger: Ledger) -> Iterator[None]:
    """Have everything that the engine allocates and sends written to ``ledger``."""
    make_region, take, give = buffer.make_region, memory.SlabPool.take, memory.SlabPool.give
    add, add_all = gradients.GradientBuffer.add, gradients.GradientBuffer.add_all
    gather, scatter = _gather(), _scatter()
    exchange, all_reduce, send = dist.all_to_all_single, dist.all_reduce, dist.isend

    def make_counted(num_bytes: int, device: torch.device, *, keeps: bool = False) -> CountedRegion:
        region = make_region(num_bytes, device, keeps=keeps)
        # With "native", as where NCCL is the backend: the allocator keeps it, and not the region.
        is_native = os.environ.get("VESCALE_FSDP_REDUCE") == "native"
        return CountedRegion(region, ledger, keeps=keeps and not is_native)

    def counted_take(self: Any, num_elements: int, dtype: torch.dtype) -> Tensor:
        ledger.add(num_elements * dtype.itemsize)
        return take(self, num_elements, dtype)

    def counted_give(self: Any, slab: Tensor) -> None:
        ledger.drop(slab.nbytes)
        give(self, slab)

    def counted_empty(num_elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        mapped = memory.Mapped(num_elements * dtype.itemsize)
        ledger.add(num_elements * dtype.itemsize)
        weakref.finalize(mapped._mapping, ledger.drop, num_elements * dtype.itemsize)
        return torch.empty(0, dtype=dtype).set_(mapped.storage, 0, (num_elements,), (1,))

    def see(gradient: Tensor) -> None:
        ledger.add(gradient.nbytes)
        weakref.finalize(gradient, ledger.drop, gradient.nbytes)

    def counted_add(self: Any, index: int, gradient: Tensor) -> None:
        see(gradient)
        add(self, index, gradient)

    def counted_add_all(self: Any, gradients: dict[int, Tensor]) -> None:
        for gradient in gradients.values():
            see(gradient)
        with mock.patch.object(type(self), "add", add):
            add_all(self, gradients)

    def counted_gather(output: Tensor, input: Tensor, *args: Any, **rest: Any) -> Any:
        ledger.sent += output.nbytes - input.nbytes
        return gather(output, input, *args, **rest)

    def counted_scatter(output: Tensor, input: Tensor, *args: Any, **rest: Any) -> Any:
        ledger.sent += input.nbytes - output.nbytes
        return scatter(output, input, *args, **rest)

    def counted_exchange(output: Tensor, input: Tensor, *args: Any, **rest: Any) -> Any:
        ledger.sent += input.nbytes - input.nbytes // dist.get_world_size(rest["group"])
        return exchange(output, input, *args, **rest)

    def counted_all_reduce(tensor: Tensor, *args: Any, **rest: Any) -> Any:
        size = dist.get_world_size(rest["group"])
        ledger.sent += 2 * (size - 1) * tensor.nbytes // size
        return all_reduce(tensor, *args, **rest)

    def counted_send(tensor: Tensor, *args: Any, **rest: Any) -> Any:
        if tensor.nbytes >= SHORTEST_BYTES:  # not the flags of used parameters, a byte for each
            ledger.sent += tensor.nbytes
        return send(tensor, *args, **rest)

    with (
        mock.patch.object(buffer, "make_region", make_counted),
        mock.patch.object(memory.SlabPool, "take", counted_take),
        mock.patch.object(memory.SlabPool, "give", counted_give),
        mock.patch.object(collectives, "mapped_empty", counted_empty),
        mock.patch.object(transport, "mapped_empty", counted_empty),
        mock.patch.object(codec, "mapped_empty", counted_empty),
        mock.patch.object(gradients.GradientBuffer, "add", counted_add),
        mock.patch.object(gradients.GradientBuffer, "add_all", counted_add_all),
        mock.patch.object(dist, gather.__name__, counted_gather),
        mock.patch.object(dist, scatter.__name__, counted_scatter),
        mock.patch.object(dist, "all_to_all_single", counted_exchange),
        mock.patch.object(dist, "all_reduce", counted_all_reduce),
        mock.patch.object(dist, "isend", counted_send),
    ):
        yield


def _gather() -> Any:
    return getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def _scatter() -> Any:
    return getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def measure(
    make: Any,
    compute: torch.dtype,
    reshard: bool | None,
    rows: int,
    num_replicas: int,
    options: dict[str, Any],
    micro_batches: int = 1,
) -> dict[str, int]:
    """Train two steps with AdamW on this rank; what the second one took, in bytes."""
    ledger = Ledger()
    num_ranks = dist.get_world_size()
    names = ("replicate", "shard") if num_replicas > 1 else ("shard",)
    sizes = (num_replicas, num_ranks // num_replicas)[-len(names) :]
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    if not {"gather_codec", "reduce_codec"} & options.keys():
        options = options | {
            "granularity": lambda _, p: Granularity.rows(rows) if p.dim() > 1 else None
        }
    # "native": as where NCCL is the backend, whose gathers and reductions take no turns.
    is_native = os.environ["VESCALE_FSDP_REDUCE"] == "native"
    takes_turns = mock.patch.object(Window, "_alternates", return_value=False)
    with (
        counted(ledger),
        takes_turns if is_native else nullcontext(),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore", PaddingWarning)
        torch.manual_seed(0)
        model = make()
        policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32)
        for module in [*repeated_blocks(model), model]:
            fully_shard(
                module,
                mesh=mesh,
                mp_policy=policy,
                reshard_after_forward=reshard,
                **options,
            )
        parameters = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(parameters)
        tokens = torch.randint(WIDTH, (2, LENGTH))
        for _ in range(2):
            optimizer.zero_grad()
            left = ledger.now - ledger.lasting
            assert left == 0, f"{left} bytes are left of the step before"
            ledger.peak = ledger.sent = 0
            for number in range(micro_batches):
                model.set_requires_gradient_sync(number == micro_batches - 1)
                model(tokens).float().square().mean().backward()
            gradients_bytes = storage_bytes([p.grad for p in parameters])
            optimizer.step()
        return {
            "weights": storage_bytes(list(model.parameters())),
            "gradients": gradients_bytes,
            "states": sum(
                state[name].to_local().nbytes
                for state in optimizer.state.values()
                for name in ("exp_avg", "exp_avg_sq")
            ),
            "peak": ledger.peak,
            "sent": ledger.sent,
        }


def storage_bytes(tensors: list[Any]) -> int:
    """Bytes of the memory under the local parts of sharded tensors, each once."""
    storages = {}
    for tensor in tensors:
        storage = tensor.to_local().untyped_storage()
        if tensor.to_local().numel():
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())
