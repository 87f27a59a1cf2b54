"""What the tuner chooses from, and for: problem, candidate, prediction, result. Data only.

::

    Problem     model, machine, times of blocks, activations, budget      measured or published
    Candidate   row of the table, units, what stays unsharded, ...         settings of the engine
    Prediction  seconds and bytes of a candidate                           by `predicting`
    Tuning      the predictions of all candidates, the fastest that fits first      by `search`
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from vescale_fsdp_tune.costs.estimate import Traffic
from vescale_fsdp_tune.costs.layouts import BlockOf
from vescale_fsdp_tune.costs.machine import Machine
from vescale_fsdp_tune.costs.model import BF16, FP32, Dtype, Model, Tensor, Trace
from vescale_fsdp_tune.costs.settings import Activations, OptimizerName

Sharding = Literal["ddp", "zero1", "zero2", "zero3", "hsdp", "hsdp_zero1"]
Extra = Literal["int8", "offload"]  # changes numbers, or needs the host's memory


class BlockTimes(NamedTuple):
    """Seconds of one unit's forward and backward, for one micro-batch, without an engine.

    Those of the root are for all that is outside of other units: embedding, head and loss.
    """

    forward_s: float
    backward_s: float  # without recomputation
    recompute_s: float  # how much longer both take together with recomputation

    def times(self, factor: float) -> BlockTimes:
        """Return the seconds of several calls, or of a part."""
        return BlockTimes(*(factor * seconds for seconds in self))

    @staticmethod
    def total(parts: Iterable[BlockTimes]) -> BlockTimes:
        """Return the seconds of all of them."""
        return BlockTimes(*map(sum, zip(*parts, strict=True)))

    @staticmethod
    def mean(parts: Collection[BlockTimes]) -> BlockTimes:
        """Return the mean of at least one."""
        return BlockTimes.total(parts).times(1 / len(parts))


@dataclass(frozen=True)
class Division:
    """One way to divide a model into units.

    Attributes:
        model: with its units.
        times: of each of ``model.units``.
        traces: a micro-batch by what happens to activations in all units but the root. "keep" is
            always there, unless it is empty: then activations are not counted.
    """

    model: Model
    times: tuple[BlockTimes, ...]
    traces: Mapping[Activations, Trace] = field(default_factory=dict)


def split_anywhere(tensor: Tensor) -> int | None:
    """Return None: no tensor has blocks that must not be split."""
    return None


@dataclass(frozen=True)
class Problem:
    """A training job whose settings are wanted.

    Attributes:
        divisions: the usual one (repeated blocks are units) first; of the others the search takes
            what is faster, or fits.
        budget_bytes: memory of a rank for shards, states, buffers and activations.
        micro_batches: forwards and backwards for each step of the optimizer.
        allowed: "int8" sends weights and gradients in 8 bits, "offload" keeps shards and optimizer
            states in the host's memory, and may offload activations.
        block_of: block of a tensor that its optimizer does not allow to be split, in elements.
        other_bytes: of tensors that a rank has beside shards and activations, such as buffers.
        replicas: numbers of replicas that are possible, 1 for no HSDP. None: all.
    """

    divisions: tuple[Division, ...]
    num_ranks: int
    machine: Machine
    budget_bytes: int
    compute_dtype: Dtype = BF16
    reduce_dtype: Dtype = FP32
    optimizer: OptimizerName = "adamw"
    micro_batches: int = 1
    allowed: frozenset[Extra] = frozenset()
    block_of: BlockOf = split_anywhere
    other_bytes: int = 0
    replicas: frozenset[int] | None = None


@dataclass(frozen=True)
class Candidate:
    """Settings of the engine for one model.

    Attributes:
        sharding: row of the table of ``fully_shard(sharding=...)``.
        num_replicas: outer size of the mesh, for "hsdp" and "hsdp_zero1"; else 1.
        units: names of the modules of each unit but the root, in forward order. A unit of several
            modules is one call ``fully_shard([module, ...])``.
        num_unsharded: so many units, the last ones in forward, stay unsharded from forward to
            backward (``reshard_after_forward=False``). The root always does.
        in_flight: as in ``fully_shard``.
        activations: of the first ``num_changed`` units in forward order; the others keep them.
        num_changed: 0 for "keep".
        int8: weights and gradients are sent in 8 bits.
        offload: shards and optimizer states are in the host's memory.
    """

    sharding: Sharding
    units: tuple[tuple[str, ...], ...]
    num_replicas: int = 1
    num_unsharded: int = 0
    in_flight: int = 2
    activations: Activations = "keep"
    num_changed: int = 0
    int8: bool = False
    offload: bool = False


@dataclass(frozen=True)
class Prediction:
    """The costs of one candidate on one rank.

    Attributes:
        step_s: seconds of a step of the optimizer, with all micro-batches.
        seconds: its parts: "compute", "recomputation", "engine", "copies", "optimizer", and
            "waiting" for the network. They sum to ``step_s``.
        peak_bytes: the most memory of a step.
        memory: its parts at that moment, by kind. They sum to ``peak_bytes``.
        when: that moment, such as "the backward of blocks.0-11".
        host_bytes: in the host's memory.
        traffic: bytes that a rank sends in a step.
        why: it was not chosen, in a few words; empty for the one that was.
    """

    candidate: Candidate
    step_s: float
    seconds: Mapping[str, float]
    peak_bytes: int
    memory: Mapping[str, int]
    when: str
    host_bytes: int
    traffic: Traffic
    why: str = ""

    def fits(self, budget_bytes: int) -> bool:
        """Whether its peak is within the budget."""
        return self.peak_bytes <= budget_bytes


@dataclass(frozen=True)
class Tuning:
    """The result of a search.

    Attributes:
        chosen: the fastest that fits.
        predictions: of all candidates that were predicted, ``chosen`` first, then by time.
        num_pruned: candidates that could not be chosen, and were not predicted: a predicted one is
            as fast, with less memory; or their shards alone are too large.
    """

    chosen: Prediction
    predictions: tuple[Prediction, ...]
    num_pruned: int
