"""Reads the mutations, applies each to a copy of the sources, and runs the tests that find it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
SOURCES = TESTS.parent / "src"
ROOT = TESTS.parents[2]
FILES = ("engine.toml", "simulator.toml")
LIMIT_S = 300  # of one mutation: a fault may make tests hang until their own limit


class StaleError(Exception):
    """The lines that a mutation replaces are not there once: it has to be written anew."""


@dataclass(frozen=True)
class Mutation:
    """A fault.

    Attributes:
        name: for the command line.
        behaviour: what a user would see, without words of this engine.
        changes: each a file in ``vescale_fsdp``, the text to replace, and the new one.
        tests: each has to fail with it: a file in ``tests``, ``::``, and a function; with ``[...]``
            one set of its parameters, else any of those that run at each change.
    """

    name: str
    behaviour: str
    changes: tuple[tuple[str, str, str], ...]
    tests: tuple[str, ...]

    def apply(self, package: Path) -> None:
        """Write the changed files into a copy of the package.

        Raises:
            StaleError: see there.
        """
        for file, old, new in self.changes:
            path = package / file
            text = path.read_text() if path.is_file() else ""
            if text.count(old) != 1:
                raise StaleError(
                    f"{self.name}: {file} has {text.count(old)} places, expected 1, with\n{old}\n"
                    f"Write the lines anew, so that this happens: {self.behaviour}"
                )
            changed = text.replace(old, new)
            compile(changed, str(path), "exec")  # a fault of grammar is found by every test
            path.write_text(changed)


@dataclass(frozen=True)
class Verdict:
    """What the tests of a mutation have said.

    Attributes:
        survived: the tests that do not fail with it; all have to.
        output: of pytest.
    """

    survived: tuple[str, ...]
    reason: str  # the first failure
    output: str
    num_seconds: float


def all_mutations() -> list[Mutation]:
    """Those of both files, in their order."""
    found = []
    for file in FILES:
        for name, table in tomllib.loads((Path(__file__).parent / file).read_text()).items():
            changes = [table, *table.get("more", ())]
            changed = tuple((each["file"], each["old"], each["new"]) for each in changes)
            found.append(Mutation(name, table["behaviour"], changed, tuple(table["tests"])))
    return found


def verdict_of(mutation: Mutation) -> Verdict:
    """Run the tests of a mutation with changed sources.

    Raises:
        StaleError: the sources are not as the mutation expects them.
    """
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="vescale-mutation-") as folder:
        package = Path(folder) / "src" / "vescale_fsdp"
        shutil.copytree(SOURCES / "vescale_fsdp", package, ignore=shutil.ignore_patterns("*.pyc"))
        mutation.apply(package)
        path = os.pathsep.join([str(package.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
        report = Path(folder) / "report.xml"
        call = [sys.executable, "-m", "pytest", "-q", "--tb=line", "--hypothesis-profile=ci"]
        call += ["-p", "no:cacheprovider", f"--junit-xml={report}"]
        call += [f"packages/core/tests/{test}" for test in mutation.tests]
        try:
            done = subprocess.run(
                call,
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": path},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=LIMIT_S,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            text = error.stdout.decode() if isinstance(error.stdout, bytes) else error.stdout or ""
            reason = f"not ended in {LIMIT_S} s"
            return Verdict(mutation.tests, reason, text, float(LIMIT_S))
        failed = _failed(report)
    survived = tuple(test for test in mutation.tests if _title(test) not in failed)
    reason = next(iter(failed.values()), "no test has failed")
    return Verdict(survived, reason, done.stdout, time.monotonic() - begun)


def _failed(report: Path) -> dict[str, str]:
    """Which tests have failed, also in their fixtures, under each name that means them, and why."""
    failed: dict[str, str] = {}
    for case in ElementTree.parse(report).iter("testcase") if report.exists() else ():
        for fault in (*case.iter("failure"), *case.iter("error")):
            title = f"{case.get('classname')}.{case.get('name')}"
            reason = _reason(fault.get("message", ""))
            failed |= {title: reason, title.partition("[")[0]: reason}
    return failed


def _reason(message: str) -> str:
    """One line of a failure: of a rank's, what the rank has raised."""
    lines = [line.strip() for line in message.splitlines() if line.strip()] or [""]
    if "RankError" in lines[0]:
        named = next((line for line in lines if line.startswith("--- rank")), lines[0])
        raised = [line for line in lines if re.match(rf"[\w.]*{named.rpartition(' ')[2]}\b", line)]
        lines = [raised[0] if raised else named]
    return lines[0][:100]


def _title(test: str) -> str:
    """The title in pytest's report."""
    file, _, function = test.partition("::")
    return f"packages.core.tests.{file.removesuffix('.py').replace('/', '.')}.{function}"
