"""Fixtures of all tests, and which numbers of ranks and which samples run at each change."""

from __future__ import annotations

import gc
import sys

import pytest

# Names of parameters that are numbers of ranks.
_RANKS = ("world_size", "num_ranks", "world", "ranks")
# At each change, beside 1: parts of different sizes. If it is not there, the largest number.
_AT_EACH_CHANGE = 3
_SLOW_TO_LOAD = ("accelerate", "hypothesis", "lightning", "peft", "pytest", "transformers")


@pytest.hookimpl(tryfirst=True)  # before "-m" chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests as nightly that run with other parameters at each change."""
    _mark_other_ranks(items)
    _mark_other_samples(items)
    _preload()


def _mark_other_ranks(items: list[pytest.Item]) -> None:
    numbers = {id(item): _num_ranks(item) for item in items}
    known: dict[str, set[int]] = {}
    for item in items:
        if number := numbers[id(item)]:
            known.setdefault(_function(item), set()).add(number)
    for item in items:
        if number := numbers[id(item)]:
            there = known[_function(item)]
            kept = _AT_EACH_CHANGE if _AT_EACH_CHANGE in there else max(there)
            if number not in (1, kept):
                item.add_marker(pytest.mark.nightly)


def _mark_other_samples(items: list[pytest.Item]) -> None:
    """Of a test marked ``sampled(n)``, n sets of parameters run at each change, evenly spread."""
    samples: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("sampled") and not item.get_closest_marker("nightly"):
            samples.setdefault(_function(item), []).append(item)
    for sets in samples.values():
        marker = sets[0].get_closest_marker("sampled")
        assert marker is not None, "asked above"
        (wanted,) = marker.args
        kept = {number * len(sets) // wanted for number in range(wanted)}
        for number, item in enumerate(sets):
            if number not in kept:
                item.add_marker(pytest.mark.nightly)


def _num_ranks(item: pytest.Item) -> int | None:
    parameters = (
        item.callspec.params
        if isinstance(item, pytest.Function) and hasattr(item, "callspec")
        else {}
    )
    return next((parameters[name] for name in _RANKS if type(parameters.get(name)) is int), None)


def _function(item: pytest.Item) -> str:
    return item.nodeid.partition("[")[0]


def _preload() -> None:
    """Let ranks be forked with what these tests have loaded: each would take seconds for it."""
    from vescale_fsdp.testing import pool

    loaded = [name for name in sys.modules if name.partition(".")[0] in _SLOW_TO_LOAD]
    pool.PRELOADED += [name for name in loaded if name not in pool.PRELOADED]


def pytest_collection_finish() -> None:
    """Let later collections of garbage skip what is loaded: each would take half a second."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """Else Triton complains at the end that its objects are not freed."""
    gc.unfreeze()


@pytest.fixture
def each_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small units share no messages: for tests of what is sent for each."""
    monkeypatch.setenv("VESCALE_FSDP_SMALL_BYTES", "0")
