"""What users do with a model, at random: the same on all ranks, but for what each leaves out."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum, auto
from itertools import cycle

from hypothesis import strategies as st

from .model import Boom, Call, Checkpoint, Choice, Model, Spec
from .world import Mismatch, World


class Step(Enum):
    """What comes next, on all ranks."""

    TRAIN = auto()
    ACCUMULATE = auto()  # a backward without synchronization, and one with
    TWO = auto()  # forwards before a backward
    EVALUATE = auto()
    ALONE = auto()  # a forward of one unit, without gradients
    DROP = auto()  # a forward without its backward
    FAIL_FORWARD = auto()
    FAIL_BACKWARD = auto()


@dataclass(frozen=True)
class Scenario:
    """A model, and steps with a choice for each rank and forward."""

    specs: Sequence[Spec]
    order: Sequence[int]
    in_flight: int
    repeats: int
    size: int
    steps: Sequence[tuple[Step, int, Sequence[int], Sequence[int]]]  # unit, skips, unused by rank

    def run(self) -> World:
        """Run it on all ranks, and check what holds at its end.

        Raises:
            AssertionError: something does not hold. `Circle` if ranks wait for each other.
        """
        world = World(self.size)
        models = [
            Model(world, rank, self.specs, self.order, self.in_flight) for rank in range(self.size)
        ]
        wrong: list[str] = []

        def on_rank(rank: int) -> None:
            try:
                for step in self.steps:
                    self._play(models[rank], rank, *step)
            except Mismatch as error:
                wrong.append(str(error))

        world.run(on_rank)
        assert not wrong or len(wrong) == self.size, f"{len(wrong)} ranks know of {wrong}"
        for kind in (world.gathers, world.reductions):
            if not wrong:
                assert all(each == kind[0] for each in kind), kind
        assert not wrong or any("FAIL" in step[0].name for step in self.steps), wrong
        return world

    def _play(
        self,
        model: Model,
        rank: int,
        step: Step,
        unit: int,
        skips: Sequence[int],
        unused: Sequence[int],
    ) -> None:
        draws = iter(range(8))

        def choice(fails_at: int = -1) -> Choice:
            # A backward that was confirmed, and that ranks leave at different places, is an error.
            # So is one through more of its forwards than the first after as many, on some ranks.
            is_same = step is Step.FAIL_BACKWARD or (step is Step.TWO and self._drops)
            number = next(draws) * self.size + (0 if is_same else rank)
            # What nobody runs is expected where it is defined; it has to run there later.
            runs_all = (is_same or rank == 0) and list(self.order) != sorted(self.order)
            return Choice(
                0 if runs_all else skips[number % len(skips)] & ~self._always_run,
                self.repeats,
                unused[number % len(unused)] & ~self._always_run & ~self._hidden,
                fails_at=fails_at,
            )

        if step in (Step.EVALUATE, Step.ALONE):
            first = unit if step is Step.ALONE else 0
            model.forward(choice(), grads=False, first=first)
            return
        if step is Step.FAIL_FORWARD:
            model.forward(choice(unit), grads=True)
            _leave(model)
            return
        mine = choice()
        if step is Step.ACCUMULATE:
            self._synchronize(model, False)
            model.backward(_calls([model.forward(mine, grads=True)]), mine)
            self._synchronize(model, True)
            mine = choice()
        calls = [model.forward(mine, grads=True)]
        if step is Step.TWO:
            calls.append(model.forward(mine, grads=True))
        if step is Step.DROP:
            return
        if step is Step.FAIL_BACKWARD:
            with suppress(Boom):
                model.backward(_calls(calls), mine, fails_at=unit)
            _leave(model)
            return
        model.backward(_calls(calls), mine)
        if _calls(calls):
            model.check_after_backward()

    @property
    def _drops(self) -> bool:
        return any(step is Step.DROP for step, *_ in self.steps)

    @property
    def _hidden(self) -> int:
        """Units that checkpoints run again: no graph tells that no gradient comes to them.

        And frozen ones: what the loss does not depend on is as if its inputs wanted no gradient.
        """
        hidden: set[int] = set()
        for unit, spec in enumerate(self.specs):
            if spec.frozen or spec.checkpoint is not Checkpoint.NONE or spec.parent in hidden:
                hidden.add(unit)
        return sum(1 << unit for unit in hidden)

    @property
    def _always_run(self) -> int:
        """What runs more often than once, what is in it, and around it: on all ranks alike."""
        mask = 0
        paths = []  # of each unit, with itself
        for unit, spec in enumerate(self.specs):
            paths.append([unit, *(paths[spec.parent] if unit else [])])
        for path in paths:
            if any(self.repeats >> unit & 1 for unit in path):
                mask |= sum(1 << unit for unit in path if not mask >> unit & 1)
        for unit, spec in enumerate(self.specs[1:], 1):
            # Nothing tells that units which no rank has run together are in one checkpoint.
            if self.specs[spec.parent].checkpoint is Checkpoint.INSIDE:
                mask |= 1 << unit
        return mask

    def _synchronize(self, model: Model, on: bool) -> None:
        model.executor.reduces = on
        for unit in model.units:
            unit.requires_gradient_sync = on


def _calls(calls: Sequence[Call | None]) -> list[Call]:
    return [call for call in calls if call is not None]


def _leave(model: Model) -> None:
    """What `Engine.leave` does: meet the other ranks, and forget the step."""
    world, rank = model.world, model.rank
    model.passes.catch_up_backward(1.0)
    so_far = (list(world.gathers[rank]), list(world.reductions[rank]))
    if not world.everyone(rank, so_far, lambda said: all(each == said[0] for each in said)):
        raise Mismatch("ranks have left a step at different places")
    for unit in model.units:
        unit.forget()
        unit.free()
    for group in model.executor.groups.values():
        group.waiting = 0
    model.passes.forget()


def scenario_of(data: bytes) -> Scenario:
    """The scenario that some bytes stand for: up to six units, two or three ranks, four steps.

    Drawing bytes once, and not each number, makes Hypothesis ten times as fast.
    """
    numbers = cycle(data)

    def below(count: int) -> int:
        return next(numbers) % count

    size = 2 + below(2)
    num_units = 1 + below(6)
    specs: list[Spec] = []
    path: list[int] = []  # around what comes next, in the order of ``named_modules``
    for index in range(num_units):
        del path[1 + below(max(1, len(path))) :]
        kind = below(8) if index else 3 + below(5)
        checkpoint = {4: Checkpoint.AROUND, 5: Checkpoint.INSIDE}.get(kind, Checkpoint.NONE)
        specs.append(Spec(path[-1] if path else -1, kind == 1, kind == 2, kind == 3, checkpoint))
        path.append(index)
    order = list(range(num_units))
    for index in range(num_units):
        other = index + below(num_units - index)
        order[index], order[other] = order[other], order[index]

    def masks() -> list[int]:
        return [below(64) for _ in range(1 + below(2 * size))]

    kinds = list(Step)
    steps = [
        (kinds[below(len(kinds))], below(num_units), masks(), masks()) for _ in range(1 + below(4))
    ]
    repeats = (0, 0, 0, 2, 4, 6)[below(6)]
    return Scenario(specs, order, 1 + below(4), repeats, size, steps)


def scenarios() -> st.SearchStrategy[Scenario]:
    """Scenarios at random, of bytes enough for the largest."""
    return st.binary(min_size=96, max_size=96).map(scenario_of)
