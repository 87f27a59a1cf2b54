"""GPU memory of a training, simulated with a model of the caching allocator; compared with FSDP2.

    python -m benchmarks.cuda_memory                # on any machine; two minutes

Both engines run in the simulator of the core's tests, which allocates as `c10/cuda` does and
computes nothing. It simulates rank 0 of a world with torch's fake group, bf16 compute, fp32
reductions and fused AdamW. Peaks are those of the third to fifth step and contain shards, optimizer
states, activations and buffers, but not the memory of NCCL and other libraries.
"""

from __future__ import annotations

import argparse
import gc
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from benchmarks.models import PRESETS, loss_of
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import _disable_current_modes

from vescale_fsdp import fully_shard

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "packages" / "core" / "tests"))

from simulator import simulator as simulation

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
NUM_STEPS, NUM_WARM = 5, 2
_FSDP2 = "torch.distributed.fsdp._fully_shard."


class Counted(simulation.Simulator):
    """Allocates, and computes nothing."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "fsdp":  # made of operators that are to be counted
            from torch.distributed.fsdp._fully_shard import _fsdp_collectives

            name = func._schema.name.removeprefix("fsdp::")
            name = {"all_gather_copy_in": "all_gather_copy_in_cuda"}.get(name, name)
            with self:
                return getattr(_fsdp_collectives, name)(*args, **(kwargs or {}))
        if func.namespace == "c10d":
            return func(*args, **(kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _synchronized(self, func: Any, args: Any) -> Any:
        if func._schema.name == "aten::nonzero":  # all are true
            (mask,) = args
            found = torch.empty(mask.numel(), mask.dim(), dtype=torch.int64)
            self._own(found)
            return found
        return super()._synchronized(func, args)

    def _kernel(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func._schema.name.startswith(("aten::index", "aten::_index_put")):
            with _disable_current_modes():
                args = tuple(map(_without_masks, args))
        return super()._kernel(func, args, kwargs)


def _without_masks(value: Any) -> Any:
    """Indices in place of masks, as if all of them were true."""
    if not isinstance(value, list):
        return value
    return [
        torch.empty(each.numel(), dtype=torch.int64)
        if isinstance(each, Tensor) and each.dtype == torch.bool
        else each
        for each in value
    ]


def peaks(engine: str, name: str, world_size: int, in_flight: int) -> tuple[int, int]:
    """Bytes: the most that was allocated, and what the allocator has reserved."""
    preset = PRESETS[name]
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    counted = Counted(runs=False)
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(simulation, "Simulator", return_value=counted))
        stack.enter_context(simulation.simulated(runs=False))
        for module in ("_fsdp_collectives", "_fsdp_init", "_fsdp_param_group", "_fsdp_state"):
            stack.enter_context(
                mock.patch(f"{_FSDP2}{module}._get_device_handle", return_value=counted)
            )
        with counted:
            _train(engine, preset, in_flight, counted)
        found = counted.allocator.peak_allocated, counted.allocator.reserved
    dist.destroy_process_group()
    gc.collect()
    return found


def _train(engine: str, preset: Any, in_flight: int, counted: Counted) -> None:
    model = preset.make()
    with _disable_current_modes():
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    shard: Any = fully_shard if engine == "vescale" else torch_fully_shard
    options = {"in_flight": in_flight} if engine == "vescale" else {}
    for block in model.blocks:
        shard(block, mesh=mesh, mp_policy=BF16, **options)
    shard(model, mesh=mesh, mp_policy=BF16, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    allocator = counted.allocator
    with _disable_current_modes():
        inputs, targets = preset.draw(torch.Generator().manual_seed(0))
    for step in range(NUM_STEPS):
        if step == NUM_WARM:  # as after torch.cuda.empty_cache(): what making the model took
            gc.collect()
            allocator.peak_allocated = allocator.allocated
            allocator.drop_free_segments()
        loss_of(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()


def main() -> int:
    """Print a table; exit with 1 if ours is larger anywhere."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--models", nargs="+", default=["gpt-7m", "moe-10m"], choices=PRESETS)
    parser.add_argument("--worlds", nargs="+", type=int, default=[8, 64])
    arguments = parser.parse_args()
    print("| model | ranks | engine | allocated | reserved |\n|---|---:|---|---:|---:|")
    is_larger = False
    for name in arguments.models:
        for world_size in arguments.worlds:
            theirs = peaks("fsdp2", name, world_size, 2)
            for engine, in_flight in (("fsdp2", 2), ("vescale", 2), ("vescale", 1)):
                found = theirs if engine == "fsdp2" else peaks(engine, name, world_size, in_flight)
                is_larger |= any(a > b for a, b in zip(found, theirs, strict=True))
                label = "FSDP2" if engine == "fsdp2" else f"ours, `in_flight={in_flight}`"
                sizes = " | ".join(f"{each / 2**20:.1f} MiB" for each in found)
                print(f"| {name} | {world_size} | {label} | {sizes} |", flush=True)
    return int(is_larger)


if __name__ == "__main__":
    sys.exit(main())
