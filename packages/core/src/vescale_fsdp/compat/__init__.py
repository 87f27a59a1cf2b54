"""Everything that this package uses of torch beyond its public API.

Private names of torch are in these files only (tests/test_compat.py). So a new release of torch
changes only these files. `versions` gives names of ours to private functions. `patches` adds
to objects and tables of torch. `checkpoints` has a protocol that is newer than the oldest torch.
They are for torch 2.13 to 2.15: docs/design/torch-versions.md.
"""

from torch._C._distributed_c10d import FileStore, Store
from torch._utils import _rebuild_tensor_v2 as rebuild_tensor
from torch.autograd.function import _SingleLevelFunction as OutsideFunction
from torch.autograd.grad_mode import _unsafe_preserve_version_counter as preserve_versions
from torch.distributed._composable.checkpoint_activation import checkpoint as recompute
from torch.distributed._composable.contract import STATE_KEY as COMPOSABLE_STATE
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
    ProcessGroupAllocAllGather,
    ProcessGroupAllocReduceScatter,
    SymmMemAllGather,
)
from torch.distributed.fsdp._fully_shard._fsdp_common import ShardPlacementResult
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._ops._math_ops import _NormPartial as NormPartial
from torch.distributed.tensor.placement_types import _StridedShard as StridedShard
from torch.serialization import _get_layout as layout_of_name
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._python_dispatch import is_traceable_wrapper_subclass as is_wrapper

from vescale_fsdp.compat.checkpoints import chunk_list, write_items
from vescale_fsdp.compat.patches import (
    has_other_init_group,
    refuse_boxes,
    refuse_lost_boxes,
    register_first_forward_hook,
    register_first_step_post_hook,
    replace_init_group,
    set_fsdp2_state,
    support_foreach,
    unregister,
    unregister_recompute,
    without_step_hooks,
    wrap_from_local,
)
from vescale_fsdp.compat.tracing import (
    RaggedSpec,
    TraceableDTensor,
    has_traced,
    leave_to_python,
    refuse_tracing,
)
from vescale_fsdp.compat.versions import (
    REDUCES_IN_OWN_DTYPE,
    TENSOR_DATA,
    GradientReductionHandle,
    agents_in,
    apply_outside,
    archive_records,
    coalescing,
    concatenate_meshes,
    count_groups_from_zero,
    current_backward,
    current_node,
    default_store,
    flattened,
    forget_meshes,
    forget_stages,
    fqn_of,
    free_workspaces,
    init_group,
    is_functional,
    is_ignored_by_ddp,
    is_reduced_by_ddp,
    is_transforming,
    local_tensor,
    mesh_info,
    neg_view,
    num_holders,
    outside_functorch,
    parameters_of_running_ddp,
    process_groups,
    queue_backward_callback,
    recorded,
    run_when_ready,
    runs_all,
    set_versions,
    storage_info,
    storages_of,
    symmetric_pool,
    takes_functional_gradient,
    unwrapped,
    was_made_before,
    will_run,
    without_torch_function,
)

__all__ = [
    "COMPOSABLE_STATE",
    "REDUCES_IN_OWN_DTYPE",
    "TENSOR_DATA",
    "AsyncCollectiveTensor",
    "DTensorSpec",
    "FileStore",
    "GradientReductionHandle",
    "NormPartial",
    "OutsideFunction",
    "ProcessGroupAllocAllGather",
    "ProcessGroupAllocReduceScatter",
    "RaggedSpec",
    "ShardPlacementResult",
    "Store",
    "StridedShard",
    "SymmMemAllGather",
    "TensorMeta",
    "TorchDispatchMode",
    "TraceableDTensor",
    "agents_in",
    "apply_outside",
    "archive_records",
    "chunk_list",
    "coalescing",
    "concatenate_meshes",
    "count_groups_from_zero",
    "current_backward",
    "current_node",
    "default_store",
    "flattened",
    "forget_meshes",
    "forget_stages",
    "fqn_of",
    "free_workspaces",
    "has_other_init_group",
    "has_traced",
    "init_group",
    "is_functional",
    "is_ignored_by_ddp",
    "is_reduced_by_ddp",
    "is_transforming",
    "is_wrapper",
    "layout_of_name",
    "leave_to_python",
    "local_tensor",
    "mesh_info",
    "neg_view",
    "num_holders",
    "outside_functorch",
    "parameters_of_running_ddp",
    "preserve_versions",
    "process_groups",
    "pytree",
    "queue_backward_callback",
    "rebuild_tensor",
    "recompute",
    "recorded",
    "refuse_boxes",
    "refuse_lost_boxes",
    "refuse_tracing",
    "register_first_forward_hook",
    "register_first_step_post_hook",
    "replace_init_group",
    "run_when_ready",
    "runs_all",
    "set_fsdp2_state",
    "set_versions",
    "storage_info",
    "storages_of",
    "support_foreach",
    "symmetric_pool",
    "takes_functional_gradient",
    "unregister",
    "unregister_recompute",
    "unwrapped",
    "was_made_before",
    "will_run",
    "without_step_hooks",
    "without_torch_function",
    "wrap_from_local",
    "write_items",
]  # fmt: skip
