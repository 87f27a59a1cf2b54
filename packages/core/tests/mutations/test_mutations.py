"""The mutations fit the sources and the tests of today. ``python3 dev.py mutations`` runs them."""

from __future__ import annotations

import ast
import shutil
from pathlib import Path

import pytest

from .runner import SOURCES, TESTS, Mutation, StaleError, all_mutations

ALL = all_mutations()


def test_there_are_as_many_as_were_promised() -> None:
    names = [mutation.name for mutation in ALL]
    assert len(set(names)) == len(names) >= 30 + 19


@pytest.mark.parametrize("mutation", ALL, ids=lambda mutation: mutation.name)
def test_its_lines_are_there_once(mutation: Mutation, tmp_path: Path) -> None:
    for file, _, _ in mutation.changes:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(SOURCES / "vescale_fsdp" / file, tmp_path / file)
    mutation.apply(tmp_path)


def test_lines_that_are_not_there_are_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x = 1\nx = 1\n")
    for old, number in (("x = 1", 2), ("y = 1", 0)):
        mutation = Mutation("name", "What happens.", (("a.py", old, "x = 2"),), ())
        with pytest.raises(StaleError, match=rf"a\.py has {number} places(?s:.)*What happens\."):
            mutation.apply(tmp_path)


def functions_of(file: str) -> dict[str, list[str]]:
    """The functions of a test file, with the text of their decorators."""
    tree = ast.parse((TESTS / file).read_text())
    return {
        node.name: [ast.unparse(each) for each in node.decorator_list]
        for node in tree.body
        if isinstance(node, ast.FunctionDef)
    }


@pytest.mark.parametrize("test", sorted({test for mutation in ALL for test in mutation.tests}))
def test_each_named_test_is_there_and_runs_at_each_change(test: str) -> None:
    file, _, name = test.partition("::")
    decorators = functions_of(file)[name.partition("[")[0]]
    assert "pytest.mark.nightly" not in decorators


def test_scenarios_that_find_a_mutation_run_at_each_change() -> None:
    file = "simulator/test_simulator.py"
    tree = ast.parse((TESTS / file).read_text())
    (chosen,) = [
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "AT_EACH_CHANGE"
    ]
    names = {each.value for each in ast.walk(chosen) if isinstance(each, ast.Constant)}
    found = {test for mutation in ALL for test in mutation.tests if test.startswith(file)}
    function = "test_each_order_gives_the_bits_of_the_eager_run"
    assert found
    assert found <= {f"{file}::{function}[{name}-few]" for name in names}


@pytest.mark.parametrize("mutation", ALL, ids=lambda mutation: mutation.name)
def test_each_is_named_by_a_test_and_said_in_a_sentence(mutation: Mutation) -> None:
    assert mutation.tests
    assert mutation.behaviour[0].isupper()
    assert mutation.behaviour.endswith(".")
