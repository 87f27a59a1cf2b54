"""What the files of questions have in common: the start of ranks, for all cases of a file."""

from __future__ import annotations

import pytest

from .asking import Outcomes


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest) -> Outcomes:
    """The answers to the cases of a file, by its ``answers``."""
    return Outcomes(request, request.module.CASES, request.module.answers)
