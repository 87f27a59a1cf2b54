"""Helpers for tests on several ranks."""

from __future__ import annotations

import contextlib
import random
import socket
from typing import Any

import torch
import torch.distributed as dist

from vescale_fsdp.compat import pytree

_PORTS = 20_000, 32_768


def assert_equal_across_ranks(value: Any, name: str = "value") -> None:
    """Assert, inside a rank, that ``value`` is the same on all ranks, without a tolerance.

    Every rank must call it. ``value`` may nest lists, tuples, dicts and dataclasses known to
    pytree. Tensors must be plain ones: call ``full_tensor()`` first. NaN equals NaN.

    Cost: one all-gather of ``value``, pickled.

    Raises:
        AssertionError: on every rank. It names the first rank that differs from rank 0, and the
            first leaf that differs there.
    """
    leaves = [(pytree.keystr(path), leaf) for path, leaf in pytree.tree_flatten_with_path(value)[0]]
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, leaves)
    for rank, theirs in enumerate(gathered[1:], start=1):
        paths, expected_paths = [p for p, _ in theirs], [p for p, _ in gathered[0]]
        assert paths == expected_paths, (
            f"{name} has another structure on rank {rank} than on rank 0: "
            f"{paths} against {expected_paths}"
        )
        for (path, leaf), (_, expected) in zip(theirs, gathered[0], strict=True):
            difference = _difference(leaf, expected)
            assert not difference, f"{name}{path} differs on rank {rank} from rank 0: {difference}"


def _difference(found: Any, expected: Any) -> str:
    """A text that says what differs; empty if nothing does."""
    if not (isinstance(found, torch.Tensor) and isinstance(expected, torch.Tensor)):
        return "" if found == expected else f"{found!r} against {expected!r}"
    if found.dtype != expected.dtype or found.shape != expected.shape:
        return (
            f"{found.dtype} {tuple(found.shape)} against {expected.dtype} {tuple(expected.shape)}"
        )
    both_nan = found.isnan() & expected.isnan()
    unequal = (found != expected) & ~both_nan
    count = int(unequal.sum())
    if not count:
        return ""
    largest = (found.double() - expected.double()).abs()[unequal].max().item()
    return f"{count} of {found.numel()} elements, by up to {largest:g}"


def free_port() -> int:
    """A TCP port of the loopback address that was free a moment ago.

    It is below those that the system gives to sockets which ask for any, so that none of these
    takes it before you do. Prefer a file rendezvous if you can.
    """
    while True:
        port = random.SystemRandom().randrange(*_PORTS)
        with contextlib.suppress(OSError), socket.socket() as listener:
            listener.bind(("127.0.0.1", port))
            return port
