"""Checkpoints in DeepSpeed's form, made by hand: what is refused, and that no code runs.

Those of real runs: integration_tests/from_deepspeed.
"""

from __future__ import annotations

import io
import os
import pickle
import struct
import types
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any
from unittest import mock

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
        top = archive.namelist()[0].partition("/")[0]
        archive.writestr(f"{top}/constants.pkl", b"")  # by which torch.load tells them apart
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


def hidden_torch_script() -> bytes:
    """A zip with two directories: torch reads the first, and Python's ``zipfile`` the second."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("archive/version", "3\n")
        archive.writestr("archive/constants.pkl", b"\x80\x02).")
    *_, number, size, offset, _ = struct.unpack("<4s4H2LH", buffer.getvalue()[-22:])
    name = b"archive/data.pkl"
    comment = b" " * size  # to be no shorter than the first
    fields = (b"PK\x01\x02", 20, 20, 0, 0, 0, 33, 0, 0, 0, len(name), 0, len(comment), 0, 0, 0, 0)
    second = struct.pack("<4s6H3L5H2L", *fields) + name + comment
    end = struct.pack("<4s4H2LH", b"PK\x05\x06", 0, 0, number, number, len(second), offset, 0)
    return buffer.getvalue()[:-22] + second + end


def test_a_torch_script_archive_that_python_does_not_see_is_refused(tmp_path: Path) -> None:
    folder = write(tmp_path / "tag")
    file = folder / "mp_rank_00_model_states.pt"
    file.write_bytes(hidden_torch_script())
    with zipfile.ZipFile(file) as archive:
        assert archive.namelist() == ["archive/data.pkl"]
    with (
        mock.patch("torch.jit.load", side_effect=AssertionError("code would run")) as load,
        pytest.raises(CheckpointCorruptError, match="TorchScript archive, which has code"),
    ):
        checkpoint.read(folder)
    assert not load.called


class Writes:
    """A pickle that sets an attribute of a function of torch."""

    def __reduce__(self) -> Any:
        return torch._utils._rebuild_tensor_v2, (), (None, {"__defaults__": (1, 2, 3)})


class Functions(pickle._Pickler):
    """Writes the function itself, and then BUILD, where ``__reduce__`` would call it."""

    def save(self, obj: Any, *args: Any, **options: Any) -> None:
        if isinstance(obj, Writes):
            function, _, state = obj.__reduce__()
            super().save(function)
            super().save(state)
            self.write(pickle.BUILD)
        else:
            super().save(obj, *args, **options)


def test_a_file_does_not_change_functions_of_torch(tmp_path: Path) -> None:
    folder = write(tmp_path / "tag")
    before = torch._utils._rebuild_tensor_v2.__defaults__
    module = types.SimpleNamespace(Pickler=Functions, __name__="pickle")
    try:
        torch.save({"evil": Writes()}, folder / "mp_rank_00_model_states.pt", pickle_module=module)
        with pytest.raises(CheckpointCorruptError):
            checkpoint.read(folder)
        assert torch._utils._rebuild_tensor_v2.__defaults__ == before
    finally:
        torch._utils._rebuild_tensor_v2.__defaults__ = before


def test_a_fifo_is_refused(tmp_path: Path) -> None:
    folder = write(tmp_path / "tag")
    (folder / "mp_rank_00_model_states.pt").unlink()
    os.mkfifo(folder / "mp_rank_00_model_states.pt")
    with pytest.raises(CheckpointCorruptError, match="mp_rank_00_model_states"):
        checkpoint.read(folder)


def test_ranks_of_two_saves_are_refused(tmp_path: Path) -> None:
    """A save under the tag of an earlier one was killed after one rank."""
    folder = write(tmp_path / "tag")
    states = optimizer_states(1, with_maps=True)
    states["optimizer_state_dict"]["base_optimizer_state"]["state"][0]["step"] += 1
    torch.save(states, folder / "zero_pp_rank_1_mp_rank_00_optim_states.pt")
    with pytest.raises(CheckpointCorruptError, match=r"two saves: .* 5\.0 on rank 0, and at 6\.0"):
        checkpoint.read(folder)


def test_states_that_only_some_ranks_have_are_refused(tmp_path: Path) -> None:
    folder = write(tmp_path / "tag")
    states = optimizer_states(0, with_maps=True)
    states["optimizer_state_dict"]["base_optimizer_state"]["state"] = {}
    torch.save(states, folder / "zero_pp_rank_0_mp_rank_00_optim_states.pt")
    with pytest.raises(CheckpointCorruptError, match="rank 0 or rank 1 lacks"):
        checkpoint.read(folder)


# Stage 3


def write_stage_3(folder: Path, world_size: int = 4, **more: Any) -> Path:
    """One parameter group in two sub-groups, a second group, and a frozen parameter of 5."""
    folder.mkdir()
    subgroups = [OrderedDict(w=WEIGHT), OrderedDict(b=BIAS), OrderedDict(c=BIAS + 1)]
    frozen = torch.arange(100.0, 105.0)

    def part_of(whole: torch.Tensor, rank: int) -> torch.Tensor:
        part = -(-whole.numel() // world_size)
        padded = torch.full((part * world_size,), -1.0)
        padded[: whole.numel()] = whole.reshape(-1)
        return padded[rank * part : (rank + 1) * part].clone()

    for rank in range(world_size):
        flats = [torch.cat([part_of(each, rank) for each in group.values()]) for group in subgroups]
        states = {i: {"step": torch.tensor(5.0), "exp_avg": f + 10} for i, f in enumerate(flats)}
        options = [{"lr": 0.5, "params": [0, 1]}, {"lr": 0.25, "params": [2]}]
        optimizer = {"state": states, "param_groups": options}
        found = {
            "fp32_flat_groups": flats,
            "optimizer_state_dict": optimizer,
            "partition_count": world_size,
        }
        torch.save(
            {"optimizer_state_dict": found},
            folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt",
        )
        empty = torch.zeros(0, dtype=torch.bfloat16)
        model = {
            "module": OrderedDict(w=empty, b=empty, c=empty, frozen=empty),
            "param_shapes": [{k: v.shape for k, v in group.items()} for group in subgroups],
            "frozen_param_shapes": {"frozen": frozen.shape},
            "frozen_param_fragments": {"frozen": part_of(frozen, rank)},
            "shared_params": {},
            **more,
        }
        torch.save(model, folder / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
    return folder


def test_stage_3_with_sub_groups_keeps_the_options_of_each_group(tmp_path: Path) -> None:
    found = checkpoint.read(write_stage_3(tmp_path / "tag"))
    assert torch.equal(found["model"]["w"], WEIGHT)
    assert torch.equal(found["model"]["c"], BIAS + 1)
    assert torch.equal(found["model"]["frozen"], torch.arange(100.0, 105.0))
    assert torch.equal(found["optimizer.0"]["state"]["c"]["exp_avg"], BIAS + 11)
    assert found["optimizer.0"]["param_groups"] == [
        {"params": ["w", "b"], "lr": 0.5},
        {"params": ["c"], "lr": 0.25},
    ]


def test_frozen_parameters_need_the_file_of_each_rank(tmp_path: Path) -> None:
    """The padding of the last ranks would stand in for the elements of a missing one."""
    folder = write_stage_3(tmp_path / "tag")
    (folder / "zero_pp_rank_1_mp_rank_00_model_states.pt").unlink()
    with pytest.raises(CheckpointIncompleteError, match=r"no zero_pp_rank_1_.*model_states"):
        checkpoint.read(folder)


@pytest.mark.parametrize("write_stage", [write, write_stage_3])
def test_elements_of_no_parameter_are_refused(write_stage: Any, tmp_path: Path) -> None:
    """The list of parameters is not that of the flat tensors, so their places are not known."""
    folder = write_stage(tmp_path / "tag", **({"with_maps": False} if write_stage is write else {}))
    for path in folder.glob("*model_states.pt"):
        states = torch.load(path, weights_only=False)
        last = states["param_shapes"][-1]
        del last[next(iter(last))]
        torch.save(states, path)
    with pytest.raises(CheckpointCorruptError, match="elements of no parameter"):
        checkpoint.read(folder)


# Universal


def write_universal(folder: Path) -> Path:
    folder = write(folder)
    for path in folder.glob("*optim_states.pt"):
        path.unlink()
    for name, value in (("w", WEIGHT), ("b", BIAS)):
        (folder / "zero" / name).mkdir(parents=True)
        torch.save({"param": value}, folder / "zero" / name / "fp32.pt")
        torch.save({"param": value + 10}, folder / "zero" / name / "exp_avg.pt")
    common = {"param_groups": [{"lr": 0.5, "params": [0]}]}
    torch.save(common, folder / "zero" / "optimizer_state.pt")
    return folder


@pytest.mark.parametrize("missing", ["b/fp32.pt", "b/exp_avg.pt", "w/exp_avg.pt", "b"])
def test_files_of_a_universal_checkpoint_are_not_made_up(missing: str, tmp_path: Path) -> None:
    folder = write_universal(tmp_path / "tag")
    found = checkpoint.read(folder)
    assert torch.equal(found["model"]["b"], BIAS)
    assert torch.equal(found["optimizer.0"]["state"]["w"]["exp_avg"], WEIGHT + 10)
    path = folder / "zero" / missing
    for each in [*path.glob("*.pt"), path]:
        each.rmdir() if each.is_dir() else each.unlink()
    with pytest.raises(CheckpointIncompleteError, match=f"zero/{missing[:2].strip('/')}"):
        checkpoint.read(folder)


def test_names_do_not_lead_out_of_the_folder(tmp_path: Path) -> None:
    folder = write_universal(tmp_path / "tag")
    (tmp_path / "other").mkdir()
    torch.save({"param": BIAS}, tmp_path / "other" / "fp32.pt")
    states = torch.load(folder / "mp_rank_00_model_states.pt", weights_only=False)
    states["param_shapes"][0]["../../other"] = BIAS.shape
    torch.save(states, folder / "mp_rank_00_model_states.pt")
    with pytest.raises(CheckpointCorruptError, match="other"):
        checkpoint.read(folder)
