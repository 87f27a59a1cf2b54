"""Which files of a generation a rank reads when it loads it.

With as many ranks as have saved, that is its own file, and those with values that all ranks share.
With another number it is the files whose parts of the parameters overlap its own::

    saved by 4   |  file 0  |  file 1  |  file 2  |  file 3  |
    3 load       |    rank 0    |    rank 1    |    rank 2   |      rank 1 needs files 1 and 2

Of a tensor whose parts cannot be told in advance, all files are needed: of a state that does not
have its parameter's shape, for example.
"""

from __future__ import annotations

import torch
from torch import nn

from vescale_fsdp.spi import (
    PER_RANK,
    Manifest,
    NamedOptimizer,
    Optimizers,
    named,
    parts_of,
    weights_of,
)


def files_of(manifest: Manifest, model: nn.Module, optimizers: Optimizers, rank: int) -> set[str]:
    """Return the names of the files that a rank reads.

    Args:
        model: sharded for this number of ranks, as for the load.
    """
    files, params = _of_values(manifest, rank), _tensors(model, optimizers)
    wanted: dict[str, torch.Tensor] = {}
    for name, entry in manifest.tensors.items():
        if _is_others(manifest, name, rank):
            continue
        like = params.get(name) if name in params else params.get(name.rpartition(".")[0])
        if like is not None and tuple(like.shape) == entry.shape:
            wanted[name] = like
        else:
            files |= {chunk.span.file for chunk in entry.chunks}
    return files | {span.file for span in parts_of(manifest, wanted)}


def _tensors(model: nn.Module, optimizers: Optimizers) -> dict[str, torch.Tensor]:
    """Return parameters and buffers by their names, and parameters by the prefix of their states.

    A state is assumed to be sharded as its parameter is, if both have the same shape.
    """
    found = {
        f"model.{fqn}": value
        for fqn, value in weights_of(model, "all").items()
        if isinstance(value, torch.Tensor)
    }
    for key, optimizer in named(optimizers).items():
        for fqn, param in NamedOptimizer(key, optimizer, model).params.items():
            found[f"optimizer.{key}.state.{fqn}"] = param
    return found


def _of_values(manifest: Manifest, rank: int) -> set[str]:
    """Return the files with the values that a rank reads, as the loader chooses them."""
    return {
        variant.span.file
        for name, variants in manifest.values.items()
        for variant in variants
        if len(variants) == 1 or not _is_own(name) or rank in variant.ranks
    }


def _is_own(name: str) -> bool:
    return name.partition(".")[0] in PER_RANK


def _is_others(manifest: Manifest, tensor: str, rank: int) -> bool:
    """Whether a tensor belongs to a value that only other ranks have: its name ends in @RANK."""
    base, _, number = tensor.rpartition("@")
    if not base or not _is_own(tensor) or not number.isdigit():
        return False
    for name, variants in manifest.values.items():
        if base.startswith(f"{name}.") or base == name:
            return all(rank not in each.ranks for each in variants if each.ranks[0] == int(number))
    return False
