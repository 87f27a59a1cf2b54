"""What users do with a model, at random: the same on all ranks, but for what each leaves out."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum, auto

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


@st.composite
def scenarios(draw: st.DrawFn) -> Scenario:
    """Models of up to six units on two or three ranks, and up to four steps."""
    num_units = draw(st.integers(1, 6))
    bits = draw(st.lists(st.integers(0, 255), min_size=num_units, max_size=num_units))
    parents = [-1]  # in the order of ``named_modules``
    for index in range(1, num_units):
        path = [index - 1]
        while parents[path[-1]] >= 0:
            path.append(parents[path[-1]])
        parents.append(path[bits[index] % len(path)])
    specs = [
        Spec(
            parent=parents[index],
            frozen=index > 0 and each >> 3 & 7 == 1,
            empty=index > 0 and each >> 3 & 7 == 2,
            keeps=each >> 3 & 7 == 3,
            checkpoint={4: Checkpoint.AROUND, 5: Checkpoint.INSIDE}.get(
                each >> 3 & 7, Checkpoint.NONE
            ),
        )
        for index, each in enumerate(bits)
    ]
    size = draw(st.integers(2, 3))
    masks = st.lists(st.integers(0, 63), min_size=1, max_size=2 * size)
    steps = draw(
        st.lists(
            st.tuples(st.sampled_from(Step), st.integers(0, num_units - 1), masks, masks),
            min_size=1,
            max_size=4,
        )
    )
    order = draw(st.permutations(range(num_units)))
    repeats = draw(st.sampled_from([0, 0, 0, 2, 4, 6]))
    return Scenario(specs, order, draw(st.integers(1, 4)), repeats, size, steps)
