"""Waits of a lane."""

from __future__ import annotations

import datetime
from pathlib import Path

import pytest

from vescale_fsdp_elastic.hsdp.lanes import Lane, LaneError


class Work:
    """It ends just after the first wait has timed out, with this error or without one."""

    def __init__(self, error: str) -> None:
        self._error, self._waits = error, 0

    def wait(self, limit: datetime.timedelta) -> None:
        self._waits += 1
        if self._waits == 1:
            raise RuntimeError("Operation timed out!")
        if self._error:
            raise RuntimeError(self._error)

    def is_completed(self) -> bool:
        return True


def test_work_that_ends_just_after_a_wait_has_its_own_result(tmp_path: Path) -> None:
    lane = Lane(tmp_path / "lane", 0, 1, 5.0)
    lane._run(lambda: Work(""), lambda: False)
    with pytest.raises(LaneError, match="the other has died"):
        lane._run(lambda: Work("the other has died"), lambda: False)
