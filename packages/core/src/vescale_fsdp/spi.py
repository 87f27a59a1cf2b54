"""What companions of the core may use beside its public names.

Companions are packages like ``vescale_fsdp_elastic``, of the same version as the core. These names
are provisional: they may change in each version, and nothing else should use them.

* A checkpoint in parts: a state is collected, divided between ranks, written and sealed, read.
* Ranks: their agreements, and waits that another thread can end.
* Process groups, the parameters' local tensors, and the move of a model to other ranks.
"""

from vescale_fsdp import engine
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
from vescale_fsdp.checkpoint.dcp_directory import MetadataUnpickler
from vescale_fsdp.checkpoint.deepspeed import folder_of
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
    FileStore,
    Store,
    agents_in,
    count_groups_from_zero,
    forget_stages,
    local_tensor,
)
from vescale_fsdp.engine import (
    check_reduced,
    check_remesh,
    unreduced_parameters,
)
from vescale_fsdp.ranks import AbsentError, Ranks, everyone, limit_s, threads, waits
from vescale_fsdp.ranks.collectives import all_reduce, new_gloo_group

remesh = engine.remesh  # not imported: a file has that name, too

__all__ = [
    "MANIFEST", "PER_RANK", "SEALS", "AbsentError", "Contents", "DataReader", "FileStore",
    "LocalFiles", "LocalPlan", "Manifest", "MetadataUnpickler", "NamedOptimizer", "Optimizers",
    "Ranks", "Seal", "Span", "Stateful", "Store", "TensorEntry", "Variant", "Weights", "agents_in",
    "all_reduce", "backend_name", "backends_of", "begin_load", "begin_save", "bytes_of", "capture",
    "check_reduced", "check_remesh", "collect", "count_groups_from_zero", "data_name", "divide",
    "everyone", "finish_saves", "flush", "folder_of", "forget_stages", "is_fake", "is_stage",
    "leave_saves", "limit_s", "load_from", "local_tensor", "model_state", "named", "new_gloo_group",
    "open_regular", "parts", "parts_of", "read_all", "read_manifest", "read_regular", "remesh",
    "restore", "restorer", "sealed", "seed_for", "size_of", "threads", "unread",
    "unreduced_parameters", "waits", "weights_of", "write_errors",
]  # fmt: skip
