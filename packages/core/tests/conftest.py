"""Fixtures of all tests, and which numbers of ranks run at each change."""

from __future__ import annotations

import pytest

# Names of parameters that are numbers of ranks.
_RANKS = ("world_size", "num_ranks", "world", "ranks")
# At each change, beside 1: parts of different sizes. If it is not there, the largest number.
_AT_EACH_CHANGE = 3


@pytest.hookimpl(tryfirst=True)  # before "-m" chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests as nightly that run with other numbers of ranks at each change."""
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


def _num_ranks(item: pytest.Item) -> int | None:
    parameters = (
        item.callspec.params
        if isinstance(item, pytest.Function) and hasattr(item, "callspec")
        else {}
    )
    return next((parameters[name] for name in _RANKS if type(parameters.get(name)) is int), None)


def _function(item: pytest.Item) -> str:
    return item.nodeid.partition("[")[0]


@pytest.fixture
def each_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small units share no messages: for tests of what is sent for each."""
    monkeypatch.setenv("VESCALE_FSDP_SMALL_BYTES", "0")
