"""Nothing that is loaded is unpickled: no module that a load runs knows how."""

from __future__ import annotations

import ast
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

import vescale_fsdp.checkpoint
from vescale_fsdp import CheckpointCorruptError, CheckpointIncompleteError, checkpoint
from vescale_fsdp.testing import run_ranks

from .helpers import assert_same, everything, fingerprint, make, train

PACKAGE = "vescale_fsdp.checkpoint"
FOLDER = Path(next(iter(vescale_fsdp.checkpoint.__path__)))
PICKLES = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
BUILTINS = {"eval", "exec", "compile", "__import__"}
LOADING = {"encoding", "files", "manifest", "safetensors_files", "seal", "targets"}
CALLS = {"loads", "Unpickler", "load_module"}


def trees_of(module: str, seen: dict[str, ast.Module]) -> dict[str, ast.Module]:
    """The syntax trees of a file here, and of all files here that it imports."""
    if module not in seen:
        path = FOLDER / module.replace(".", "/")
        seen[module] = ast.parse(path.with_suffix(".py").read_text())
        for node in ast.walk(seen[module]):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(PACKAGE):
                inner = (node.module or "").removeprefix(PACKAGE).strip(".")
                is_file = (FOLDER / inner.replace(".", "/")).with_suffix(".py").exists()
                for name in [inner] if is_file else [f"{inner}.{a.name}" for a in node.names]:
                    trees_of(name.strip("."), seen)
    return seen


def faults_of(tree: ast.Module) -> list[str]:
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [a.name for a in node.names if a.name.split(".")[0] in PICKLES]
        if isinstance(node, ast.ImportFrom):
            found += [node.module or ""] * ((node.module or "").split(".")[0] in PICKLES)
            found += [a.name for a in node.names if a.name in {*PICKLES, *CALLS}]
            found += ["FileSystemReader" for a in node.names if a.name == "FileSystemReader"]
        if isinstance(node, ast.Call):
            text = ast.unparse(node.func)
            if text in BUILTINS or (text.split(".")[-1] in CALLS and text != "json.loads"):
                found.append(text)
            if text in ("torch.load", "numpy.load", "dcp.load") or "object_list" in text:
                found.append(text)
    return found


def test_no_load_path_can_unpickle() -> None:
    trees: dict[str, ast.Module] = {}
    for start in ("loading", "seal", "safetensors"):
        trees_of(start, trees)
    assert trees.keys() >= LOADING
    assert not any(name.startswith("foreign") for name in trees)
    assert {name: faults_of(tree) for name, tree in trees.items() if faults_of(tree)} == {}


def test_the_walk_would_see_it() -> None:
    """The premise of the test above."""
    file = "foreign.dcp_directory"
    assert faults_of(trees_of(file, {})[file]) == ["pickle", "torch.load"]
    assert faults_of(ast.parse("import pickle as p\np.loads(x)")) == ["pickle", "p.loads"]


# The explicit import of what DCP has written


def import_stock(path: Path) -> None:
    model, optimizer = make()
    train(model, optimizer, range(3))
    state = {"model": get_model_state_dict(model)}
    state["optimizer"] = {"0": get_optimizer_state_dict(model, optimizer)}
    dcp.save(state, checkpoint_id=path)
    expected = everything(model, optimizer)
    model, optimizer = make(seed=1)
    before = fingerprint(model, optimizer)
    with pytest.raises(CheckpointIncompleteError, match=r"is a pickle: read it with .*import_dcp"):
        checkpoint.load(path, model, optimizer)
    assert fingerprint(model, optimizer) == before
    assert checkpoint.import_dcp(path, model, optimizer) == {}
    assert_same(everything(model, optimizer), expected)


def test_a_directory_of_stock_dcp_is_imported_when_asked_for_by_name(tmp_path: Path) -> None:
    run_ranks(import_stock, 2, tmp_path / "stock")


class Evil:
    """Makes a folder when it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.folder),)


def test_an_import_runs_no_code(tmp_path: Path) -> None:
    folder = tmp_path / "made"
    evil = Evil(folder)
    cases = [
        (evil, "mkdir"),
        (Metadata({}, planner_data=evil), "mkdir"),
        ({}, "a dict, expected metadata"),
    ]
    for content, message in cases:
        (tmp_path / ".metadata").write_bytes(pickle.dumps(content))
        with pytest.raises(CheckpointCorruptError, match=message):
            checkpoint.import_dcp(tmp_path, torch.nn.Linear(1, 1))
        assert not folder.exists()
    pickle.loads(pickle.dumps(evil))  # the premise
    assert folder.exists()
