"""Converts a sealed checkpoint to one file, which can be read without this package.

::

    python -m vescale_fsdp_lightning.consolidate runs/last.ckpt
    python -m vescale_fsdp_lightning.consolidate runs/last.ckpt --output_file last-in-one.ckpt

The arguments are those of Lightning's own tool, which reads ``state_dict_type="dcp"``. The file is
the same as with ``state_dict_type="full"``. It runs in one process, and does not need the model's
code.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

import torch

from vescale_fsdp import CheckpointExistsError, VeScaleError
from vescale_fsdp_lightning.dictionary import read_dictionary

__all__ = ["consolidate", "main"]


def consolidate(folder: str | os.PathLike[str], output_file: str | os.PathLike[str]) -> None:
    """Write a sealed checkpoint as one file of ``torch.save``. Not collective.

    The file has the dictionary that `read_dictionary` returns.

    Args:
        folder: the checkpoint.
        output_file: must not exist. It appears when it is complete.

    Cost: every byte is read once and checked; memory for all of it.

    Raises:
        CheckpointIncompleteError: there is no checkpoint, or one of its files is missing.
        CheckpointCorruptError: its bytes differ from those that were saved.
        CheckpointMismatchError: it is in another format.
        CheckpointExistsError: ``output_file`` exists.
    """
    target = Path(output_file)
    if target.exists():
        raise CheckpointExistsError(f"{target} exists, and is not replaced; name another file")
    found = read_dictionary(Path(folder))
    unfinished = target.with_name(f"{target.name}.tmp")
    try:
        with open(unfinished, "wb") as stream:
            torch.save(found, stream)
            stream.flush()
            os.fsync(stream.fileno())
        unfinished.rename(target)
    finally:
        unfinished.unlink(missing_ok=True)


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
    print(f"wrote {target}")  # noqa: T201  # the output of the command


if __name__ == "__main__":
    main()
