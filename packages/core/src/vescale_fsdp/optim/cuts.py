"""Finding plain tensors that are cut from shards.

An optimizer for whole matrices that gets the local part of a sharded one computes something else,
without an error. So a plain parameter is compared with all sharded parameters that are alive.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from vescale_fsdp import compat
from vescale_fsdp.ragged import RaggedShard

LiveShards = Mapping[int, DTensor]  # by the ``_cdata`` of the storage that a local part lies in


def live_shards() -> LiveShards:
    """The sharded parameters of this process, ours and those of others, by storage.

    Torch has no list of them, and a local part does not know its parameter: the garbage
    collector is asked. Cost: about 0.1 s for a million objects; nothing without a process group,
    because a DTensor needs one.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return {}
    found: dict[int, DTensor] = {}
    for each in gc.get_objects():
        # By the type: ``isinstance`` runs code of objects that pretend to be others.
        if not issubclass(type(each), DTensor):
            continue
        shard: DTensor = each
        placements = shard._spec.placements
        is_cut = any(isinstance(p, RaggedShard | Shard) for p in placements)
        if is_cut and isinstance(shard, nn.Parameter):
            for storage in compat.storages_of(shard._local_tensor):
                found.setdefault(storage, shard)
    return found


def refuse_cut(param: torch.Tensor, name: str, shards: LiveShards) -> None:
    """Raise if a plain tensor lies in the memory of a sharded parameter.

    Raises:
        ValueError: it does.
    """
    if isinstance(param, DTensor) or param.is_meta or param.layout != torch.strided:
        return
    for storage in compat.storages_of(param):
        whole = shards.get(storage)
        if whole is not None:
            raise ValueError(
                f"{name} is a plain tensor of shape {tuple(param.shape)} in the memory of a "
                f"sharded parameter of shape {tuple(whole.shape)}, {whole._spec.placements}: what "
                "to_local() gives. An optimizer would take this rank's part for the whole; pass "
                "the sharded parameter itself, as model.parameters() gives it"
            )
