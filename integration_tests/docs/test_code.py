"""The documentation's Python has the right names and types, and runs.

Each block becomes a file: the imports of the blocks above it on its page, the names that it takes
for granted (`assumed`), and the block. One run of mypy checks all files, and two ranks run them.
Needs all packages (tox: integration).
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import dis
import importlib
import inspect
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from types import CodeType

import pytest
import torch.distributed as dist
from integration_tests.torchrun import run_torchrun

from vescale_fsdp.testing import run_ranks

from .blocks import ROOT, TEXTS, Block, blocks

HERE = Path(__file__).parent
# Where "model" is not one that nobody has sharded yet.
ASSUMED = {
    "docs/checkpoints.md": "sharded",
    "docs/coming-from-fsdp2.md": "pair",
    "docs/elastic.md": "elastic",
    "docs/full-parameters.md": "sharded",
    "docs/generation.md": "sharded",
    "docs/lightning.md": "lit",
    "vescale_fsdp.check_gradients": "sharded",
    "vescale_fsdp.checkpoint.StopOnSignal": "sharded",
    "vescale_fsdp.checkpoint.export_dcp": "sharded",
    "vescale_fsdp.generating": "sharded",
    "vescale_fsdp.stream_parameters": "sharded",
    "vescale_fsdp_lightning.SealedCheckpointIO": "lit",
    "vescale_fsdp_lightning.load_from_checkpoint": "lit",
}
# Checked, and not run: whole pages (None) or single blocks.
NOT_RUN = {
    ("docs/checkpoints.md", 1): "waits for a signal",
    ("docs/coming-from-deepspeed.md", 1): "loads what a command has converted",
    ("docs/elastic.md", 4): "integration_tests/test_elastic_adapters.py runs the like of it",
    ("docs/elastic.md", 5): "integration_tests/test_elastic_adapters.py runs the like of it",
    ("docs/elastic.md", 6): "packages/accelerate_plugin/tests/test_elastic.py runs the like of it",
    ("vescale_fsdp_accelerate.VeScaleAccelerator.elastic_training", 0): "as docs/elastic.md",
    ("docs/elastic.md", 7): "replicas are several jobs",
    ("vescale_fsdp_elastic.replicas", 0): "replicas are several jobs",
    ("vescale_fsdp_elastic.training", 0): "docs/elastic.md has the same",
    ("docs/full-parameters.md", 3): "accelerate launch starts processes",
    ("docs/generation.md", 2): "accelerate launch starts processes",
    ("docs/lightning.md", 7): "loads what other blocks do not save",
    ("docs/lightning.md", 8): "loads what other blocks do not save",
    ("docs/lightning.md", 10): "Fabric starts processes",
    ("docs/lightning.md", 11): "Fabric starts processes",
    ("docs/machines.md", 1): "needs several machines",
    ("docs/recipes.md", None): "packages/core/tests/test_recipes.py runs it",
    ("vescale_fsdp.checkpoint.StopOnSignal", 0): "waits for a signal",
    ("vescale_fsdp_lightning.SealedCheckpointIO", 0): "loads what other blocks do not save",
    ("vescale_fsdp_lightning.load_from_checkpoint", 0): "loads what other blocks do not save",
}
# What torch's and Lightning's annotations do not know: parameters are DTensors; unions.
OTHERS = re.compile(
    r'no attribute "(full_tensor|to_local)"|"_foreach_lerp_" has|"_Fabric|"AsyncSave'
)
ONE_PROCESS = {("docs/checkpoints.md", 9)}


def all_blocks() -> list[Block]:
    """The Python blocks of the pages and of the docstrings that the reference shows."""
    return [*blocks("python"), *docstring_blocks()]


def documented() -> Iterator[tuple[str, object]]:
    """Dotted name and object of all that the reference lists, and of its methods."""
    reference = "\n".join(text for page, text in TEXTS.items() if "docs/reference/" in page)
    for name in re.findall(r"^::: (\S+)$", reference, re.M):
        module, _, member = name.rpartition(".")
        owner = getattr(importlib.import_module(module), member)
        yield name, owner
        for method, value in vars(owner).items() if inspect.isclass(owner) else ():
            if not method.startswith("_"):
                yield f"{name}.{method}", value


def docstring_blocks() -> Iterator[Block]:
    """What is indented below a ``::`` and is Python."""
    for name, value in documented():
        text = inspect.getdoc(value) or ""
        for number, found in enumerate(re.findall(r"::\n\n((?:(?: {4}.*)?\n|\Z)+)", text + "\n")):
            code = inspect.cleandoc(found) + "\n"
            with contextlib.suppress(SyntaxError):  # a drawing
                ast.parse(code)
                yield Block(name, number, code)


def assumed_names(code: CodeType) -> list[str]:
    """The names that the code loads before it has bound them, in order."""
    bound, wanted, inner = set(dir(builtins)), [], []
    for step in dis.get_instructions(code):
        if step.opname in ("STORE_NAME", "STORE_GLOBAL"):
            bound.add(step.argval)
        elif step.opname in ("LOAD_NAME", "LOAD_GLOBAL") and step.argval not in bound:
            wanted.append(step.argval)
        elif isinstance(step.argval, CodeType):
            inner.append(step.argval)
    later = [name for each in inner for name in assumed_names(each) if name not in bound]
    return list(dict.fromkeys([*wanted, *later]))


def imports_of(tree: ast.AST) -> dict[str, str]:
    """A line of import for each name that the code imports."""
    lines = {}
    for node in ast.walk(tree):
        for alias in node.names if isinstance(node, ast.Import | ast.ImportFrom) else ():
            name = alias.asname or alias.name.partition(".")[0]
            lines[name] = ast.unparse(node)
    return lines


def write_files(folder: Path) -> dict[Path, Block]:
    """A file for each block, in the order of the pages."""
    ours = {
        name.rpartition(".")[2]: "from {0} import {2}".format(*name.rpartition("."))
        for name, value in documented()
        if name.rpartition(".")[0] in sys.modules
    }
    ours["fully_shard"] = "from vescale_fsdp import fully_shard"  # not that of tune
    files = {}
    for page, found in groupby(all_blocks(), lambda block: block.page):
        imports = {} if page.endswith(".md") else ours  # a docstring imports nothing
        for block in found:
            tree = ast.parse(block.text)
            names = assumed_names(compile(tree, page, "exec"))
            above = {imports[name]: None for name in names if name in imports}
            missing = ", ".join(name for name in names if name not in imports)
            if missing:
                above[f"from assumed.{ASSUMED.get(page, 'plain')} import {missing}"] = None
            path = folder / f"{re.sub(r'[^a-z0-9]+', '_', page.lower())}_{block.number}.py"
            path.write_text("\n".join([*above, "", block.text]))
            files[path] = block
            imports |= imports_of(tree)
    return files


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[Path, Block]:
    return write_files(tmp_path_factory.mktemp("blocks"))


@pytest.mark.timeout(400)
def test_blocks_have_the_right_names_and_types(files: dict[Path, Block]) -> None:
    """Longer than 10 s: mypy reads the types of torch and Lightning without a cache."""
    assert len(files) > 60
    search = [HERE, *ROOT.glob("packages/*/src")]
    options = [f"--config-file={HERE / 'mypy.ini'}", f"--cache-dir={ROOT / '.mypy_cache/blocks'}"]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *options, str(HERE / "assumed"), *map(str, files)],
        env={**os.environ, "MYPYPATH": os.pathsep.join(map(str, search))},
        capture_output=True,
        text=True,
    )
    assert done.returncode in (0, 1), done.stderr
    errors = [line for line in done.stdout.splitlines() if ": error: " in line]
    assert [line for line in errors if not OTHERS.search(line)] == []


def is_script(block: Block) -> bool:
    """Whether it makes a process group of its own."""
    return "init_process_group(" in block.text


def run_all(paths: list[tuple[Path, bool]]) -> None:
    """Run each file with new models, some on the first rank alone."""
    for path, is_alone in paths:
        for name in [name for name in sys.modules if name.partition(".")[0] == "assumed"]:
            del sys.modules[name]
        if dist.get_rank() == 0 or not is_alone:
            runpy.run_path(str(path))
        dist.barrier()


@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore")  # Lightning has advice
def test_blocks_run_on_two_ranks(
    files: dict[Path, Block], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(HERE)
    monkeypatch.chdir(tmp_path)
    paths = [
        (path, (block.page, block.number) in ONE_PROCESS)
        for path, block in files.items()
        if not is_script(block)
        and not {(block.page, block.number), (block.page, None)} & set(NOT_RUN)
    ]
    run_ranks(run_all, 2, paths, timeout_s=280)


# A rank that ends closes its connections, while another may still make its own.
MEET = """import torch
if torch.distributed.is_initialized():
    torch.distributed.barrier()
"""


def test_scripts_run_under_torchrun(
    files: dict[Path, Block], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(HERE)
    for path, block in files.items():
        if is_script(block):
            script, log = tmp_path / path.name, tmp_path / f"{path.name}.log"
            text = path.read_text().replace("until=10_000", "until=20")
            script.write_text(f"{text}\n{MEET}")
            code = run_torchrun(
                *("--standalone", "--nproc-per-node=2", script),
                log=log,
                timeout_s=110,
                cwd=tmp_path,
            )
            output = log.read_text()
            assert code == 0, f"{block.page}: {output}"
            if block.page == "docs/start.md":
                (shown,) = [each.text for each in blocks("") if each.page == block.page]
                assert_alike(output, shown)


def assert_alike(output: str, shown: str) -> None:
    """The same lines, in any order, with losses that are close.

    Two processes write to one pipe, each a line and then its end: two lines may come out as one.
    """
    loss = re.compile(r"\d+\.\d+")
    texts, wanted = loss.sub("", output), loss.sub("", shown).splitlines()
    assert all(line in texts for line in wanted)
    assert len(texts.replace("\n", "")) == len("".join(wanted))
    found, expected = ([float(x) for x in loss.findall(text)] for text in (output, shown))
    assert found == pytest.approx(expected, abs=0.02)
