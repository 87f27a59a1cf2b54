"""Loads sealed directories where Lightning itself would load a file, by an explicit import.

Lightning's own loader takes files only: it raises ``IsADirectoryError``.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

import torch

from vescale_fsdp_lightning._autoload import first_of
from vescale_fsdp_lightning.dictionary import load_directory

__all__ = ["SealedCheckpointIO", "load_from_checkpoint"]

# Of a directory, and of one whose save was interrupted, which has another name then.
_NO_FILE = (IsADirectoryError, FileNotFoundError, PermissionError)
T = TypeVar("T")


_plugins: Any = import_module(f"{first_of(('lightning.fabric', 'lightning_fabric'))}.plugins")


class SealedCheckpointIO(_plugins.TorchCheckpointIO):  # type: ignore[misc]
    """A ``CheckpointIO`` for other strategies, which loads sealed directories and files.

    ::

        trainer = Trainer(strategy="ddp", plugins=SealedCheckpointIO())
        trainer.fit(LitModel(), ckpt_path="last.ckpt")

    It saves files, as Lightning's own does.
    """

    def load_checkpoint(
        self,
        path: str | Path,
        map_location: Callable[..., Any] | None = None,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Return the dictionary that a strategy loads."""
        try:
            found: dict[str, Any] = super().load_checkpoint(path, map_location, weights_only)
        except _NO_FILE:
            directory = load_directory(path, map_location)
            if directory is None:
                raise
            found = directory
        return found


def load_from_checkpoint(cls: type[T], path: str | Path, **options: Any) -> T:
    """Return ``cls.load_from_checkpoint(path)``, also of a sealed directory. Not collective.

    ::

        model = load_from_checkpoint(LitModel, "runs/best.ckpt", map_location="cpu")

    Cost: memory for the checkpoint twice, while a directory is loaded.

    Args:
        cls: a LightningModule or a LightningDataModule.
        options: as for the method: ``strict``, ``map_location``, and those that replace saved
            hyper-parameters.
    """
    load: Callable[..., T] = cls.load_from_checkpoint  # type: ignore[attr-defined]
    try:
        return load(path, **options)
    except _NO_FILE:
        found = load_directory(path)
        if found is None:
            raise
    stream = io.BytesIO()
    torch.save(found, stream)
    del found
    stream.seek(0)
    return load(stream, **{**options, "weights_only": False})  # each byte has been checked
