"""Checkpoints in DeepSpeed's form, made by hand: what is refused, and that no code runs.

Those of real runs: integration_tests/from_deepspeed.
"""

from __future__ import annotations

import os
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch

from vescale_fsdp import (
    CheckpointCorruptError,
    CheckpointIncompleteError,
    CheckpointMismatchError,
    checkpoint,
)

WEIGHT, BIAS = torch.arange(6.0).view(2, 3), torch.tensor([7.0, 8.0])


class Fragment:
    """As DeepSpeed's fragment_address: of a class that is not known to the reader."""

    def __init__(self, start: int, numel: int) -> None:
        self.start, self.numel = start, numel


def optimizer_states(rank: int, *, with_maps: bool) -> dict[str, Any]:
    flat = torch.cat([WEIGHT.view(-1), BIAS])
    mine = flat[4 * rank : 4 * rank + 4].clone()
    maps = [{"w": Fragment(0, 4)}, {"w": Fragment(0, 2), "b": Fragment(2, 2)}]
    state = {"step": torch.tensor(5.0), "exp_avg": mine + 10, "exp_avg_sq": mine + 20}
    found = {
        "base_optimizer_state": {
            "state": {0: state},
            "param_groups": [{"lr": 0.5, "betas": (0.9, 0.99), "params": [0], "odd": object}],
        },
        "single_partition_of_fp32_groups": [mine],
        "partition_count": [2],
        "zero_stage": Fragment(1, 1),
    }
    if with_maps:
        found["param_slice_mappings"] = [maps[rank]]
    return {"optimizer_state_dict": found}


def write(folder: Path, *, with_maps: bool = True, **more: Any) -> Path:
    """ZeRO-1 of two ranks: ``w`` is on both, ``b`` on the second."""
    folder.mkdir()
    shapes = OrderedDict(w=torch.Size([2, 3]), b=torch.Size([2]))
    model = {
        "module": OrderedDict(w=WEIGHT.bfloat16(), b=BIAS.bfloat16(), mask=torch.ones(2)),
        "param_shapes": [shapes],
        "shared_params": {},
        "global_steps": 5,
        "lr_scheduler": {"last_epoch": 5},
        "note": "text",
        "secret": Fragment(0, 0),
        **more,
    }
    torch.save(model, folder / "mp_rank_00_model_states.pt")
    for rank in range(2):
        name = f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        torch.save(optimizer_states(rank, with_maps=with_maps), folder / name)
    return folder


@pytest.mark.parametrize("with_maps", [True, False])
def test_parameters_are_put_together_from_the_ranks(with_maps: bool, tmp_path: Path) -> None:
    folder = write(tmp_path / "global_step5", with_maps=with_maps)
    (tmp_path / "latest").write_text("global_step5\n")
    for path in (folder, tmp_path):
        found = checkpoint.read(path)
        assert torch.equal(found["model"]["w"], WEIGHT)
        assert torch.equal(found["model"]["b"], BIAS)
        assert torch.equal(found["model"]["mask"], torch.ones(2))
        states = found["optimizer.0"]["state"]
        assert torch.equal(states["w"]["exp_avg"], WEIGHT + 10)
        assert torch.equal(states["b"]["exp_avg_sq"], BIAS + 20)
        assert states["b"]["step"].item() == 5
        (group,) = found["optimizer.0"]["param_groups"]
        assert group == {"params": ["w", "b"], "lr": 0.5, "betas": (0.9, 0.99)}
        assert found["extra"] == {"note": "text", "lr_scheduler": {"last_epoch": 5}}
    checkpoint.convert(tmp_path, tmp_path / "ours", to="vescale")
    assert torch.equal(checkpoint.read(tmp_path / "ours")["model"]["w"], WEIGHT)
    assert checkpoint.read_extra(tmp_path / "ours")["note"] == "text"


class Evil:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_no_code_of_a_file_runs(tmp_path: Path) -> None:
    folder = write(tmp_path / "tag", evil=Evil(tmp_path / "made"))
    assert "evil" not in checkpoint.read(folder)["extra"]
    assert not (tmp_path / "made").exists()


def test_a_torch_script_archive_is_refused(tmp_path: Path) -> None:
    folder = write(tmp_path / "tag")
    with zipfile.ZipFile(folder / "mp_rank_00_model_states.pt", "a") as archive:
        archive.writestr("archive/constants.pkl", b"")  # by which torch.load tells them apart
    with pytest.raises(CheckpointCorruptError, match="TorchScript archive, which has code"):
        checkpoint.read(folder)


def test_a_file_that_is_missing_or_damaged_is_named(tmp_path: Path) -> None:
    folder = write(tmp_path / "tag")
    file = folder / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    data = file.read_bytes()
    file.write_bytes(data[: len(data) // 2])
    with pytest.raises(CheckpointCorruptError, match=r"zero_pp_rank_1_.* cannot be read"):
        checkpoint.read(folder)
    file.unlink()
    with pytest.raises(CheckpointIncompleteError, match=r"saved by 2 ranks, .* files of 1"):
        checkpoint.read(folder)
    (folder / "mp_rank_00_model_states.pt").unlink()
    with pytest.raises(CheckpointIncompleteError, match="has no mp_rank_00_model_states"):
        checkpoint.read(folder)


def test_parameters_that_are_not_whole_are_refused(tmp_path: Path) -> None:
    folder = write(tmp_path / "tag", with_maps=False)
    states = optimizer_states(1, with_maps=False)
    states["optimizer_state_dict"]["single_partition_of_fp32_groups"] = [torch.ones(3)]
    torch.save(states, folder / "zero_pp_rank_1_mp_rank_00_optim_states.pt")
    with pytest.raises(CheckpointCorruptError, match=r"has 1 elements of model\.b, expected 2"):
        checkpoint.read(folder)


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("mp_rank_01_model_states.pt", "tensor parallelism"),
        ("layer_00-model_states.pt", "pipeline parallelism"),
        ("layer_0_expert_1_mp_rank_00_model_states.pt", "experts in files"),
    ],
)
def test_other_parallelism_is_refused(name: str, what: str, tmp_path: Path) -> None:
    folder = write(tmp_path / "tag")
    torch.save({}, folder / name)
    with pytest.raises(CheckpointMismatchError, match=what):
        checkpoint.read(folder)


def test_two_runs_in_one_folder_and_other_contents_are_refused(tmp_path: Path) -> None:
    folder = write(tmp_path / "tag")
    torch.save({}, folder / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt")
    with pytest.raises(CheckpointCorruptError, match="two runs have saved to it"):
        checkpoint.read(folder)
    (folder / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt").unlink()
    torch.save({"module": 3}, folder / "mp_rank_00_model_states.pt")
    with pytest.raises(CheckpointCorruptError, match="does not have DeepSpeed's format"):
        checkpoint.read(folder)
    (tmp_path / "latest").write_text("../tag")
    with pytest.raises(CheckpointIncompleteError, match="nor one of DeepSpeed"):
        checkpoint.read(tmp_path)
