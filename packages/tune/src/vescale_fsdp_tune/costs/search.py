"""Finds the fastest candidate that fits the budget.

All candidates of a problem (`candidates`) have bounds that take no simulation: the least time, by
compute or by the network alone, and the least memory. They are predicted in the order of their
bounds, and not at all if they cannot be chosen::

    bound of time is above the best so far                            cannot be faster
    bound of memory is above the budget                               cannot fit
    another with less in flight, or more recomputed, does not fit     cannot fit

Steps that differ by less than 0.1% are as fast as each other; of these, the one with the least
memory is chosen. The result is the same on every rank with the same inputs.

With more than eight units, not every number of unsharded or recomputed units is a candidate, but
nine; the numbers between these are tried at the end, for those that are nearly as fast.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from vescale_fsdp.errors import PlanError
from vescale_fsdp.program import ZERO_TABLE
from vescale_fsdp_tune.costs.divisions import grouped, split
from vescale_fsdp_tune.costs.model import Event
from vescale_fsdp_tune.costs.predicting import Predictor
from vescale_fsdp_tune.costs.problem import (
    Candidate,
    Division,
    Prediction,
    Problem,
    Sharding,
    Tuning,
)
from vescale_fsdp_tune.costs.settings import Activations
from vescale_fsdp_tune.costs.units import GroupCosts, UnitCosts
from vescale_fsdp_tune.costs.words import bucket, described, gib, why

_FEW, _LEVELS = 8, 8
_NEAR = 1.05  # a step that may be the fastest between the levels
_MOST_REFINED = 512  # units of candidates between the levels: so many simulations of each
_MOST_GROUPED = 3  # sizes of units that are tried beside one block each
_LARGEST = 1 / 16  # of the budget, for a unit that is not split
_IN_FLIGHT = (2, 1, 3, 4)


def tune(problem: Problem) -> Tuning:
    """Find the fastest candidate that fits.

    Cost: seconds for a model of 60 units on 1,024 ranks.

    Raises:
        PlanError: none fits. The message says the least memory that would do.
    """
    return _Search(problem).run()


def candidates(problem: Problem, divisions: Iterable[Division] | None = None) -> list[Candidate]:
    """Return all candidates of a problem, in a fixed order."""
    found = []
    for division in divisions if divisions is not None else divisions_of(problem):
        units = division.model.modules[1:]
        for sharding, num_replicas in _rows(problem):
            cuts = ZERO_TABLE[sharding].cuts_parameters
            for num_unsharded in levels(len(units)) if cuts else (0,):
                for activations, num_changed in _activations(problem, division):
                    for in_flight in _IN_FLIGHT:
                        for int8, offload in _extras(problem, sharding):
                            found.append(
                                Candidate(
                                    sharding,
                                    units,
                                    num_replicas,
                                    num_unsharded,
                                    in_flight,
                                    activations,
                                    num_changed,
                                    int8,
                                    offload,
                                )
                            )
    return found


def divisions_of(problem: Problem) -> tuple[Division, ...]:
    """Return the divisions of a problem; the first one with joined units, and with split ones."""
    usual = problem.divisions[0]
    num_units = len(usual.model.order) - 1
    sizes = [2**power for power in range(1, _MOST_GROUPED + 1) if 2**power <= num_units]
    made = [grouped(usual, size) for size in sizes]
    made.append(split(usual, int(_LARGEST * problem.budget_bytes / problem.compute_dtype.itemsize)))
    return (*problem.divisions, *(each for each in made if each is not None))


def levels(num_units: int) -> list[int]:
    """Return the numbers of units that candidates have unsharded, or recomputed."""
    if num_units <= _FEW:
        return [*range(num_units + 1)]
    return [round(num_units * level / _LEVELS) for level in range(_LEVELS + 1)]


def _rows(problem: Problem) -> Iterator[tuple[Sharding, int]]:
    possible = problem.replicas
    for sharding, num_replicas in _all_rows(problem.num_ranks, problem.machine.ranks_per_node):
        if possible is None or num_replicas in possible:
            yield sharding, num_replicas


def _all_rows(num_ranks: int, per_node: int) -> Iterator[tuple[Sharding, int]]:
    if num_ranks > 1:
        yield from (("ddp", 1), ("zero1", 1), ("zero2", 1))
    yield "zero3", 1
    for num_replicas in range(2, num_ranks):
        num_shards = num_ranks // num_replicas
        is_even = num_ranks % num_replicas == 0
        if is_even and (num_shards % per_node == 0 or per_node % num_shards == 0):
            yield "hsdp", num_replicas
            yield "hsdp_zero1", num_replicas


def _activations(problem: Problem, division: Division) -> Iterator[tuple[Activations, int]]:
    num_units = len(division.model.order) - 1
    yield "keep", 0
    for mode in division.traces:
        if mode == "recompute":
            yield from ((mode, number) for number in levels(num_units) if number)
        elif mode != "keep" and "offload" in problem.allowed:
            yield mode, num_units


def _extras(problem: Problem, sharding: Sharding) -> Iterator[tuple[bool, bool]]:
    """Yield whether to send 8 bits, and whether to offload."""
    has_host = "offload" in problem.allowed and problem.machine.backend == "nccl"
    can_encode = "int8" in problem.allowed and sharding not in ("ddp",) and problem.num_ranks > 1
    for int8 in (False, True) if can_encode else (False,):
        for offload in (False, True) if has_host else (False,):
            yield int8, offload


@dataclass(frozen=True)
class _Bound:
    """No prediction of a candidate is less."""

    step_s: float
    num_bytes: int

    @property
    def bucket(self) -> int:
        return bucket(self.step_s)


@dataclass(frozen=True)
class _Sums:
    """Of the units with one layout: running sums in forward order, from the root on."""

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    recompute_s: tuple[float, ...]
    processor_s: tuple[float, float]  # of the engine and of copies, without gathers; and of each
    gather_s: tuple[float, ...]
    again_s: tuple[float, ...]  # of all-gathers in backward, if no unit is kept
    gather_cpu_s: tuple[float, ...]
    reduce_s: float
    replica_s: float
    full_bytes: tuple[int, ...]
    sum_bytes: int  # of local sums of all groups
    unit_bytes: int  # in the backward of the largest unit, with its gradients


class _Search:
    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._divisions = divisions_of(problem)
        self._predictor = Predictor(problem, self._divisions)
        self._bounds: dict[Candidate, _Bound] = {}
        self._sums: dict[tuple[object, ...], _Sums] = {}
        self._activations: dict[tuple[int, str, int], tuple[int, int]] = {}
        self._found: dict[Candidate, Prediction] = {}
        self._too_large: dict[tuple[object, ...], list[Candidate]] = {}

    def run(self) -> Tuning:
        every = candidates(self._problem, self._divisions)
        self._bounds = {each: self._bound(each) for each in every}
        order = sorted(every, key=lambda c: (self._bounds[c].bucket, self._bounds[c].num_bytes))
        best: Prediction | None = None
        for candidate in order:
            bound = self._bounds[candidate]
            if best is not None and bound.bucket > bucket(best.step_s):
                break
            if self._cannot_fit(candidate) or (best is not None and not _may_be(bound, best)):
                continue
            best = self._better(best, self._predict(candidate))
        if best is None:
            raise self._nothing_fits(every)
        for each in self._near(best):
            best = self._better(best, self._refined(each)) or best
        self._add_others(every)
        return self._tuning(best, len(every))

    def _predict(self, candidate: Candidate) -> Prediction:
        if candidate not in self._found:
            prediction = self._predictor.predict(candidate)
            self._found[candidate] = prediction
            if not prediction.fits(self._problem.budget_bytes):
                self._too_large.setdefault(_family(candidate), []).append(candidate)
        return self._found[candidate]

    def _better(self, best: Prediction | None, other: Prediction) -> Prediction | None:
        if not other.fits(self._problem.budget_bytes):
            return best
        return other if best is None or _score(other) < _score(best) else best

    def _cannot_fit(self, candidate: Candidate) -> bool:
        if self._bounds[candidate].num_bytes > self._problem.budget_bytes:
            return True
        return any(
            other.num_unsharded == candidate.num_unsharded
            and other.in_flight <= candidate.in_flight
            and other.num_changed >= candidate.num_changed
            for other in self._too_large.get(_family(candidate), ())
        )

    def _near(self, best: Prediction) -> list[Prediction]:
        """Return the best of each family that may be the fastest between the levels."""
        found: dict[tuple[object, ...], Prediction] = {}
        for each in self._found.values():
            if each.fits(self._problem.budget_bytes) and each.step_s <= _NEAR * best.step_s:
                family = _family(each.candidate)
                known = found.get(family)
                if known is None or _score(each) < _score(known):
                    found[family] = each
        most = max(_MOST_REFINED // max(len(best.candidate.units), 1), 1)
        return sorted(found.values(), key=_score)[:most]

    def _refined(self, best: Prediction) -> Prediction:
        """Try numbers of units between the levels."""
        num_units = len(best.candidate.units)
        cuts = ZERO_TABLE[best.candidate.sharding].cuts_parameters
        step = math.ceil(num_units / _LEVELS) if num_units > _FEW else 0
        while step:
            now = best.candidate
            changes = []
            if cuts:
                more = min(now.num_unsharded + step, num_units)
                changes.append(replace(now, num_unsharded=more))
            if now.activations == "recompute":
                fewer = max(now.num_changed - step, 1)
                changes.append(replace(now, num_changed=fewer))
                if now.num_unsharded:
                    less = max(now.num_unsharded - step, 0)
                    changes.append(replace(now, num_changed=fewer, num_unsharded=less))
            for changed in changes:
                if self._bound(changed).num_bytes > self._problem.budget_bytes:
                    continue
                better = self._better(best, self._predict(changed))
                assert better is not None, "the best so far fits"
                best = better
            if best.candidate == now:
                step //= 2
        return best

    def _nothing_fits(self, every: Sequence[Candidate]) -> PlanError:
        least: Prediction | None = None
        for candidate in sorted(every, key=lambda each: self._bounds[each].num_bytes):
            if least is not None and self._bounds[candidate].num_bytes >= least.peak_bytes:
                break
            prediction = self._predict(candidate)
            if least is None or prediction.peak_bytes < least.peak_bytes:
                least = prediction
        assert least is not None, "there are candidates"
        allowed = sorted({"int8", "offload"} - self._problem.allowed)
        more = f", or allow {' or '.join(allowed)}" if allowed else ""
        return PlanError(
            f"nothing fits in {gib(self._problem.budget_bytes)} on {self._problem.num_ranks} "
            f"ranks: the least is {gib(least.peak_bytes)}, in {least.when}, with "
            f"{described(least.candidate)}; use more ranks, a smaller batch{more}"
        )

    def _add_others(self, every: Sequence[Candidate]) -> None:
        """Predict the most promising candidate of each row, so that the table has all rows."""
        budget = self._problem.budget_bytes
        seen = {_row(each) for each in self._found}
        chosen: dict[tuple[object, ...], Candidate] = {}

        def key(each: Candidate) -> tuple[bool, float, int]:
            bound = self._bounds[each]
            is_large = bound.num_bytes > budget
            return is_large, bound.num_bytes if is_large else bound.step_s, bound.num_bytes

        for each in every:
            row = _row(each)
            if row not in seen and (row not in chosen or key(each) < key(chosen[row])):
                chosen[row] = each
        for each in chosen.values():
            self._predict(each)

    def _tuning(self, best: Prediction, num_candidates: int) -> Tuning:
        budget = self._problem.budget_bytes
        others = [
            replace(each, why=why(each, best, budget))
            for each in self._found.values()
            if each.candidate != best.candidate
        ]
        others.sort(key=lambda each: (not each.fits(budget), *_score(each)))
        return Tuning(best, (best, *others), max(num_candidates - len(self._found), 0))

    # Bounds

    def _bound(self, candidate: Candidate) -> _Bound:
        problem, predictor = self._problem, self._predictor
        sums, row = self._sums_of(candidate), ZERO_TABLE[candidate.sharding]
        num_units = len(candidate.units)
        last = num_units + 1
        shards = predictor.shards(candidate)
        times = problem.micro_batches
        # Gathers
        stays = max(candidate.in_flight - 2, 0)
        if row.cuts_parameters:
            again = max(num_units - candidate.num_unsharded - stays, 0)
            gather_s = times * (sums.gather_s[last] + sums.again_s[again + 1])
            cpu_s = times * sums.gather_cpu_s[last]
            kept_bytes = sums.full_bytes[1]
            first_kept = last - candidate.num_unsharded
            kept_bytes += sums.full_bytes[last] - sums.full_bytes[first_kept]
        else:
            gather_s, cpu_s = sums.gather_s[last], sums.gather_cpu_s[last]
            kept_bytes = sums.full_bytes[last]
        reductions = times if row.cuts_gradients else 1
        compute_s = times * (sums.forward_s[last] + sums.backward_s[last]) + cpu_s
        if "recompute" in candidate.activations:
            changed = candidate.num_changed + 1
            compute_s += times * (sums.recompute_s[changed] - sums.recompute_s[1])
        compute_s += times * sums.processor_s[0] + reductions * sums.processor_s[1]
        shards_s, replicas_s = gather_s + reductions * sums.reduce_s, reductions * sums.replica_s
        network_s = max(shards_s, replicas_s)
        if predictor.shares_network(predictor.settings(candidate)):
            network_s = shards_s + replicas_s
        step_s = max(compute_s, network_s)
        if candidate.in_flight == 1:  # nothing is under way while a unit runs
            step_s = max(compute_s + shards_s, network_s)
        step_s += predictor.optimizer_s(candidate)
        # Memory
        resting = 0 if candidate.offload else shards.resting_bytes
        updating = 0 if candidate.offload else shards.updating_bytes
        division = predictor.divisions[candidate.units]
        live, highest = self._activations_of(division, candidate)
        waits = sums.sum_bytes if times > 1 and not row.cuts_gradients else 0
        unit_bytes = sums.unit_bytes if not waits and not candidate.int8 else 0
        in_step = max(kept_bytes + live + waits, highest, updating, unit_bytes)
        return _Bound(step_s, resting + in_step)

    def _activations_of(self, division: Division, candidate: Candidate) -> tuple[int, int]:
        """Return the activations when the first backward begins, and the most of the step."""
        key = id(division), candidate.activations, candidate.num_changed
        if key not in self._activations:
            trace = self._predictor.trace(division, candidate)
            moments = () if trace is None else trace.moments
            begins = (m.live_bytes for m in moments if m.event is Event.BACKWARD)
            self._activations[key] = next(begins, 0), 0 if trace is None else trace.highest_bytes
        return self._activations[key]

    def _sums_of(self, candidate: Candidate) -> _Sums:
        key = _row(candidate), candidate.units
        if key not in self._sums:
            plain = replace(candidate, num_unsharded=0, activations="keep", num_changed=0)
            self._sums[key] = self._summed(plain)
        return self._sums[key]

    def _summed(self, candidate: Candidate) -> _Sums:
        units = self._predictor.units(candidate)
        division = self._predictor.divisions[candidate.units]
        trained = [g for unit in units for g in unit.groups if g.trainable]

        def running(values: Iterable[float]) -> tuple[float, ...]:
            found = [0.0]
            for value in values:
                found.append(found[-1] + value)
            return tuple(found)

        has_streams = self._problem.machine.backend == "nccl"
        # With streams a unit's groups are one collective, and have one latency.
        gathers = [[g.seconds for g in unit.groups] for unit in units]
        gather_s = [
            sum(s.gather_s for s in each) + (has_streams * each[0].latency_s if each else 0.0)
            for each in gathers
        ]
        reduce_s = sum(g.seconds.reduce_s for g in trained)
        reduce_s += sum(
            has_streams * unit.groups[0].seconds.latency_s for unit in units if unit.trainable
        )
        engine_s = 0.0 if has_streams else sum(sum(unit.engine_s) for unit in units)
        # Backward does not reach frozen units before the first trainable one.
        first = next((i for i, unit in enumerate(units) if i and unit.trainable), len(units))
        reducing = sum(
            g.seconds.copy_s
            + g.seconds.reduce_cpu_s
            + g.seconds.replica_cpu_s
            + (0 if has_streams else g.seconds.sum_s)
            for g in trained
        )
        return _Sums(
            running(unit.forward_s for unit in units),
            running(unit.backward_s * (not i or i >= first) for i, unit in enumerate(units)),
            running(division.times[index].recompute_s for index in division.model.order),
            (engine_s, reducing),
            running(gather_s),
            running(seconds * (i >= first) for i, seconds in enumerate(gather_s)),
            running(sum(s.gather_cpu_s + s.cast_s + s.decode_s for s in each) for each in gathers),
            reduce_s,
            sum(g.seconds.replica_s for g in trained),
            tuple(
                int(n)
                for n in running(
                    sum(_full_bytes(g, candidate) for g in unit.groups) for unit in units
                )
            ),
            sum(g.full_elements * g.reduce_dtype.itemsize for g in trained),
            max(self._unit_bytes(unit, candidate) for unit in units),
        )

    def _unit_bytes(self, unit: UnitCosts, candidate: Candidate) -> int:
        """Return the least memory when all gradients of a unit are there, or are being copied."""
        has_streams = self._problem.machine.backend == "nccl"
        found = 0
        for group in unit.groups:
            if group.trainable:
                local = group.reduce_dtype if has_streams else group.copied_dtype
                made = group.elements * group.compute_dtype.itemsize
                copied = group.full_elements * local.itemsize
                found = max(found, made + max(_full_bytes(group, candidate), copied))
        return found


def _full_bytes(group: GroupCosts, candidate: Candidate) -> int:
    """Return the bytes of unsharded parameters, beside the shard."""
    return 0 if group.is_one and not candidate.offload else group.full_bytes


def _row(candidate: Candidate) -> tuple[object, ...]:
    return candidate.sharding, candidate.num_replicas, candidate.int8, candidate.offload


def _family(candidate: Candidate) -> tuple[object, ...]:
    """Candidates that differ in numbers only, which memory grows or falls with."""
    mode = "keep" if candidate.activations == "recompute" else candidate.activations
    return (*_row(candidate), candidate.units, mode)


def _score(prediction: Prediction) -> tuple[int, int, float]:
    return bucket(prediction.step_s), prediction.peak_bytes, prediction.step_s


def _may_be(bound: _Bound, best: Prediction) -> bool:
    """Whether a candidate may be better, by its bounds."""
    return (bound.bucket, bound.num_bytes) < (bucket(best.step_s), best.peak_bytes)
