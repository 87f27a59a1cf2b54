"""A case as a small Python program: plain modules, ``shard``, and the steps.

The runner executes this text, so what is printed for a failing case is what has run.
"""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

from . import parts
from .cases import CONTAINERS, Case, Node, Unit, paths_of, walk

__all__ = ["program_of"]

HEAD = """\
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from vescale_fsdp import Granularity, MixedPrecisionPolicy, fully_shard

now = SimpleNamespace(step=0, micro=0, rank=0, fault=None)
WIDE = torch.float64
"""

TAIL = """\
if __name__ == "__main__":  # from the root of the repository
    import sys
    from pathlib import Path

    sys.path.insert(0, ".")
    from packages.core.tests.engine.fuzz.runner import check

    print(check(Path(__file__).read_text()) or "no fault")
"""

_BASES = {"Narrow": ["Linear"], "Spare": ["Linear"]}
_FAULT = ["Boom", "Broken", "fault"]
_GUIDED = [
    "if torch.is_grad_enabled():",
    "    place = x.detach().requires_grad_()",
    "    (slope,) = torch.autograd.grad(self.run(1 * place).square().sum(), place)",
    "    x = x - 0.01 * slope",
    "return self.run(x)",
]


def program_of(case: Case) -> str:
    """The program; ``runner.check`` runs it."""
    faults = {step.fault[1] for step in case.steps if step.fault}
    kinds = dict.fromkeys(
        kind
        for node in walk(case.root)
        for kind in (*_BASES.get(node.kind, []), node.kind)
        if kind not in (*CONTAINERS, "Tanh")
    )
    sources = [inspect.getsource(getattr(parts, kind)) for kind in kinds]
    if faults:
        sources += [inspect.getsource(getattr(parts, name)) for name in _FAULT]
    containers = [node for node in walk(case.root) if node.kind in CONTAINERS]
    sources += [_container(node, case, faults) for node in reversed(containers)]
    sources += [_build(case), _shard(case), _settings(case), TAIL]
    return "\n\n".join([HEAD, *sources])


def _container(node: Node, case: Case, faults: set[str]) -> str:
    lines = [f"class {_class(node)}(nn.Module):", "    def __init__(self) -> None:"]
    lines += ["        super().__init__()"]
    for child in node.children:
        made = f"{_class(child)}({_arguments(child, case)})"
        if child.copies > 1:
            made = f"nn.ModuleList({made} for _ in range({child.copies}))"
        lines.append(f"        self.{child.name} = {made}")
    body = ["inputs = x"] if node.kind == "Residual" else []
    stretches = _stretches(node)
    shows = node.output == "dict" and len(stretches) > 1
    for number, stretch in enumerate(stretches):
        if shows and number == len(stretches) - 1:
            body.append("hidden = x")  # an output that another is computed from
        body += _stretch(stretch, faults)
    if node.kind == "Residual":
        body.append("x = inputs + x")
    shown = '"hidden": hidden, ' if shows else ""
    ends = {
        "tensor": "return x",
        "view": "return x.view(-1).view(x.shape)",
        "tuple": "return x, None, 3",
        "dict": f'return {{"y": x, {shown}"size": len(x)}}',
    }
    body.append(ends[node.output])
    name = "forward"
    if node.guided:
        name = "run"
        lines += ["", "    def forward(self, x: Tensor) -> Any:", *_indented(_GUIDED, 2)]
    lines += ["", f"    def {name}(self, x: Tensor) -> Any:", *_indented(body, 2)]
    return "\n".join(lines) + "\n"


def _class(node: Node) -> str:
    if node.kind == "Tanh":
        return "nn.Tanh"
    return node.name.capitalize() if node.kind in CONTAINERS else node.kind


def _arguments(node: Node, case: Case) -> str:
    if node.kind == "Tanh" or node.kind in CONTAINERS:
        return ""
    return f'{case.width}, "{node.output}"' if node.kind == "Heads" else str(case.width)


def _stretches(node: Node) -> list[list[Node]]:
    """Children in runs that share a checkpoint, or stand alone."""
    found: list[list[Node]] = []
    for child in node.children:
        if found and child.joins and found[-1][0].checkpoint:
            found[-1].append(child)
        else:
            found.append([child])
    return found


def _stretch(stretch: list[Node], faults: set[str]) -> list[str]:
    first = stretch[0]
    if not first.checkpoint:
        return _loop(first, _call(first, faults))
    if len(stretch) == 1:
        return _loop(first, _checkpointed(first, _call(first, faults), "each=each, i=i"))
    lines = [line for child in stretch for line in _loop(child, _call(child, faults))]
    return _checkpointed(first, lines, "")


def _checkpointed(node: Node, lines: list[str], bound: str) -> list[str]:
    bound = f", {bound}" if bound and node.copies > 1 else ""
    return [
        f"def stretch(x{bound}):",
        *_indented([*lines, "return x"], 1),
        f"x = checkpoint(stretch, x, use_reentrant={node.checkpoint})",
    ]


def _loop(node: Node, lines: list[str]) -> list[str]:
    if node.copies == 1:
        return lines
    return [f"for i, each in enumerate(self.{node.name}):", *_indented(lines, 1)]


def _call(node: Node, faults: set[str]) -> list[str]:
    called = f"{'each' if node.copies > 1 else f'self.{node.name}'}(x)"
    lines = [f'x = fault("{node.name}", x)'] if node.name in faults else []
    if node.kind == "Heads":
        lines.append(f"both = {called}")
        names = ("0", "1") if node.output == "tuple" else ('"y"', '"more"')
        lines.append(f"x = both[{names[0]}]")
        if node.changed:
            lines.append("x.mul_(0.9)")
        if node.extra:
            lines += [f"if {node.extra}:", f"    x = x + both[{names[1]}]"]
    else:
        end = {"tuple": "[0]", "dict": '["y"]'}.get(node.output, "")
        lines.append(f"x = {called}{end}")
        if node.changed:
            lines.append("x.mul_(0.9)")
    if node.times > 1:
        lines = [f"for _ in range({node.times}):", *_indented(lines, 1)]
    if node.when:
        lines = [f"if {node.when}:", *_indented(lines, 1)]
    return lines


def _indented(lines: list[str], depth: int) -> list[str]:
    return [f"{'    ' * depth}{line}" for line in lines]


def _build(case: Case) -> str:
    paths = paths_of(case.root)
    by_name: dict[str, list[str]] = {}
    for path, node in paths:
        by_name.setdefault(node.name, []).append(path)
    lines = ["def build() -> nn.Module:", "    torch.manual_seed(7)"]
    lines += [f"    model = {_class(case.root)}()"]
    for first, second in case.ties:
        owner = _module(by_name[first][0])
        lines += [f"    {_module(path)}.weight = {owner}.weight" for path in by_name[second]]
    lines += [f"    {_module(p)}.requires_grad_(False)" for p, node in paths if node.frozen]
    return "\n".join([*lines, "    return model"]) + "\n"


def _module(path: str) -> str:
    out = "model"
    for part in path.split(".") if path else []:
        out += f"[{part}]" if part.isdigit() else f".{part}"
    return out


def _shard(case: Case) -> str:
    lists: list[tuple[list[str], Unit]] = []
    for path, node in reversed(_parents_first(case)):
        if node.unit is None:
            continue
        lists.append(([path], node.unit))
    # What joins is in one list with the unit before it, which comes after it here.
    merged: list[tuple[list[str], Unit]] = []
    for paths, unit in lists:
        if merged and merged[-1][1].joins and _same_parent(merged[-1][0][0], paths[0]):
            merged[-1] = ([*paths, *merged[-1][0]], unit)
        else:
            merged.append((paths, unit))
    lines = ["def shard(model: nn.Module) -> nn.Module:"]
    for paths, unit in merged:
        what = _module(paths[0])
        if len(paths) > 1:
            what = f"[{', '.join(map(_module, paths))}]"
        lines.append(f"    fully_shard({what}{_options(unit, case, is_root=paths == [''])})")
    for when, path, others in case.prefetch:
        values = ", ".join(map(_module, others))
        lines.append(f"    {_module(path)}.set_modules_to_{when}_prefetch([{values}])")
    return "\n".join([*lines, "    return model"]) + "\n"


def _parents_first(case: Case) -> list[tuple[str, Node]]:
    """Siblings beside each other."""
    return paths_of(case.root)


def _same_parent(path: str, other: str) -> bool:
    return path.rpartition(".")[0] == other.rpartition(".")[0]


def _options(unit: Unit, case: Case, *, is_root: bool) -> str:
    options: dict[str, str] = {}
    if case.sharding:
        options["sharding"] = repr(case.sharding)
    elif unit.reshard != "None":
        options["reshard_after_forward"] = unit.reshard
    if unit.granularity != "None":
        options["granularity"] = unit.granularity
    if unit.dtype:
        options["mp_policy"] = (
            f"MixedPrecisionPolicy(torch.{unit.dtype}, torch.float32, output_dtype=WIDE)"
        )
    if is_root and case.in_flight != 2:
        options["in_flight"] = str(case.in_flight)
    return "".join(f", {name}={value}" for name, value in options.items())


def _settings(case: Case) -> str:
    nodes = list(walk(case.root))
    dtypes = {node.unit.dtype for node in nodes if node.unit}
    if "bfloat16" in dtypes:
        tolerance = 0.2
    elif "float32" in dtypes or any(node.kind in ("Narrow", "Mixed") for node in nodes):
        tolerance = 2e-4
    else:
        tolerance = 1e-9
    steps = [f"    dict({_step(step)})," for step in case.steps]
    return "\n".join(
        [
            f"WORLD_SIZE, WIDTH, TOLERANCE = {case.world_size}, {case.width}, {tolerance}",
            f"OPTIMIZER, SET_TO_NONE = {case.optimizer!r}, {case.set_to_none}",
            f"INPUT_WANTS_GRADIENT = {case.input_wants_gradient}",
            "STEPS = [",
            *steps,
            "]",
            "",
        ]
    )


def _step(step: Any) -> str:
    changed = {
        f.name: getattr(step, f.name)
        for f in dataclasses.fields(step)
        if getattr(step, f.name) != f.default
    }
    return ", ".join(f"{name}={value!r}" for name, value in changed.items())
