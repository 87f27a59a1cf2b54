"""Fixtures of all tests."""

from __future__ import annotations

import pytest


@pytest.fixture
def each_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small units share no messages: for tests of what is sent for each."""
    monkeypatch.setenv("VESCALE_FSDP_SMALL_BYTES", "0")
