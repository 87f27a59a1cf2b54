"""The benchmark for one GPU: that it runs, on a CPU, and that it says so where there is no GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def run_benchmark(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu_single", *arguments],
        cwd=ROOT,
        # On a GPU small units are not copied into messages, as they are on a CPU.
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "VESCALE_FSDP_SMALL_BYTES": "0",
        },
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )


def test_without_a_gpu_it_says_so_and_exits_with_2() -> None:
    done = run_benchmark()
    assert done.returncode == 2
    assert "needs a CUDA device" in done.stdout
    assert "Nothing was measured" in " ".join(done.stdout.split())


@pytest.mark.nightly
@pytest.mark.timeout(180)
def test_on_a_cpu_it_runs_and_judges_neither_speed_nor_memory(tmp_path: Path) -> None:
    size = ["--models", "moe-tiny", "--worlds", "1", "64", "--rounds", "1", "--steps", "1"]
    done = run_benchmark("--device", "cpu", *size, "--json", str(tmp_path / "found.json"))
    assert done.returncode == 0, done.stdout + done.stderr
    kept = json.loads((tmp_path / "found.json").read_text())
    assert kept["circumstances"]["command"].startswith("python -m benchmarks.gpu_single --device")
    found = kept["readings"]
    assert list(found) == [
        "moe-tiny, 1, vescale", "moe-tiny, 1, fsdp2", "moe-tiny, 64, vescale", "moe-tiny, 64, fsdp2"
    ]  # fmt: skip
    ours_alone, theirs_alone, ours, theirs = found.values()
    assert ours_alone["losses"] == pytest.approx(theirs_alone["losses"], abs=1e-3)
    assert ours["is_in_place"]
    assert not theirs["is_in_place"]
    assert ours["copies_out"] == 0 < theirs["copies_out"]
    assert ours["copies"] < theirs["copies"]
    lines = [line for line in done.stdout.splitlines() if ", world " in line]
    assert [line[:4] for line in lines] == ["----", "----", "----", "----", "----", "PASS"]


def test_verdicts_compare_with_the_targets() -> None:
    sys.path.insert(0, str(ROOT))
    try:
        from benchmarks.gpu_single import Measured, is_copy, verdicts
    finally:
        sys.path.remove(str(ROOT))
    ours = Measured("vescale", step_s=[1.0, 1.0], peak_reserved=84, is_in_place=True)
    theirs = Measured("fsdp2", step_s=[1.06, 1.06], peak_reserved=100)
    judged = verdicts("gpt-tiny", 64, ours, theirs)
    assert [verdict.holds for verdict in judged] == [True, True, True]
    # The same speed is too little for the mixture-of-experts, whose target is 1.11.
    ours.peak_reserved = 85
    judged = verdicts("moe-tiny", 64, ours, theirs)
    assert [verdict.holds for verdict in judged] == [False, False, True]
    assert str(judged[0]) == "MISS  moe-tiny, world 64, speed at least 1.11 of FSDP2's: 1.060"
    assert is_copy("void at::native::split_with_sizes_copy_out_contiguous_no_cast_kernel")
    assert is_copy("Memcpy DtoD (Device -> Device)")
    assert not is_copy("ampere_bf16_s16816gemm_bf16_128x128_ldg8_f2f_stages_32x5_tn")
