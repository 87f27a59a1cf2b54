"""Draws cases from seeds. Each feature has a probability of its own; most cases are simple."""

from __future__ import annotations

import random
from dataclasses import replace

from .cases import CONTAINERS, Case, Node, Step, Unit, paths_of, walk
from .habits import CLIPS, EVENTS, PASSES
from .habits import LEAVES as OTHER_LEAVES

__all__ = ["draw"]

LEAVES = (
    "Linear",
    "Linear",
    "Linear",
    "Linear",
    "Narrow",
    "Mixed",
    "Scalar",
    "Odd",
    "Conv",
    "Norm",
)
LEAVES += ("Rows", "Spare", "Heads", "Tanh")
FRESH = ("Linear", "Mixed", "Odd", "Norm", "Conv", "Heads", "Scalar", "Spare")  # saved by nobody
TIED = ("Linear", "Narrow", "Norm", "Scalar", "Odd")
GRANULARITIES = (
    "Granularity.elements(3)",
    "Granularity.rows(1)",
    "Granularity.rows(2)",
    "Granularity.whole()",
)
STEPS_WHEN = ("now.step % 2 == 0", "now.step % 2 == 1", "now.step < 2", "now.step > 0", "False")
RANKS_WHEN = (
    "now.rank == 0",
    "now.rank > 0",
    "now.rank > 0 or now.step > 0",
    "now.rank > 0 or now.step < 1",
    "(now.rank + now.step) % 2 == 0",
    "(now.rank + now.step + now.micro) % 3 > 0",
    "(5 * now.rank + 7 * now.step + 3 * now.micro) % 4 > 1",
)


def draw(seed: int, world_size: int | None = None) -> Case:
    """The case of a seed. The plain model may refuse it: then draw another."""
    case = _Drawing(random.Random(seed)).case(world_size)
    return _with_habits(case, random.Random(-seed)) if seed // 1000 % 2 else case


def _with_habits(case: Case, chance: random.Random) -> Case:
    """Put what scripts of others do into the steps of a case."""
    modules = [path for path, node in paths_of(case.root) if node.kind != "Tanh"]
    # Where ranks leave out units: what is lent to one is gathered by all; and a checkpoint that
    # hides the forward of the root leaves nothing to predict its backward from.
    is_even = not any("rank" in node.when + node.extra for node in walk(case.root))
    even = ("functional", "reentrant", "gradients", "penalty", "curvature")
    uneven = [each for each in PASSES if each not in even]
    passes = PASSES if is_even else uneven

    def event() -> tuple[str, str]:
        name = chance.choice(EVENTS)
        if name == "scale":  # where one output is computed from another, if there is such a module
            return name, chance.choice(several or [""])
        return name, chance.choice(modules) if name.endswith("hook") else ""

    def kind_of_pass(kind: str) -> str:
        return chance.choice(passes) if chance.random() < 0.3 else kind

    def with_some(step: Step) -> Step:
        before = tuple(event() for _ in range(chance.choice([0, 0, 1, 1, 2])))
        return replace(
            step,
            before=step.before + before,
            passes=tuple(map(kind_of_pass, step.passes)),
            clips=chance.choice(CLIPS) if chance.random() < 0.2 else step.clips,
            halves=chance.random() < 0.1,
        )

    # The inner backward needs all that runs: no fault, and no forward that a checkpoint repeats.
    may_guide = is_even and not any(
        node.checkpoint or step.fault for node in walk(case.root) for step in case.steps
    )
    tied = {name for pair in case.ties for name in pair}

    def with_others(node: Node) -> Node:
        if node.kind in CONTAINERS and node.output == "tensor" and chance.random() < 0.4:
            node = replace(node, output="dict")
        elif node.kind in CONTAINERS and node.output == "tensor" and may_guide:
            node = replace(node, guided=chance.random() < 0.2)
        if node.kind == "Linear" and node.name not in tied and chance.random() < 0.3:
            return replace(node, kind=chance.choice(OTHER_LEAVES))
        return replace(node, children=tuple(map(with_others, node.children)))

    root = with_others(case.root)
    # Outputs that the unit casts are other tensors, which no output is computed from.
    several = [
        path
        for path, node in paths_of(root)
        if node.output == "dict" and node.children and not (node.unit and node.unit.dtype)
    ]
    steps = tuple(map(with_some, case.steps))
    return replace(case, root=root, steps=steps)


class _Drawing:
    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.level = chance.choice([0.3, 0.6, 1.0, 1.5])
        self.num_names = 0
        # What all of a model has or has not, so that what may not meet does not.
        self.ranks_skip = self.may(0.5)
        self.checkpoints = self.may(0.5)
        self.narrow = self.may(0.25)
        self.conditions = self.may(0.5)
        self.repeats = not self.ranks_skip and self.may(0.2)
        self.releases = self.may(0.5)  # every unit between forward and backward

    def may(self, probability: float) -> bool:
        return self.chance.random() < probability * min(self.level, 1.2)

    def name(self) -> str:
        self.num_names += 1
        return f"n{self.num_names - 1}"

    def case(self, world_size: int | None) -> Case:
        chance = self.chance
        drawn = chance.choices([2, 3, 4], [10, 2, 1])[0]
        world_size = world_size or drawn
        self.world_size = world_size
        budget = chance.choice([2, 3, 4, 6, 8])
        root = self.container(budget, 0)
        root = replace(root, unit=self.unit(), when="", copies=1, times=1, checkpoint="")
        root = replace(root, changed=False, joins=False)
        sharding = (
            "" if self.releases else chance.choice(["", "", "ddp", "zero1", "zero2", "zero3"])
        )
        ties = self.ties(root)
        if ties:  # what is in two units would be computed with in two dtypes
            root = _in_one_dtype(root)
        case = Case(
            root=root,
            steps=(),
            world_size=world_size,
            width=chance.choice([1, 2, 3, 4, 7]),
            sharding=sharding if not self.has_dtypes(root) or sharding != "ddp" else "",
            in_flight=chance.choice([1, 2, 2, 2, 2, 3, 4, 5]),
            optimizer=chance.choice(["sgd", "adamw", "adamw-foreach"]),
            set_to_none=not self.may(0.3),
            input_wants_gradient=self.may(0.4),
            ties=ties,
        )
        if not self.ranks_skip and self.may(0.1):
            case = replace(case, prefetch=self.prefetch(case))
        return replace(case, steps=self.steps(case))

    def has_dtypes(self, root: Node) -> bool:
        return any(node.unit and node.unit.dtype for node in walk(root))

    # The model

    def container(self, budget: int, depth: int) -> Node:
        kind = self.chance.choice(["Chain", "Chain", "Residual"])
        name = self.name()
        children: list[Node] = []
        while budget > 0:
            size = self.chance.randint(1, min(budget, 4))
            if depth < 3 and size > 1 and self.chance.random() < 0.7:
                child = self.container(size, depth + 1)
            else:
                child, size = self.leaf(), 1
            budget -= size
            children.append(self.called(child, children))
        output = self.chance.choice(["view", "tuple", "dict"]) if self.may(0.3) else "tensor"
        return self.sharded(Node(name, kind, tuple(children), output=output))

    def leaf(self) -> Node:
        kind = self.chance.choice(LEAVES)
        if kind in ("Narrow", "Mixed") and not self.narrow:
            kind = "Linear"
        node = Node(self.name(), kind, frozen=kind != "Tanh" and self.may(0.12))
        if kind == "Heads":
            extra = self.chance.choice(["", "True", *STEPS_WHEN])
            if self.ranks_skip and self.releases and self.may(0.4):
                extra = self.chance.choice(RANKS_WHEN)
            node = replace(node, output=self.chance.choice(["tuple", "dict"]), extra=extra)
        return self.sharded(node)

    def called(self, child: Node, before: list[Node]) -> Node:
        """How the parent calls it."""
        chance = self.chance
        if self.may(0.12):
            child = replace(child, copies=chance.choice([2, 3]))
        if self.repeats and self.may(0.3):
            child = replace(child, times=2)
        if self.conditions and self.may(0.3):
            child = replace(child, when=chance.choice(STEPS_WHEN))
        if self.ranks_skip and self.may(0.4):
            when = chance.choice(RANKS_WHEN)
            child = replace(
                child, when=when.replace("now.step", "now.step + i") if child.copies > 1 else when
            )
        if self.checkpoints and self.may(0.4):
            child = replace(child, checkpoint=chance.choice(["True", "False"]))
        elif before and before[-1].checkpoint and self.may(0.8):
            child = replace(child, checkpoint=before[-1].checkpoint, joins=True)
        is_fresh = child.kind in FRESH or (
            child.kind == "Chain"
            and child.children[-1].kind in FRESH
            and not child.children[-1].when
        )
        if is_fresh and self.may(0.15):
            child = replace(child, changed=True)
        are_single = before and child.copies == before[-1].copies == 1
        if child.unit and are_single and before[-1].unit and self.may(0.3):
            child = replace(child, unit=replace(child.unit, joins=True))
        return child

    def sharded(self, node: Node) -> Node:
        if node.kind == "Tanh":
            return replace(node, unit=Unit()) if self.may(0.5) else node
        frozen = bool(node.children) and self.may(0.06)
        share = 0.6 if node.kind in CONTAINERS else 0.35
        unit = self.unit() if self.chance.random() < share else None
        return replace(node, unit=unit, frozen=node.frozen or frozen)

    def unit(self) -> Unit:
        chance = self.chance
        if self.releases:
            reshard = "True"
        else:
            reshard = chance.choice(["None", "None", "True", "False", str(self.world_size)])
        granularity = chance.choice(GRANULARITIES) if self.may(0.3) else "None"
        dtype = ""
        if self.narrow and self.may(0.2):
            dtype = "float32" if chance.random() < 0.8 else "bfloat16"
        return Unit(reshard, granularity, dtype)

    def ties(self, root: Node) -> tuple[tuple[str, str], ...]:
        leaves = [node for node in walk(root) if node.kind in TIED]
        pairs = [
            (first.name, second.name)
            for i, first in enumerate(leaves)
            for second in leaves[i + 1 :]
            if first.kind == second.kind
        ]
        if not pairs or not self.may(0.25):
            return ()
        return (self.chance.choice(pairs),)

    def prefetch(self, case: Case) -> tuple[tuple[str, str, tuple[str, ...]], ...]:
        paths = [path for path, node in paths_of(case.root) if node.unit]
        found = []
        for _ in range(self.chance.randint(1, 2)):
            when = self.chance.choice(["forward", "backward"])
            others = self.chance.sample(paths, self.chance.randint(1, min(2, len(paths))))
            found.append((when, self.chance.choice(paths), tuple(others)))
        return tuple(found)

    # The steps

    def steps(self, case: Case) -> tuple[Step, ...]:
        return tuple(self.step(case, number) for number in range(self.chance.choice([2, 3, 4])))

    def step(self, case: Case, number: int) -> Step:
        chance = self.chance
        before = tuple(self.event(case) for _ in range(chance.choice([0, 0, 0, 1, 2])))
        is_new = number == 0 or ("remesh", "") in before  # a world, in which the root runs first
        passes = tuple(
            self.kind_of_pass(case, is_new=is_new) for _ in range(chance.choice([1, 1, 1, 2, 3]))
        )
        fault = None
        places = _always_run(case.root)
        if places and self.may(0.08):
            fault = (chance.choice(["forward", "backward"]), chance.choice(places))
        return Step(
            before=before,
            passes=passes,
            syncs_last_only=len(passes) > 1 and chance.random() < 0.5,
            fault=fault,
            clips=chance.choice(["ours", "torch"]) if self.may(0.15) else "",
            zeroes=not self.may(0.05),
        )

    def kind_of_pass(self, case: Case, *, is_new: bool) -> str:
        if not self.may(0.35):
            return "plain"
        kinds = ["sum", "sum", "two", "crossed", "peek", "peek", "retain", "drop"]
        parts = [
            path
            for path, node in paths_of(case.root)
            if path and node.unit and not node.unit.joins and node.kind != "Tanh"
        ]
        if not is_new and parts and not case.ties and not self.ranks_skip:
            kinds += [f"part {chance_path}" for chance_path in parts[:2]]
        return self.chance.choice(kinds)

    def event(self, case: Case) -> tuple[str, str]:
        chance = self.chance
        modules = paths_of(case.root)
        path = chance.choice([path for path, node in modules if node.kind != "Tanh"])
        unit = chance.choice([path for path, node in modules if node.unit])
        return chance.choice(
            [
                ("eval", "no_grad"),
                ("eval", "no_grad"),
                ("eval", "inference_mode"),
                ("freeze", path),
                ("freeze", path),
                ("unfreeze", path),
                ("state_dict", ""),
                ("reload", ""),
                ("write", ""),
                ("copy", ""),
                ("remesh", ""),
                ("unshard", unit),
                ("unshard", unit),
                ("reshard", unit),
                ("unsharded", ""),
                ("unsharded", "run"),
                ("unsharded", "write"),
            ]
        )


def _in_one_dtype(node: Node) -> Node:
    unit = node.unit and replace(node.unit, dtype="")
    return replace(node, unit=unit, children=tuple(map(_in_one_dtype, node.children)))


def _always_run(node: Node) -> list[str]:
    """Names of what runs on every rank, and once."""
    found = []
    for child in node.children:
        if not child.when and child.copies == child.times == 1:
            found += [child.name, *_always_run(child)]
    return found
