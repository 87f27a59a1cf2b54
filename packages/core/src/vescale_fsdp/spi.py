"""What companions of the core may use beside its public names.

Companions are packages like ``vescale_fsdp_elastic``, of the same version as the core. These names
are provisional: they may change in each version, and nothing else should use them.

* A checkpoint in parts: a state is collected, divided between ranks, written and sealed, read.
* Ranks: their agreements, and waits that another thread can end.
* Process groups, the parameters' local tensors, and the move of a model to other ranks.
* For ``vescale_fsdp_tune``: what the engine checks, how it names and codes parameters, its
  collectives, and the boundaries of a unit in autograd.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from vescale_fsdp import devices
from vescale_fsdp.backends import backend_name, backends_of, is_fake
from vescale_fsdp.checkpoint import parts, unread
from vescale_fsdp.checkpoint.contents import (
    PER_RANK,
    Contents,
    LocalPlan,
    Optimizers,
    Stateful,
    Weights,
    capture,
    collect,
    divide,
    named,
    restore,
    restorer,
    seed_for,
    weights_of,
)
from vescale_fsdp.checkpoint.files import (
    DataReader,
    bytes_of,
    flush,
    open_regular,
    read_regular,
    size_of,
    write_errors,
)
from vescale_fsdp.checkpoint.full import model_state
from vescale_fsdp.checkpoint.loading import load_from, parts_of
from vescale_fsdp.checkpoint.manifest import NAME as MANIFEST
from vescale_fsdp.checkpoint.manifest import Manifest, Seal, Span, TensorEntry, Variant
from vescale_fsdp.checkpoint.optimizer import NamedOptimizer
from vescale_fsdp.checkpoint.replacing import SEALS, LocalFiles
from vescale_fsdp.checkpoint.saving import begin_load, begin_save, finish_saves, leave_saves
from vescale_fsdp.checkpoint.seal import data_name, is_stage, read_manifest, sealed
from vescale_fsdp.checkpoint.unread import read_all
from vescale_fsdp.compat import (
    REDUCES_IN_OWN_DTYPE,
    FileStore,
    Store,
    TorchDispatchMode,
    agents_in,
    count_groups_from_zero,
    current_backward,
    forget_stages,
    free_workspaces,
    local_tensor,
    pytree,
    recompute,
)
from vescale_fsdp.dbuffer import BlockCodec, Coding, Comm, checked_block, pool_for
from vescale_fsdp.devices import Waitable
from vescale_fsdp.engine import (
    GranularityPolicy,
    check_reduced,
    check_remesh,
    map_tensors,
    remesh,
    unreduced_parameters,
)
from vescale_fsdp.engine.activations import Kept, Offload
from vescale_fsdp.engine.api import default_mesh
from vescale_fsdp.engine.arguments import check_arguments, check_engine_arguments, checked_modules
from vescale_fsdp.engine.axes import Axes, comm_for
from vescale_fsdp.engine.boundary import Call, enter, leave
from vescale_fsdp.engine.containers import tensors_requiring_grad
from vescale_fsdp.engine.granularity import Roles, asked_block
from vescale_fsdp.engine.unit import follows_statistics, units_in
from vescale_fsdp.ragged import Blocks, access_of
from vescale_fsdp.ranks import AbsentError, Ranks, everyone, limit_s, over, threads, waits
from vescale_fsdp.ranks.collectives import all_reduce, new_gloo_group

if TYPE_CHECKING:
    from vescale_fsdp.checkpoint.foreign import MetadataUnpickler, format_of

__all__ = [
    "MANIFEST", "PER_RANK", "REDUCES_IN_OWN_DTYPE", "SEALS", "AbsentError", "Axes", "BlockCodec",
    "Blocks", "Call", "Coding", "Comm", "Contents", "DataReader", "FileStore", "GranularityPolicy",
    "Kept", "LocalFiles", "LocalPlan", "Manifest", "MetadataUnpickler", "NamedOptimizer", "Offload",
    "Optimizers", "Ranks", "Roles", "Seal", "Span", "Stateful", "Store", "TensorEntry",
    "TorchDispatchMode", "Variant", "Waitable", "Weights", "access_of", "agents_in", "all_reduce",
    "asked_block", "backend_name", "backends_of", "begin_load", "begin_save", "bytes_of", "capture",
    "check_arguments", "check_engine_arguments", "check_reduced", "check_remesh", "checked_block",
    "checked_modules", "collect", "comm_for", "count_groups_from_zero", "current_backward",
    "data_name", "default_mesh", "devices", "divide", "enter", "everyone", "finish_saves", "flush",
    "follows_statistics", "forget_stages", "format_of", "free_workspaces", "is_fake", "is_stage",
    "leave", "leave_saves", "limit_s", "load_from", "local_tensor", "map_tensors", "model_state",
    "named", "new_gloo_group", "open_regular", "over", "parts", "parts_of", "pool_for", "pytree",
    "read_all", "read_manifest", "read_regular", "recompute", "remesh", "restore", "restorer",
    "sealed", "seed_for", "size_of", "tensors_requiring_grad", "threads", "units_in", "unread",
    "unreduced_parameters", "waits", "weights_of", "write_errors",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in ("MetadataUnpickler", "format_of"):
        return getattr(import_module("vescale_fsdp.checkpoint.foreign"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
