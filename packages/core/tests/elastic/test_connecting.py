"""A rank that cannot be connected to the others ends in time."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from vescale_fsdp.testing import free_port

SCRIPT = """
from vescale_fsdp import elastic
elastic.init_process_group("gloo", connect_timeout_s=0.5)
"""


@pytest.mark.timeout(100)
def test_a_rank_ends_if_the_host_of_rank_0_is_gone() -> None:
    environ = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    environ |= {"MASTER_PORT": str(free_port()), "TORCHELASTIC_RUN_ID": "job"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert done.returncode == 1
    assert "rank 1: not connected to all of 2 ranks within 0.5 s" in done.stderr
