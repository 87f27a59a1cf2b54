"""Predicts the time and the memory of one candidate, by simulating a step (`timeline`).

Sizes come from the planner's layouts, times from the `Machine` and the measured `BlockTimes`:

* an all-gather or reduce-scatter over m ranks sends (m - 1) messages of a rank, at the rate of the
  link of these ranks, after its latency; an all-reduce of S bytes over R ranks sends
  2 (R - 1) / R S
* a copy takes the bytes that it reads and writes, at the rate of copies. Gradients are copied once
  to where they are sent from; on gloo, received parts are summed; codes are written and read
* an optimizer takes the elements of its shards at its rate, on the host if they are offloaded
* the engine takes ``unit_s`` for each forward and backward of a unit, ``collective_s`` for each
  collective, ``parameter_s`` for each gradient. Without streams it is added to compute, as is the
  time of the processor for what is sent; with streams only what is longer than a unit's compute

The peak is that of the simulated step, with the memory between steps, and 2% of what is allocated
in a step for what no simulation counts (rounding of allocators). The step of the optimizer may be
higher: it has gradients, and temporary memory (`estimate.scratch_of`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

from vescale_fsdp_tune.costs.account import KINDS, OPTIMIZER, REDUCED, SCRATCH, Peak
from vescale_fsdp_tune.costs.estimate import group_costs, how_of, scratch_of, states_of, traffic_of
from vescale_fsdp_tune.costs.layouts import PlannedGroup, lay_out_model
from vescale_fsdp_tune.costs.machine import Link
from vescale_fsdp_tune.costs.model import Trace
from vescale_fsdp_tune.costs.problem import Candidate, Division, Prediction, Problem
from vescale_fsdp_tune.costs.settings import AS_THEY_ARE, Code, Codes, Settings
from vescale_fsdp_tune.costs.timeline import run_step
from vescale_fsdp_tune.costs.traces import mixed_trace
from vescale_fsdp_tune.costs.units import SHARDS, GroupCosts, GroupSeconds, UnitCosts

WEIGHTS, STATES, ROUNDING = "weights", "optimizer states", "rounding"
OTHERS = "other tensors"  # such as buffers
WORKSPACES = "workspaces"  # of cuBLAS
_ROUNDING = 0.02  # of what is allocated in a step
_SLACK_BYTES = 4 << 20  # CUDA's allocator leaves up to 1 MiB of a block unused, in a few blocks
_SMALL_BYTES = 1 << 13  # of the engine, for messages that units share without streams
_CODE = Code("int8", 256)  # the engine's default


@dataclass(frozen=True)
class Shards:
    """What all candidates with the same shards have in common.

    Attributes:
        planned: the groups of each different unit.
        weights_bytes, states_bytes: between steps, on the rank that has most.
        elements: that the optimizer updates.
        scratch_bytes: temporary memory of the optimizer's step.
    """

    planned: tuple[PlannedGroup, ...]
    weights_bytes: int
    states_bytes: int
    elements: int
    scratch_bytes: int

    @cached_property
    def gradient_bytes(self) -> int:
        """Of all reduced gradients."""
        return sum(
            each.unit.count * each.layout.shard_size * each.group.dtype.itemsize
            for each in self.planned
            if each.group.trainable
        )

    @property
    def resting_bytes(self) -> int:
        """Between steps."""
        return self.weights_bytes + self.states_bytes

    @property
    def updating_bytes(self) -> int:
        """In the optimizer's step, beside these."""
        return self.gradient_bytes + self.scratch_bytes


class Predictor:
    """Predicts candidates of one problem. Equal groups are planned once."""

    def __init__(self, problem: Problem, divisions: tuple[Division, ...] = ()) -> None:
        self.problem = problem
        every = (*problem.divisions, *divisions)
        self.divisions = {each.model.modules[1:]: each for each in every}
        self._shards: dict[tuple[int, int, bool], Shards] = {}
        self._costs: dict[tuple[object, ...], list[tuple[GroupCosts, ...]]] = {}
        self._traces: dict[tuple[int, str, int], Trace] = {}

    def predict(self, candidate: Candidate) -> Prediction:
        """Predict one candidate.

        Cost: 10 ms for 60 units without a trace.

        Raises:
            KeyError: its units are those of no division.
        """
        division, settings = self.divisions[candidate.units], self.settings(candidate)
        shards, units = self.shards(candidate), self.units(candidate)
        how = how_of(settings)
        if self.shares_network(settings):
            how = replace(how, replica_network=SHARDS)
        if self.problem.machine.backend == "gloo":
            how = replace(how, small_bytes=_SMALL_BYTES)
        trace = self.trace(division, candidate)
        step = run_step(units, how, trace)
        seconds = step.seconds | {OPTIMIZER: self.optimizer_s(candidate)}
        peak = _with_optimizer(step.peak, shards, candidate)
        resting = {} if candidate.offload else {WEIGHTS: shards.weights_bytes}
        resting |= {} if candidate.offload else {STATES: shards.states_bytes}
        resting |= {OTHERS: self.problem.other_bytes} if self.problem.other_bytes else {}
        workspace_bytes = self.problem.machine.workspace_bytes
        resting |= {WORKSPACES: workspace_bytes} if workspace_bytes else {}
        slack_bytes = _SLACK_BYTES if self.problem.machine.backend == "nccl" else 0
        rounding = {ROUNDING: math.ceil(_ROUNDING * peak.num_bytes) + slack_bytes}
        memory = resting | {kind: peak.parts[kind] for kind in KINDS if peak.parts.get(kind)}
        memory |= rounding
        host_bytes = 0 if trace is None else trace.host_bytes
        if candidate.offload:
            host_bytes += shards.resting_bytes + shards.gradient_bytes
        return Prediction(
            candidate=candidate,
            step_s=sum(seconds.values()),
            seconds={kind: value for kind, value in seconds.items() if value},
            peak_bytes=sum(memory.values()),
            memory=memory,
            when=peak.when,
            host_bytes=host_bytes,
            traffic=traffic_of(units, step, settings),
        )

    def shares_network(self, settings: Settings) -> bool:
        """Whether collectives among shards and among replicas use the same network cards."""
        machine = self.problem.machine
        return machine.backend == "gloo" or settings.num_shards > machine.ranks_per_node

    def settings(self, candidate: Candidate) -> Settings:
        """Return the settings of a candidate."""
        problem = self.problem
        return Settings(
            num_ranks=problem.num_ranks,
            num_replicas=candidate.num_replicas,
            compute_dtype=problem.compute_dtype,
            reduce_dtype=problem.reduce_dtype,
            optimizer=problem.optimizer,
            backend=problem.machine.backend,
            in_flight=candidate.in_flight,
            codes=Codes(_CODE, _CODE) if candidate.int8 else AS_THEY_ARE,
            sharding=candidate.sharding,
            micro_batches=problem.micro_batches,
            offload=candidate.offload,
        )

    def shards(self, candidate: Candidate) -> Shards:
        """Return the shards of a candidate."""
        division, settings = self.divisions[candidate.units], self.settings(candidate)
        key = id(division), settings.num_resting_shards, candidate.int8
        if key not in self._shards:
            planned = lay_out_model(
                division.model,
                settings.num_resting_shards,
                self.problem.block_of,
                codes=settings.codes,
            )
            sizes = [(each, each.unit.count * each.layout.shard_size) for each in planned]
            self._shards[key] = Shards(
                tuple(planned),
                sum(size * each.group.dtype.itemsize for each, size in sizes),
                states_of(planned, self.problem.optimizer),
                sum(size for each, size in sizes if each.group.trainable),
                scratch_of(planned, self.problem.optimizer, self.problem.machine.backend),
            )
        return self._shards[key]

    def optimizer_s(self, candidate: Candidate) -> float:
        """Return the seconds of the optimizer."""
        machine, elements = self.problem.machine, self.shards(candidate).elements
        if candidate.offload:
            return elements / machine.host_elements_per_s
        return elements / machine.optimizer_elements_per_s

    def units(self, candidate: Candidate) -> list[UnitCosts]:
        """Return the units in forward order, with their sizes and times."""
        division, settings = self.divisions[candidate.units], self.settings(candidate)
        groups = self._groups(division, candidate, settings)
        first_kept = len(division.model.order) - candidate.num_unsharded
        recomputes = "recompute" in candidate.activations
        known: dict[tuple[int, bool, bool], UnitCosts] = {}
        found = []
        for number, index in enumerate(division.model.order):
            unit, times = division.model.units[index], division.times[index]
            keeps = unit.is_root or number >= first_kept or not settings.row.cuts_parameters
            again = recomputes and 0 < number <= candidate.num_changed
            key = index, keeps, again
            if key not in known:
                recompute_s = times.recompute_s if again else 0.0
                backward_s = times.backward_s + recompute_s
                known[key] = UnitCosts(
                    unit.title,
                    groups[index],
                    unit.is_root,
                    keeps,
                    times.forward_s,
                    times.backward_s,
                    recompute_s,
                    self._engine_s(groups[index], times.forward_s, backward_s),
                )
            found.append(known[key])
        return found

    def _groups(
        self, division: Division, candidate: Candidate, settings: Settings
    ) -> list[tuple[GroupCosts, ...]]:
        row = settings.num_shards, settings.num_summed, settings.num_outer
        key = id(division), row, candidate.int8, candidate.offload
        if key not in self._costs:
            by_unit: dict[int, list[GroupCosts]] = {}
            for each in self.shards(candidate).planned:
                costs = group_costs(each, settings)
                costs = replace(costs, seconds=self._seconds(costs, settings))
                by_unit.setdefault(id(each.unit), []).append(costs)
            units = division.model.units
            self._costs[key] = [tuple(by_unit.get(id(unit), ())) for unit in units]
        return self._costs[key]

    def _engine_s(
        self, groups: tuple[GroupCosts, ...], forward_s: float, backward_s: float
    ) -> tuple[float, float]:
        machine = self.problem.machine
        if not groups:
            return 0.0, 0.0
        num_parameters = sum(len(group.tensors) for group in groups if group.trainable)
        forward, backward = machine.unit_s, machine.unit_s + machine.parameter_s * num_parameters
        if machine.backend == "gloo":
            return forward, backward
        forward, backward = forward + machine.collective_s, backward + 2 * machine.collective_s
        return max(forward - forward_s, 0.0), max(backward - backward_s, 0.0)

    def _seconds(self, group: GroupCosts, settings: Settings) -> GroupSeconds:
        machine, has_streams = self.problem.machine, self.problem.machine.backend == "nccl"
        num_shards, num_summed = group.num_shards, settings.num_summed
        shards = machine.link(num_shards)
        inner, rate = group.inner_elements, machine.copy_bytes_per_s
        shard, compute, wide = (
            dtype.itemsize for dtype in (group.shard_dtype, group.compute_dtype, group.reduce_dtype)
        )
        gather_bytes = (num_shards - 1) * group.gathered_message
        narrow = wide if has_streams else group.copied_dtype.itemsize
        reduce_bytes = (num_shards - 1) * inner * narrow
        wide_bytes = (num_shards - 1) * inner * wide
        copied, summed = group.elements * (compute + narrow), 0
        cast, decoded = group.shard_elements * (shard + compute), 0
        if group.gather_message is not None:
            cast = group.shard_elements * (shard + 1)
            decoded = group.full_elements * (1 + compute)
        if group.reduce_message is not None:
            reduce_bytes = wide_bytes = (num_shards - 1) * group.reduce_message
            copied += group.full_elements * (narrow + 1)
            summed = num_shards * group.reduce_message + 4 * num_shards * inner
        elif not has_streams and num_shards > 1:
            summed = num_shards * inner * (narrow + wide)
        if shard != wide:
            summed += group.shard_elements * (shard + wide)
        cast_s, host_s = cast / rate, 0.0
        gather_s = gather_bytes / shards.bytes_per_s
        if settings.offload:
            moved = group.shard_elements * shard / machine.host_bytes_per_s
            gather_s, host_s = gather_s + moved, moved
        latency_s = _latency_s(shards, num_shards)
        cpu_s_per_byte = 0.0 if has_streams else machine.sending_s_per_byte
        return GroupSeconds(
            latency_s=latency_s,
            gather_s=gather_s + (cast_s if has_streams else 0.0),
            reduce_s=reduce_bytes / shards.bytes_per_s,
            wide_reduce_s=wide_bytes / shards.bytes_per_s,
            collective_s=0.0 if has_streams else machine.collective_s,
            gather_cpu_s=cpu_s_per_byte * gather_bytes,
            reduce_cpu_s=cpu_s_per_byte * reduce_bytes,
            cast_s=0.0 if has_streams else cast_s,
            decode_s=decoded / rate,
            copy_s=copied / rate,
            sum_s=summed / rate,
            replica_s=self._replica_s(group, settings, num_summed),
            replica_gather_s=self._replica_gather_s(group, settings),
            replica_cpu_s=0.0 if has_streams else self._replica_cpu_s(group, settings),
            host_s=host_s,
        )

    def _replica_s(self, group: GroupCosts, settings: Settings, num_summed: int) -> float:
        """Return the seconds of the sum over replicas of a reduced shard."""
        link = self.problem.machine.link(num_summed, group.num_shards)
        part = (num_summed - 1) * group.inner_elements * group.reduce_dtype.itemsize / num_summed
        if not part:
            return 0.0
        rounds = 1 if settings.num_outer > 1 else 2
        return rounds * (_latency_s(link, num_summed) + part / link.bytes_per_s)

    def _replica_cpu_s(self, group: GroupCosts, settings: Settings) -> float:
        """Return the seconds of the processor for the same."""
        machine, num_summed = self.problem.machine, settings.num_summed
        part = (num_summed - 1) * group.inner_elements * group.reduce_dtype.itemsize / num_summed
        if settings.num_outer > 1:
            sent_s = part * machine.sending_s_per_byte
        else:
            sent_s = 2 * part * machine.summing_s_per_byte
        return machine.collective_s + sent_s if part else 0.0

    def _replica_gather_s(self, group: GroupCosts, settings: Settings) -> float:
        if settings.num_outer == 1:
            return 0.0
        link = self.problem.machine.link(settings.num_outer, group.num_shards)
        part = (settings.num_outer - 1) * group.shard_elements * group.compute_dtype.itemsize
        return _latency_s(link, settings.num_outer) + part / link.bytes_per_s

    def trace(self, division: Division, candidate: Candidate) -> Trace | None:
        """Return the trace of a candidate; None: activations are not known."""
        if not division.traces:
            return None
        key = id(division), candidate.activations, candidate.num_changed
        if key not in self._traces:
            keep, changed = division.traces["keep"], division.traces[candidate.activations]
            self._traces[key] = mixed_trace(keep, changed, candidate.num_changed)
        return self._traces[key]


def predict(problem: Problem, candidate: Candidate) -> Prediction:
    """Predict the costs of one candidate. For several, make one `Predictor`."""
    return Predictor(problem).predict(candidate)


def _latency_s(link: Link, num_ranks: int) -> float:
    return link.latency_s + link.hop_s * (num_ranks - 1) if num_ranks > 1 else 0.0


def _with_optimizer(peak: Peak, shards: Shards, candidate: Candidate) -> Peak:
    """Return the higher of two peaks: of forward and backward, or of the optimizer's step."""
    if candidate.offload:
        return peak
    if peak.num_bytes >= shards.updating_bytes:
        return peak
    parts = {REDUCED: shards.gradient_bytes, SCRATCH: shards.scratch_bytes}
    return Peak(shards.updating_bytes, "the optimizer's step", parts)
