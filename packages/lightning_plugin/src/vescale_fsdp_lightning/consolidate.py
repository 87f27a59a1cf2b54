"""One file of a sealed checkpoint, for ``DDPStrategy``, ``load_from_checkpoint`` and others.

::

    python -m vescale_fsdp_lightning.consolidate runs/last.ckpt
    python -m vescale_fsdp_lightning.consolidate runs/last.ckpt --output_file last-in-one.ckpt

The arguments are those of Lightning's own tool, which reads ``state_dict_type="dcp"``. The file is
what ``state_dict_type="full"`` would have saved. One process, without processes of the training,
and without the model's code.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from vescale_fsdp import CheckpointExistsError, CheckpointMismatchError, VeScaleError, checkpoint
from vescale_fsdp.checkpoint import full
from vescale_fsdp_lightning.checkpoints import ALSO
from vescale_fsdp_lightning.plain import from_plain

__all__ = ["consolidate", "main"]


def consolidate(folder: str | os.PathLike[str], output_file: str | os.PathLike[str]) -> None:
    """Write a sealed checkpoint as one file of ``torch.save``. Not collective.

    A checkpoint of the Trainer becomes the dictionary that ``DDPStrategy`` saves; one of Fabric the
    user's own. Generators of random numbers are left out.

    Args:
        folder: of the checkpoint.
        output_file: must not exist; it appears when it is whole.

    Cost: every byte is read once and checked; memory for all of it.

    Raises:
        CheckpointIncompleteError: there is no checkpoint, or a file of it is missing.
        CheckpointCorruptError: its bytes are not those that were saved.
        CheckpointMismatchError: it is in another format.
        CheckpointExistsError: ``output_file`` exists.
    """
    source_folder, target = Path(folder), Path(output_file)
    if target.exists():
        raise CheckpointExistsError(f"{target} exists, and is not replaced; name another file")
    found = _values(checkpoint.read(source_folder), source_folder)
    unfinished = target.with_name(f"{target.name}.tmp")
    try:
        with open(unfinished, "wb") as stream:
            torch.save(found, stream)
            stream.flush()
            os.fsync(stream.fileno())
        unfinished.rename(target)
    finally:
        unfinished.unlink(missing_ok=True)


def _values(trees: dict[str, Any], source: Path) -> dict[str, Any]:
    extra = trees.pop("extra", {})
    if "lightning" not in extra:
        raise CheckpointMismatchError(
            f'{source} is no sealed checkpoint of Lightning\'s. What state_dict_type="dcp" has '
            "saved, python -m lightning.pytorch.utilities.consolidate_checkpoint reads; "
            "vescale-fsdp checkpoint convert writes other formats"
        )
    rest = from_plain(extra["lightning"])
    model = trees.pop("model")
    optimizers = {name.removeprefix("optimizer."): tree for name, tree in trees.items()}
    if "models" in extra:
        return {**_models(model, extra["models"]), **optimizers, **rest}
    by_number = {name: full.by_number(tree) for name, tree in optimizers.items()}
    own = sorted((name for name in by_number if name.isdecimal()), key=int)
    also = {name: tree for name, tree in by_number.items() if not name.isdecimal()}
    made = {"state_dict": model, **rest}
    if own:
        made["optimizer_states"] = [by_number[name] for name in own]
    return {**made, ALSO: also} if also else made


def _models(state: dict[str, Any], keys: list[str]) -> dict[str, Any]:
    """The models of Fabric by their keys; those of several are in front of their names."""
    if len(keys) == 1:
        return {keys[0]: state}
    return {
        key: {n.removeprefix(f"{key}."): t for n, t in state.items() if n.startswith(f"{key}.")}
        for key in keys
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m vescale_fsdp_lightning.consolidate",
        description="Write a sealed checkpoint as one file, which any strategy of Lightning reads.",
    )
    parser.add_argument("checkpoint_folder", type=Path)
    parser.add_argument(
        "--output_file", type=Path, help="default: the folder's name and .consolidated"
    )
    args = parser.parse_args(arguments)
    folder = args.checkpoint_folder
    target = args.output_file or folder.with_name(f"{folder.name}.consolidated")
    try:
        consolidate(folder, target)
    except VeScaleError as error:
        parser.exit(1, f"{error}\n")
    print(f"wrote {target}")  # noqa: T201  # to whom has called it


if __name__ == "__main__":
    main()
