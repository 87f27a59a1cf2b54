"""Private names of torch are in one place; communicators are made in the way that we need."""

from __future__ import annotations

import ast
import datetime
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import vescale_fsdp
from vescale_fsdp.ranks import collectives
from vescale_fsdp.testing import run_ranks


def check_group_of_one_rank() -> list[int]:
    """As of another pipeline stage: the other rank never calls."""
    world = dist.group.WORLD
    assert world is not None
    world.bound_device_id = torch.device("cuda", 0)  # as init_process_group(device_id=...) does
    try:
        splits = AssertionError("torch would split the default group")
        with mock.patch.object(dist.distributed_c10d, "_get_split_source", side_effect=splits):
            group = collectives.new_group([0]) if dist.get_rank() == 0 else None
        assert world.bound_device_id == torch.device("cuda", 0)
    finally:
        world.bound_device_id = None
    return [] if group is None else dist.get_process_group_ranks(group)


def test_a_group_is_not_split_from_a_default_group_that_has_a_device() -> None:
    assert run_ranks(check_group_of_one_rank, 2) == [[0], []]


class _Options:
    def __init__(self, is_high_priority_stream: bool = False) -> None:
        self.is_high_priority_stream = is_high_priority_stream
        self.config: Any = "default"
        self._timeout: Any = "default"


def test_nccl_gets_streams_of_high_priority_and_the_configuration_of_the_default_group() -> None:
    given = _Options()
    given.config = "by copy engines"
    world: Any = SimpleNamespace(_get_backend=lambda device: SimpleNamespace(options=given))
    fake = SimpleNamespace(ProcessGroupNCCL=SimpleNamespace(Options=_Options))
    with mock.patch.object(collectives, "dist", fake):
        options = collectives.nccl_options(datetime.timedelta(seconds=7), world, "cuda")
        as_it_was = collectives.nccl_options(None, world, "cuda")
    assert options.is_high_priority_stream
    assert options.config == "by copy engines"
    assert options._timeout == datetime.timedelta(seconds=7)
    assert as_it_was._timeout == "default"


# --- private names of torch -----------------------------------------------------------------------

SOURCES = Path(vescale_fsdp.__file__).parent
# Operators (documented, or called by their schema's name), and what a tensor subclass is made with.
ALLOWED = ("torch._foreach_", "torch.ops.", "torch.Tensor._make_wrapper_subclass")


def private_names(tree: ast.AST) -> Iterator[str]:
    """What a file imports of torch, or reaches through what it has imported, by a private name."""
    known: dict[str, str] = {}
    found: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for each in node.names:
                if each.name.partition(".")[0] == "torch":
                    known[each.asname or "torch"] = each.name if each.asname else "torch"
                    found.append(each.name)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch":
            for each in node.names:
                known[each.asname or each.name] = f"{node.module}.{each.name}"
                found.append(f"{node.module}.{each.name}")
    for node in ast.walk(tree):
        path, names = node, []
        while isinstance(path, ast.Attribute):
            names.append(path.attr)
            path = path.value
        if names and isinstance(path, ast.Name) and path.id in known:
            found.append(".".join([known[path.id], *reversed(names)]))
    for name in found:
        parts = name.split(".")[1:]
        is_private = any(part.startswith("_") and not part.endswith("__") for part in parts)
        if is_private and not name.startswith(ALLOWED):
            yield name


def test_private_names_of_torch_are_used_in_compat_only() -> None:
    found = {
        f"{file}: {name}"
        for path in SOURCES.rglob("*.py")
        if not (file := path.relative_to(SOURCES).as_posix()).startswith("compat/")
        for name in private_names(ast.parse(path.read_text()))
    }
    assert not found


def test_a_private_name_is_seen_however_it_is_reached() -> None:
    source = """
import torch, torch._dynamo
import torch.distributed as dist
from torch.distributed import _functional_collectives as funcol
from torch.distributed.tensor import DTensor
torch._C.f(); dist.distributed_c10d._world.x; DTensor._op_dispatcher
torch._foreach_add_; torch.ops.aten._to_copy; torch.__version__; tensor._local_tensor
"""
    assert set(private_names(ast.parse(source))) == {
        "torch._dynamo",
        "torch.distributed._functional_collectives",
        "torch._C",
        "torch._C.f",
        "torch.distributed.distributed_c10d._world",
        "torch.distributed.distributed_c10d._world.x",
        "torch.distributed.tensor.DTensor._op_dispatcher",
    }


def check_threads() -> None:
    group = dist.group.WORLD
    assert group is not None
    x = torch.ones(4)
    collectives.all_reduce(x, group).wait()
    parts = [torch.zeros(2) for _ in range(2)]
    collectives.all_gather_uneven(parts, torch.ones(2), group).wait()
    assert x.tolist() == [2.0] * 4
    assert torch.cat(parts).tolist() == [1.0] * 4
    tracked = list(collectives._with_threads)
    assert len(tracked) >= 4
    collectives._wait_for_threads()  # before the process exits
    assert all(each() is None for each in tracked)
    held = collectives._for_thread(x)
    with mock.patch.object(collectives, "_MOST_WAIT_S", 0.01):
        collectives._wait_for_threads()  # no longer than that
    assert held.data_ptr() == x.data_ptr()


def test_tensors_of_collectives_are_dropped_before_exit() -> None:
    run_ranks(check_threads, 2)
