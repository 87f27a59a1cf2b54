"""Elastic training with Lightning and Accelerate under torchrun: a rank is killed.

The losses are those of plain PyTorch in one process, because all take the same samples.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from integration_tests.torchrun import run_torchrun

from .test_elastic import lines, undisturbed

SCRIPT = Path(__file__).resolve().parent / "elastic_adapters_run.py"
STEPS, EVERY = 14, 2
PRELOAD = {
    "lightning": ["lightning.pytorch", "vescale_fsdp_lightning", "vescale_fsdp_elastic"],
    "accelerate": ["vescale_fsdp_accelerate", "vescale_fsdp_elastic"],
}


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    return undisturbed(tmp_path_factory.mktemp("plain"), STEPS)


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    "kind", ["lightning", pytest.param("accelerate", marks=pytest.mark.nightly)]
)
def test_a_rank_is_killed(tmp_path: Path, expected: dict[int, float], kind: str) -> None:
    run, memory = tmp_path / "run", tmp_path / "memory"
    code = run_torchrun(
        *("--standalone", "--max-restarts", "2", "--nproc-per-node", "2"),
        *(SCRIPT, kind, run, STEPS),
        log=tmp_path / "log",
        timeout_s=150,
        environ={"VESCALE_FSDP_MEMORY_DIR": str(memory), "FAULTS": "1 9 1 SIGKILL"},
        preload=PRELOAD[kind],
    )
    assert code == 0, (tmp_path / "log").read_text()
    found = lines(run)
    assert {line["step"] for line in found} == set(range(STEPS))
    for line in found:
        assert line["loss"] == pytest.approx(expected[line["step"]], abs=1e-6), line
    again = [line for line in found if line["attempt"] > 1]
    assert {line["source"] for line in again} == {"memory"}
    assert 9 - 2 * EVERY <= min(line["step"] for line in again) <= 9
    assert not list(memory.glob("run-*")), "it is deleted at the end"
