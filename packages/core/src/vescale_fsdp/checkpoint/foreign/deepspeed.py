"""Reads DeepSpeed's checkpoints without DeepSpeed: of ZeRO stages 1, 2 and 3, and universal ones.

Weights are read from the optimizer's fp32 copies. The files are pickles (`pickles`).

The files ``zero_pp_rank_R_mp_rank_00_optim_states.pt`` have the elements of parameters like this::

    stages 1, 2   the parameters of a group one after the other, in equal partitions over the ranks:
                  a parameter is a fragment on each of some consecutive ranks
    stage 3       each rank has ceil(numel / ranks) elements of each parameter

A universal checkpoint has a folder for each parameter: ``zero/NAME/fp32.pt``, ``exp_avg.pt``, ...
"""

from __future__ import annotations

import math
import re
from itertools import accumulate, chain, pairwise
from pathlib import Path
from typing import Any

import torch

from vescale_fsdp.checkpoint import encoding
from vescale_fsdp.checkpoint.encoding import dtype_name
from vescale_fsdp.checkpoint.foreign.pickles import loaded
from vescale_fsdp.checkpoint.manifest import DTYPES, Chunk, Span, TensorEntry
from vescale_fsdp.errors import (
    CheckpointCorruptError,
    CheckpointIncompleteError,
    CheckpointMismatchError,
    CheckpointValueError,
    VeScaleError,
)

_LATEST, _MODEL, _ZERO = "latest", "mp_rank_00_model_states.pt", "zero"
_OPTIMIZER = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
# The keys of model states that DeepSpeed itself writes. Others are the user's ``client_state``.
_OWN = frozenset(
    {
        *("module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes"),
        *("shared_params", "frozen_param_fragments", "lr_scheduler", "data_sampler", "random_ltd"),
        *("sparse_tensor_module_names", "skipped_steps", "global_steps", "global_samples"),
        *("dp_world_size", "mp_world_size", "num_experts", "checkpoint_parallel_dimensions"),
        *("ds_config", "ds_version", "universal_checkpoint_info"),
    }
)
Fragments = list[torch.Tensor]  # flat, one after the other


def folder_of(path: Path) -> Path | None:
    """The folder of a DeepSpeed checkpoint: ``path``, or the folder that its ``latest`` names.

    None if it is not a DeepSpeed checkpoint.
    """
    if not path.is_dir():
        return None
    if (path / _ZERO).is_dir() or any(_OPTIMIZER.fullmatch(each.name) for each in path.iterdir()):
        return path
    try:
        tag = (path / _LATEST).read_text().strip()
    except (OSError, UnicodeDecodeError):
        return None
    inner = path / tag
    is_inside = tag not in ("", ".", "..") and "/" not in tag and inner.is_dir()
    return folder_of(inner) if is_inside and inner != path else None


class ZeroCheckpoint:
    """An open checkpoint; see `sources.Source`.

    Memory: files are mapped. Their bytes are read when a tensor is read.

    Raises:
        CheckpointIncompleteError: a file of a rank is missing.
        CheckpointCorruptError: a file is not in this format, or parameters are not whole.
        CheckpointMismatchError: it was saved with tensor or pipeline parallelism, experts or
            ``elastic_checkpoint``.
    """

    format = "deepspeed"

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._fragments: dict[str, Fragments] = {}
        self.tensors: dict[str, TensorEntry] = {}
        self.texts: dict[str, dict[str, Any]] = {"model": {}, "extra": {}}
        self._refuse_others()
        self._num_ranks: int | None = None  # that have optimizer states
        model_file = next(iter(sorted(folder.glob("*mp_rank_00_model_states.pt"))), None)
        if model_file is None:
            raise CheckpointIncompleteError(f"{folder} has no {_MODEL}")
        try:
            states = loaded(model_file)
            self._groups = [dict(group) for group in states["param_shapes"]]
            if (folder / _ZERO).is_dir():
                self._take_universal()
            else:
                self._take_zero()
            self._take_module(states)
            self._take_extra(states)
        except VeScaleError:
            raise
        except (
            ArithmeticError,
            AttributeError,
            LookupError,
            RuntimeError,
            TypeError,
            ValueError,
        ) as error:
            raise CheckpointCorruptError(
                f"{folder} is refused: it does not have DeepSpeed's format ({error!r})"
            ) from error
        step = states.get("global_steps")
        self.step: int | None = step if type(step) is int else None

    def read(self, name: str, chunk: Chunk) -> torch.Tensor:
        """Read some rows of a tensor."""
        entry = self.tensors[name]
        row = math.prod(entry.shape[1:])
        start = chunk.offsets[0] * row if chunk.offsets else 0
        stop = start + math.prod(chunk.sizes)
        found, at = [], 0
        for part in self._fragments[name]:
            first, last = max(start - at, 0), min(stop - at, part.numel())
            if first < last:
                found.append(part[first:last])
            at += part.numel()
        whole = torch.cat(found) if found else torch.empty(0, dtype=DTYPES[entry.dtype])
        return whole.view(chunk.sizes)

    # What is in the files

    def _refuse_others(self) -> None:
        names = [each.name for each in self._folder.iterdir()]
        for pattern, what in (
            (r".*mp_rank_0*[1-9]\d*_.*", "tensor parallelism (mp_rank_01)"),
            (r"layer_\d+-model.*", "pipeline parallelism (layer files)"),
            (r".*expert_\d+_.*", "experts in files of their own"),
        ):
            if any(re.fullmatch(pattern, name) for name in names):
                raise CheckpointMismatchError(
                    f"{self._folder} was saved with {what}, which is not supported; convert it "
                    "with DeepSpeed's own tools first"
                )

    def _take_zero(self) -> None:
        files: dict[int, Path] = {}
        for path in self._folder.iterdir():
            found = _OPTIMIZER.fullmatch(path.name)
            if found and int(found[1]) in files:
                raise CheckpointCorruptError(
                    f"{self._folder} has {path.name} and {files[int(found[1])].name}: two runs "
                    "have saved to it"
                )
            if found:
                files[int(found[1])] = path
        missing = sorted({*range(max(files, default=0) + 1)} - files.keys())
        if missing or not files:
            rank = missing[0] if missing else 0
            raise CheckpointIncompleteError(
                f"{self._folder} has no zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
            )
        ranks = [loaded(files[rank])["optimizer_state_dict"] for rank in range(len(files))]
        count = ranks[0]["partition_count"]
        count = max(count) if isinstance(count, (list, tuple)) else count
        if count != len(ranks):
            raise CheckpointIncompleteError(
                f"{self._folder} was saved by {count} ranks, and has the files of {len(ranks)}"
            )
        self._num_ranks = count
        if "fp32_flat_groups" in ranks[0]:
            self._take_stage_3(ranks)
        else:
            self._take_stages_1_and_2(ranks)

    def _take_stages_1_and_2(self, ranks: list[dict[str, Any]]) -> None:
        bases = [rank["base_optimizer_state"] for rank in ranks]
        if not isinstance(bases[0], dict):
            raise CheckpointMismatchError(
                f"{self._folder} was saved with elastic_checkpoint, which is not supported; load "
                "it in DeepSpeed and save it without"
            )
        self._check_one_save(bases)
        for number, shapes in enumerate(self._groups):
            masters = [rank["single_partition_of_fp32_groups"][number] for rank in ranks]
            states = [base["state"].get(number, {}) for base in bases]
            for name, places in self._places(ranks, number, shapes, masters).items():

                def fragments(flats: list[torch.Tensor], places: Any = places) -> Fragments:
                    each = zip(flats, places, strict=True)
                    return [flat[start : start + size] for flat, (start, size) in each if size]

                self._add(f"model.{name}", shapes[name], fragments(masters))
                for key, value in states[0].items():
                    flats = [state[key] for state in states]
                    self._add_state(name, key, shapes[name], value, lambda f=flats: fragments(f))
        self._take_options(bases[0]["param_groups"])

    def _check_one_save(self, optimizers: list[dict[str, Any]]) -> None:
        """A tag that is saved again, and killed, has files of two saves."""
        steps = _steps(optimizers[0])
        for rank, optimizer in enumerate(optimizers):
            if optimizer["state"].keys() != optimizers[0]["state"].keys():
                raise CheckpointCorruptError(
                    f"{self._folder} has states of an optimizer that rank 0 or rank {rank} lacks"
                )
            for key, step in _steps(optimizer).items():
                if steps.get(key) != step:
                    raise CheckpointCorruptError(
                        f"{self._folder} has files of two saves: {key} of the optimizer is at step "
                        f"{steps.get(key)} on rank 0, and at {step} on rank {rank}"
                    )

    def _places(
        self,
        ranks: list[dict[str, Any]],
        number: int,
        shapes: dict[str, Any],
        masters: list[torch.Tensor],
    ) -> dict[str, list[tuple[int, int]]]:
        """The start and size of each parameter of a group, in the partition of each rank."""
        if all("param_slice_mappings" in rank for rank in ranks):
            maps = [rank["param_slice_mappings"][number] for rank in ranks]
            return {
                name: [
                    (each[name].start, each[name].numel) if name in each else (0, 0)
                    for each in maps
                ]
                for name in shapes
            }
        starts = [0, *accumulate(flat.numel() for flat in masters)]  # of each rank
        used, align = sum(math.prod(shape) for shape in shapes.values()), 2 * len(masters)
        _check_used(-(-used // align) * align, -(-starts[-1] // align) * align)
        found, at = {}, 0
        for name, shape in shapes.items():
            stop = at + math.prod(shape)
            found[name] = [
                (max(at - first, 0), max(0, min(stop, last) - max(at, first)))
                for first, last in pairwise(starts)
            ]
            at = stop
        return found

    def _take_stage_3(self, ranks: list[dict[str, Any]]) -> None:
        inner = [rank["optimizer_state_dict"] for rank in ranks]
        self._check_one_save(inner)
        masters = [_joined(rank["fp32_flat_groups"]) for rank in ranks]
        sizes = [flat.numel() for flat in ranks[0]["fp32_flat_groups"]]
        keys = inner[0]["state"].get(0, {})
        states = {
            key: [_joined([each["state"][i][key] for i in range(len(sizes))]) for each in inner]
            for key, value in keys.items()
            if isinstance(value, torch.Tensor) and value.dim()
        }
        at = 0
        for shapes in self._groups:
            for name, shape in shapes.items():
                numel, part = math.prod(shape), -(-math.prod(shape) // len(ranks))

                def fragments(
                    flats: list[torch.Tensor], at: int = at, numel: int = numel, part: int = part
                ) -> Fragments:
                    lengths = [max(0, min(part, numel - rank * part)) for rank in range(len(flats))]
                    return [flat[at : at + n] for flat, n in zip(flats, lengths, strict=True) if n]

                self._add(f"model.{name}", shape, fragments(masters))
                for key, value in keys.items():
                    flats = states.get(key, [])
                    self._add_state(name, key, shape, value, lambda f=flats, g=fragments: g(f))
                at += part
        for flat in masters:
            _check_used(at, flat.numel())
        self._take_options(inner[0]["param_groups"])

    def _take_universal(self) -> None:
        for shapes in self._groups:
            kinds = {name: self._universal_states(name) for name in shapes}
            every = {kind for found in kinds.values() for kind in found}
            for name, shape in shapes.items():
                for kind in sorted({"fp32"} | every - {"step"}):
                    if kind not in kinds[name]:
                        raise CheckpointIncompleteError(
                            f"{self._folder} has no {_ZERO}/{name}/{kind}.pt"
                        )
                for path in kinds[name].values():
                    value = loaded(path)
                    value = value["param"] if isinstance(value, dict) else value
                    if path.stem == "fp32":
                        self._add(f"model.{name}", shape, [value.reshape(-1)])
                    else:
                        self._add_state(
                            name, path.stem, shape, value, lambda v=value: [v.reshape(-1)]
                        )
        common = loaded(self._folder / _ZERO / "optimizer_state.pt")
        inner = common.get("optimizer_state_dict", {}).get("state", {}).values()
        steps = [state["step"] for state in inner if "step" in state]  # of stage 3, in no folder
        for name, states in self.texts.get("optimizer.0", {"state": {}})["state"].items():
            if "step" not in states and steps:
                self._add_state(name, "step", (), steps[0], None)
        self._take_options(common["param_groups"])

    def _universal_states(self, name: str) -> dict[str, Path]:
        """The files of a parameter, by what they have."""
        if "/" in name or name in ("", ".", ".."):
            raise ValueError(f"a parameter is called {name!r}")
        return {path.stem: path for path in sorted((self._folder / _ZERO / name).glob("*.pt"))}

    def _take_module(self, states: dict[str, Any]) -> None:
        """Add frozen parameters, buffers and tied names, in the order of the model's state dict."""
        module = states["module"]
        frozen = states.get("frozen_param_shapes") or {}
        files = sorted(
            self._folder.glob("zero_pp_rank_*_mp_rank_00_model_states.pt"),
            key=lambda path: int(path.name.split("_")[3]),
        )
        num_ranks = self._num_ranks or states.get("dp_world_size") or len(files)
        if files and frozen:
            for rank in range(num_ranks):
                path = self._folder / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt"
                if path not in files:
                    raise CheckpointIncompleteError(f"{self._folder} has no {path.name}")
        every = [loaded(path)["frozen_param_fragments"] or {} for path in files if frozen]
        shared = states.get("shared_params") or {}
        tied = dict(shared if isinstance(shared, dict) else [tuple(pair) for pair in shared])
        for name, value in module.items():
            tensor, first = f"model.{name}", f"model.{tied.get(name, name)}"
            if tensor in self.tensors:
                pass
            elif first in self.tensors:
                self._add(tensor, self.tensors[first].shape, self._fragments[first])
            elif name in frozen and every:
                numel = math.prod(frozen[name])
                flat = _joined([each[name] for each in every])[:numel]
                self._add(tensor, frozen[name], [flat])
            elif isinstance(value, torch.Tensor) and (value.numel() or not every):
                self._add(tensor, value.shape, [value.reshape(-1)])
            else:
                continue  # a tied name, which stage 3 does not store
            self.texts["model"][name] = {"$tensor": tensor}
        for name in chain(*self._groups):  # also names that the module's state leaves out
            self.texts["model"].setdefault(name, {"$tensor": f"model.{name}"})

    def _take_options(self, groups: list[dict[str, Any]]) -> None:
        """Add the optimizer's parameter groups, with the names of their parameters."""
        tree = self.texts.setdefault("optimizer.0", {"state": {}, "param_groups": []})
        for number, group in enumerate(groups):
            # In stage 3 a group may be several flat tensors ("sub_group_size"), by these numbers.
            numbers = group["params"] if len(groups) != len(self._groups) else [number]
            names = [name for each in numbers for name in self._groups[each]]
            options = {key: value for key, value in group.items() if key != "params"}
            step = options.pop("step", None)  # of FusedAdam
            tree["param_groups"].append({"params": names, **_plain(options, f"group {number}")})
            for name in names:
                if step is not None and name in tree["state"]:
                    tree["state"][name].setdefault("step", int(step))

    def _take_extra(self, states: dict[str, Any]) -> None:
        extra = {key: value for key, value in states.items() if key not in _OWN}
        if isinstance(states.get("lr_scheduler"), dict):
            extra["lr_scheduler"] = states["lr_scheduler"]
        self.texts["extra"] = _plain(extra, "extra")

    # Tensors

    def _add(self, name: str, shape: Any, fragments: Fragments) -> None:
        shape = tuple(int(size) for size in shape)
        found, wanted = sum(part.numel() for part in fragments), math.prod(shape)
        if found != wanted:
            raise CheckpointCorruptError(
                f"{self._folder} has {found} elements of {name}, expected {wanted}: it is "
                "incomplete, or in a form that is not known"
            )
        dtype = dtype_name(fragments[0].dtype) if fragments else "float32"
        num_bytes = wanted * DTYPES[dtype].itemsize
        span = Span("", len(self._fragments), num_bytes, 0)  # the offset keeps the order
        self._fragments[name] = fragments
        zeros = (0,) * len(shape)
        self.tensors[name] = TensorEntry(dtype, shape, (Chunk(zeros, shape, span),))

    def _add_state(self, name: str, key: str, shape: Any, value: Any, fragments: Any) -> None:
        """Add one optimizer state of a parameter: a tensor of its shape, or a number."""
        tree = self.texts.setdefault("optimizer.0", {"state": {}, "param_groups": []})
        states = tree["state"].setdefault(name, {})
        if isinstance(value, torch.Tensor):
            tensor = f"optimizer.0.state.{name}.{key}"
            is_one = value.dim() == 0
            self._add(
                tensor, () if is_one else shape, [value.reshape(-1)] if is_one else fragments()
            )
            states[key] = {"$tensor": tensor}
        elif type(value) in (int, float, bool):
            states[key] = value


def _steps(optimizer: dict[str, Any]) -> dict[Any, float]:
    """The counters of an optimizer. Some keep them in the states, others in the groups."""
    found = {
        f"state {number}": float(state["step"])
        for number, state in optimizer["state"].items()
        if "step" in state
    }
    for number, group in enumerate(optimizer["param_groups"]):
        if "step" in group:
            found[f"group {number}"] = float(group["step"])
    return found


def _check_used(used: int, found: int) -> None:
    if used != found:
        raise ValueError(f"{found - used} elements of no parameter")


def _joined(parts: list[torch.Tensor]) -> torch.Tensor:
    return parts[0].reshape(-1) if len(parts) == 1 else torch.cat([p.reshape(-1) for p in parts])


def _plain(values: dict[str, Any], where: str) -> dict[str, Any]:
    """Encode the values that are plain data as JSON, and leave out all others."""
    found = {}
    for key, value in values.items():
        try:
            encoded, tensors = encoding.encode(value, f"{where}.{key}")
        except CheckpointValueError:
            continue
        if not tensors:
            found[key] = encoded
    return found
