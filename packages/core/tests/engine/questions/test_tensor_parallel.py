"""Parameters that are DTensors already: tensor parallelism inside of sharded data parallelism.

Two by two ranks, against one process. `../test_tensor_parallel` compares with FSDP2.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.optim import SGD

from ..helpers import shard_units
from .asking import (
    ROWS,
    WIDTH,
    Answers,
    Block,
    Case,
    Cases,
    Net,
    Outcomes,
    answer,
    backward,
    blocks_of,
    check_models,
    check_rests,
    in_settings,
    made,
    named,
    part,
)

LENGTH = 4


def plan() -> dict[str, ParallelStyle]:
    return {"a": ColwiseParallel(), "b": RowwiseParallel()}


def sequence_plan() -> dict[str, ParallelStyle]:
    return {
        "norm": SequenceParallel(),
        "a": ColwiseParallel(input_layouts=Shard(1)),
        "b": RowwiseParallel(),
    }


class SequenceBlock(Block):
    """Its norm takes a part of the sequence on each rank, so its gradients are partial sums."""

    mesh: DeviceMesh | None = None

    def forward(self, x: Tensor) -> Tensor:
        y = x
        if self.mesh is not None:
            y = DTensor.from_local(x, self.mesh, [Replicate()]).redistribute(placements=[Shard(1)])
        return x + self.b(F.gelu(self.a(self.norm(y))))


def sequences(step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(ROWS, LENGTH, WIDTH, dtype=torch.float64, generator=generator)


def units_in_units(model: Any) -> Iterable[nn.Module]:
    return [*(block.a for block in model.blocks), *model.blocks]


def check(
    styles: Any = plan,
    block: type[Block] = Block,
    units: Any = blocks_of,
    freezes: bool = False,
    compiles: bool = False,
    **options: Any,
) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    plain: Any = made(lambda: Net(block))
    model: Any = made(lambda: Net(block))
    for each in model.blocks:
        each.mesh = mesh["tensor"]
        parallelize_module(each, mesh["tensor"], styles())
    if freezes:
        for each in (plain, model):
            each.blocks[1].a.requires_grad_(False)
    shard_units(model, units(model), mesh=mesh["data"], **options)
    if compiles:
        for each in model.blocks:
            each.compile(backend="aot_eager")
    optimizers = [SGD(each.parameters(), 0.1) for each in (plain, model)]
    for step in range(3):
        x = sequences(step)
        for optimizer in optimizers:
            optimizer.zero_grad()
        backward(plain, x)
        with torch._dynamo.config.patch(error_on_recompile=step >= 2):
            backward(model, part(x, mesh["data"].get_local_rank(), 2))
        check_models(plain, model, f"step {step}")
        check_rests(model)
        for optimizer in optimizers:
            optimizer.step()


def cases() -> Cases:
    return {
        **in_settings("layers", check),
        "units in units": Case(lambda: check(units=units_in_units)),
        "one is frozen": Case(lambda: check(freezes=True)),
        "sequences": Case(lambda: check(sequence_plan, SequenceBlock)),
        "compiled": Case(lambda: check(compiles=True)),
    }


CASES = {name: replace(case, ranks=4) for name, case in cases().items()}


def answers(*names: str) -> Answers:
    return answer(CASES, names)


# Dynamo looks for ``.grad`` where there is none.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("name", named(CASES))
def test_training_is_that_of_one_process(outcomes: Outcomes, name: str) -> None:
    outcomes.check(name)
