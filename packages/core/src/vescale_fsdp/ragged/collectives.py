"""Collectives of ``torch.distributed`` on tensors of fully sharded modules.

They come as operators of ``c10d``, or of ``_c10d_functional``. A tensor that each rank has whole
takes part with its local tensor, as a plain one does under DistributedDataParallel. Of a sharded
tensor ranks hold different parts, so a collective on it is refused before anything is sent.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch.distributed.tensor import DTensor

from vescale_fsdp.compat import local_tensor, pytree

_NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")
# The constructor of DistributedDataParallel joins the parameters of a model, to broadcast them.
_OF_A_JOIN = (
    "DistributedDataParallel around a model of which a part is sharded comes here: call "
    "fully_shard on the whole model, and leave DistributedDataParallel out. Or tell it before "
    "which parameters fully_shard reduces: names = [name for name, param in "
    "model.named_parameters() if isinstance(param, DTensor)]; "
    "DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names). "
)


def is_collective(func: Any) -> bool:
    """Whether an operator communicates."""
    namespace: str = func.namespace
    return namespace in _NAMESPACES


def run_collective(func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """Run a collective on the local tensors of whole ones. What it returns is plain.

    Raises:
        NotImplementedError: a tensor is not whole.
    """
    for each in pytree.tree_leaves((args, kwargs)):
        if isinstance(each, DTensor) and not all(p.is_replicate() for p in each.placements):
            refuse_collective(func, each)
    local_args, local_kwargs = pytree.tree_map(local_tensor, (args, kwargs))
    result = func(*local_args, **local_kwargs)
    if _writes(func):  # to the first argument; their schemas do not say so
        written = pytree.tree_leaves(local_args[0])
        torch.autograd.graph.increment_version(
            [each for each in written if isinstance(each, torch.Tensor)]
        )
    return result


def refuse_collective(func: Any, tensor: DTensor) -> NoReturn:
    """Raise ``NotImplementedError`` for a collective on a tensor that is not whole."""
    raise NotImplementedError(
        f"{func} on a sharded tensor of shape {tuple(tensor.shape)} with {tensor.placements}: "
        "ranks hold different parts of it, so nothing was sent. backward has averaged gradients "
        "over ranks, and reductions such as norms are of all ranks: leave the collective out. "
        "`tensor.full_tensor()` is the whole on every rank, and inside of `with "
        "vescale_fsdp.unsharded(model, writeback=True)` parameters are whole. "
        "DistributedDataParallel around a sharded model comes here, too: remove it"
    )


def hint_beside_plain(func: Any) -> str:
    """What an error adds if an operator got a plain tensor beside one of a sharded module."""
    return _OF_A_JOIN if func is torch.ops.aten.cat.default else ""


def _writes(func: Any) -> bool:
    name: str = func._schema.name.partition("::")[2]
    return (func.namespace == "c10d" and name != "send") or name.endswith("_")
