"""What companions of the core may use beside its public names.

Companions are packages like ``vescale_fsdp_elastic``, of the same version as the core. These names
are provisional: they may change in each version, and nothing else should use them.

* A checkpoint in parts: a state is collected, divided between ranks, written and sealed, read.
* Ranks: their agreements, and waits that another thread can end.
* Process groups, the parameters' local tensors, and the move of a model to other ranks.
"""

from vescale_fsdp import engine
from vescale_fsdp.backends import backends_of, is_fake
from vescale_fsdp.checkpoint import parts
from vescale_fsdp.checkpoint.contents import (
    PER_RANK,
    Contents,
    LocalPlan,
    Optimizers,
    Stateful,
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
    read_regular,
    size_of,
    write_errors,
)
from vescale_fsdp.checkpoint.full import model_state
from vescale_fsdp.checkpoint.loading import load_from, parts_of
from vescale_fsdp.checkpoint.manifest import NAME as MANIFEST
from vescale_fsdp.checkpoint.manifest import Manifest, Seal, Span
from vescale_fsdp.checkpoint.optimizer import NamedOptimizer
from vescale_fsdp.checkpoint.saving import finish_saves, leave_saves
from vescale_fsdp.checkpoint.seal import data_name, read_manifest
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
    "MANIFEST", "PER_RANK", "AbsentError", "Contents", "DataReader", "FileStore", "LocalPlan",
    "Manifest", "NamedOptimizer", "Optimizers", "Ranks", "Seal", "Span", "Stateful", "Store",
    "agents_in", "all_reduce", "backends_of", "bytes_of", "capture", "check_reduced",
    "check_remesh", "collect", "count_groups_from_zero", "data_name", "divide", "everyone",
    "finish_saves", "forget_stages", "is_fake", "leave_saves", "limit_s", "load_from",
    "local_tensor", "model_state", "named", "new_gloo_group", "parts", "parts_of", "read_manifest",
    "read_regular", "remesh", "restore", "restorer", "seed_for", "size_of", "threads",
    "unreduced_parameters", "waits", "weights_of", "write_errors",
]  # fmt: skip
