"""``examples/train_gpt.py`` under torchrun, killed and signalled: it ends as if nothing had been.

The model and the text are small: nearly all of the time is that of starting processes.
"""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from integration_tests.torchrun import run_torchrun

from vescale_fsdp import checkpoint
from vescale_fsdp.checkpoint.files import DataReader

SCRIPT = Path(__file__).resolve().parent / "train_with_faults.py"
OPTIONS = ["--layers", "2", "--width", "24", "--max-steps", "12", "--save-every", "3"]
FAULTS = (  # attempt, step, rank, what it does in that step
    "0 5 1 SIGKILL",  # the last checkpoint is of step 3
    "1 5 0 SIGTERM",  # rank 1 may have begun step 6 when it hears of it
    "2 7 all SIGTERM",
    "3 8 1 SIGTERM-to-torchrun",
)


@dataclass
class Run:
    code: int  # torchrun's
    output: str

    @property
    def resumed(self) -> list[int]:
        return [int(step) for step in re.findall(r"resumed from \S+/step-(\d+);", self.output)]

    @property
    def end(self) -> tuple[str, str]:
        """What was generated, and the digest."""
        found = re.search(r"(class Reader.*)\ndigest: ([0-9a-f]{16})\n", self.output, re.DOTALL)
        assert found, self.output
        return found[1], found[2]


def launch(out: Path, num_processes: int, *faults: str) -> Run:
    log = out.with_suffix(".log")
    code = run_torchrun(
        *("--standalone", "--max-restarts", "3", "--nproc-per-node", num_processes),
        *(SCRIPT, *OPTIONS, "--out", out),
        log=log,
        timeout_s=200,
        environ={"FAULTS": "\n".join(faults)},
    )
    return Run(code, log.read_text())


def weights_in(out: Path) -> dict[str, torch.Tensor]:
    """Of the last checkpoint, by name."""
    path = out / "step-12"
    manifest = checkpoint.verify(path)
    weights = {}
    with DataReader(path, manifest.files) as reader:
        for name, entry in manifest.tensors.items():
            if name.startswith("model."):
                whole = weights[name] = torch.empty(entry.shape)
                for chunk in entry.chunks:
                    box = whole
                    for dim, (start, size) in enumerate(
                        zip(chunk.offsets, chunk.sizes, strict=True)
                    ):
                        box = box.narrow(dim, start, size)
                    data = reader.read(chunk.span, name).view(torch.float32)
                    box.copy_(data.view(chunk.sizes))
    return weights


@pytest.fixture(scope="module")
def quiet(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Run]:
    """A run that nobody disturbs, and its folder."""
    out = tmp_path_factory.mktemp("restarts") / "quiet"
    return out, launch(out, 2)


@pytest.fixture(scope="module")
def torn(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Run]:
    """One that has ended at the fourth fault."""
    out = tmp_path_factory.mktemp("restarts") / "torn"
    return out, launch(out, 2, *FAULTS)


@pytest.mark.timeout(450)
def test_after_each_fault_it_goes_on_from_the_last_step(torn: tuple[Path, Run]) -> None:
    out, run = torn
    for fault in FAULTS:
        _, step, rank, action = fault.split()
        fired = f"rank {'[01]' if rank == 'all' else rank} in step {step}: {action}\n"
        assert re.search(fired, run.output), run.output
    assert run.code == 1, run.output  # torchrun's own after a signal
    assert "digest" not in run.output
    assert run.resumed in ([3, 5, 7], [3, 6, 7])
    last = checkpoint.latest(out)
    assert last is not None
    assert last.name in ("step-8", "step-9")


@pytest.mark.nightly  # 60 s
@pytest.mark.timeout(450)
def test_a_torn_run_ends_as_a_quiet_one(
    quiet: tuple[Path, Run], torn: tuple[Path, Run], tmp_path: Path
) -> None:
    """The same weights, to the bit, and the same random numbers when it generates."""
    assert quiet[1].code == 0, quiet[1].output
    assert quiet[1].resumed == []
    run = launch(Path(shutil.copytree(torn[0], tmp_path / "torn")), 2)
    assert run.code == 0, run.output
    assert run.resumed in ([8], [9])
    assert run.end == quiet[1].end


@pytest.mark.nightly  # 40 s
@pytest.mark.timeout(450)
def test_another_number_of_processes_takes_it_up(
    quiet: tuple[Path, Run], torn: tuple[Path, Run], tmp_path: Path
) -> None:
    """With the same batches; the sums are in another order."""
    other = tmp_path / "other"
    run = launch(Path(shutil.copytree(torn[0], other)), 1)
    assert run.code == 0, run.output
    assert run.resumed in ([8], [9])
    found, expected = weights_in(other), weights_in(quiet[0])
    assert found.keys() == expected.keys()
    differences = [float((found[name] - expected[name]).abs().max()) for name in expected]
    assert 0 < max(differences) < 1e-5
