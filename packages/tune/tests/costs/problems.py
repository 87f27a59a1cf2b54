"""Small problems for the tuner."""

from __future__ import annotations

from typing import Any

from vescale_fsdp_tune.costs import Link, Machine
from vescale_fsdp_tune.costs.model import (
    BF16,
    FP32,
    Event,
    Group,
    Moment,
    Tensor,
    Trace,
    make_model,
)
from vescale_fsdp_tune.costs.problem import BlockTimes, Division, Problem

MIB = 1 << 20


def machine(backend: Any = "nccl", **changed: Any) -> Machine:
    """Slow enough that everything counts for blocks of a million elements."""
    given: dict[str, Any] = {
        "name": "a machine",
        "backend": backend,
        "memory_bytes": 1 << 34,
        "ranks_per_node": 2,
        "inside": Link(10e9, 20e-6),
        "between": Link(2e9, 50e-6, 1e-6),
        "copy_bytes_per_s": 50e9,
        "optimizer_elements_per_s": 2e9,
        "unit_s": 20e-6,
        "collective_s": 10e-6,
        "parameter_s": 2e-6,
        "sending_s_per_byte": 1e-11 if backend == "gloo" else 0.0,
    }
    return Machine(**given | changed)


def group(*shapes: tuple[int, ...], trainable: bool = True) -> Group:
    tensors = (Tensor(f"w{i}", shape, is_hidden=True) for i, shape in enumerate(shapes))
    return Group(tuple(tensors), FP32, trainable)


def division(
    num_blocks: int = 4,
    width: int = 512,
    block_s: float = 1e-3,
    activation_bytes: int = 4 * MIB,
    *,
    has_trace: bool = True,
) -> Division:
    """Equal blocks with two matrices and a vector, and a root with one matrix."""
    block = [group((4 * width, width), (width, width), (width,))]
    others = [(f"blocks.{i}", block) for i in range(num_blocks)]
    model = make_model("blocks", [group((width, width))], others)
    times = tuple(BlockTimes(each, 2 * each, each) for each in (block_s / 4, block_s))
    traces = {}
    if has_trace:
        traces = {
            "keep": trace(num_blocks, activation_bytes, activation_bytes),
            "recompute": trace(num_blocks, activation_bytes // 8, activation_bytes),
        }
    return Division(model, times[: len(model.units)], traces)


def trace(num_blocks: int, kept: int, most: int) -> Trace:
    """Blocks that keep ``kept`` bytes, and need ``most`` while they run."""
    live, moments = 0, [Moment(Event.FORWARD, 0, 0, call=0)]
    for number in range(1, num_blocks + 1):
        moments.append(Moment(Event.FORWARD, live, live, number, number))
        moments.append(
            Moment(
                Event.END_OF_FORWARD,
                live + most,
                live + kept,
                number,
                number,
                takes_gradients=True,
                is_reachable=True,
            )
        )
        live += kept
    moments.append(Moment(Event.END_OF_FORWARD, live + MIB, live, is_reachable=True))
    moments.append(Moment(Event.BACKWARD, live, live))
    for number in range(num_blocks, 0, -1):
        moments.append(Moment(Event.BACKWARD, live, live, number, number))
        for elements in (512, 512 * 512, 4 * 512 * 512):
            moments.append(
                Moment(
                    Event.GRADIENT, live - kept + most, live, number, number, num_elements=elements
                )
            )
        live -= kept
        moments.append(Moment(Event.END_OF_BACKWARD, live + kept, live, number, number))
    moments.append(Moment(Event.GRADIENT, live, live, num_elements=512 * 512))
    moments.append(Moment(Event.END, live, live))
    return Trace(tuple(moments))


def problem(budget_bytes: int, num_ranks: int = 4, **changed: Any) -> Problem:
    given: dict[str, Any] = {
        "divisions": (division(),),
        "num_ranks": num_ranks,
        "machine": machine(),
        "budget_bytes": budget_bytes,
        "compute_dtype": BF16,
    }
    return Problem(**given | changed)
