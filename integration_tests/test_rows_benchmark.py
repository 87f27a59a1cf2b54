"""The benchmark of the rows of ZeRO's table: what a row holds, what is judged, and that it runs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
try:
    from benchmarks import rows
    from benchmarks.compare.grid import Cell
    from benchmarks.compare.measure import Result, Settings
    from benchmarks.compare.record import Record, load_all
    from benchmarks.rows import ROWS
finally:
    sys.path.remove(str(ROOT))

CELL = Cell("norms-1500", 2, "loopback", "fp32")
MODEL_BYTES = 96_000 * 4


def made(**engines: Result) -> Record:
    named = {name.replace("_", "-"): each for name, each in engines.items()}
    return Record(CELL, Settings(2, 1, 1.0), "", 16, [], named, {})


def test_a_row_holds_copies_of_the_model() -> None:
    # Parameters, gradients and two states, of four ranks.
    copies = {name: float(row.copies(4)) for name, row in ROWS.items()}
    assert copies == {
        "ddp": 4.0, "vescale-ddp": 4.0,
        "vescale-zero1": 2.5, "deepspeed-1": 2.5,
        "vescale-zero2": 1.75, "deepspeed-2": 1.75,
        "vescale": 1.0,
    }  # fmt: skip


def test_memory_is_judged_with_the_activations_of_ddp() -> None:
    activations = 100_000
    record = made(
        ddp=Result(tensor_bytes=4 * MODEL_BYTES + activations),
        vescale_zero1=Result(tensor_bytes=3 * MODEL_BYTES + activations),
        vescale_zero2=Result(tensor_bytes=3 * MODEL_BYTES + activations),
    )
    found = {each.target.split(":")[0]: each for each in rows.verdicts({CELL: record})}
    assert found["ours, zero1"].is_met  # holds 1 + 1 + 2 / 2
    assert not found["ours, zero2"].is_met  # 1 + 1 / 2 + 2 / 2


def test_speed_is_the_median_ratio_within_a_round() -> None:
    record = made(ddp=Result(step_s=[1.0, 2.0, 3.0]), vescale_zero2=Result(step_s=[2.0, 2.0, 2.0]))
    (verdict,) = rows.verdicts({CELL: record})
    assert verdict.found == "1.00 (0.75 to 1.25)"
    assert verdict.is_met


@pytest.mark.nightly  # 80 s
@pytest.mark.timeout(400)
def test_each_row_runs_and_sends_what_its_plan_says(tmp_path: Path) -> None:
    """(`make_engine` compares the bytes with the plan's.)"""
    engines = ["ddp", "vescale-ddp", "vescale-zero1", "vescale-zero2", "vescale"]
    size = ["--models", "norms-1500", "--ranks", "2", "--networks", "loopback", "--rounds", "1"]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.rows", *size, "--out", tmp_path, "--engines", *engines],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (record,) = load_all(tmp_path).values()
    found = record.engines
    assert {name: each.left_out for name, each in found.items()} == dict.fromkeys(engines)
    # An all-reduce of the model; a gather and a reduction; two gathers of all units but the root,
    # which has no parameters here, and a reduction. Flags are not counted.
    assert found["ddp"].expected_bytes == found["vescale-ddp"].expected_bytes == MODEL_BYTES
    gaps = 3 * 50 * 16
    for name in ("vescale-zero1", "vescale-zero2"):
        assert MODEL_BYTES <= found[name].expected_bytes <= MODEL_BYTES + gaps
    assert 1.5 * MODEL_BYTES <= found["vescale"].expected_bytes <= 1.5 * MODEL_BYTES + gaps
    losses = {name: each.losses for name, each in found.items()}
    assert losses == dict.fromkeys(engines, losses["ddp"])
