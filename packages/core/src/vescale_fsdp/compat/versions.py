"""Private functions of torch 2.13 to 2.15, under names of ours."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
import torch.distributed.fsdp
from torch._C._distributed_c10d import FileStore, Store
from torch.autograd import forward_ad
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard._fsdp_common import (
    DDPMeshInfo,
    FSDPMeshInfo,
    HSDPMeshInfo,
)
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

_C: Any = torch._C
_NOTHING = nullcontext()
TENSOR_DATA: Any = torch.Tensor.data  # the descriptor, for a subclass with a ``data`` of its own
# A context in which reading an attribute of a tensor subclass takes half of the time.
without_torch_function: Any = _C.DisableTorchFunctionSubclass
# A context in which the transformations of ``torch.func`` do not see operations.
outside_functorch: Any = _C._DisableFuncTorch
# Whether the gradients of a parameter are reduced in its own dtype if the policy of mixed precision
# has no ``reduce_dtype``, as FSDP2 documents it since torch 2.15. Before, it was that of compute.
# Since then it also takes gradients in the dtype of the sum, if a function in the graph makes such.
REDUCES_IN_OWN_DTYPE: bool = cast(Any, torch.__version__) >= (2, 15)
# The handle of reductions that the user waits for, since torch 2.15.
GradientReductionHandle: Any = getattr(torch.distributed.fsdp, "GradientReductionHandle", object)
# The id of the autograd graph task that this thread runs, or -1; and the current node, or None.
current_backward: Callable[[], int] = _C._current_graph_task_id
current_node: Callable[[], Any] = _C._current_autograd_node


class GradDtype(NamedTuple):
    """The ``grad_dtype`` of a leaf: the dtype of its ``.grad``.

    Attributes:
        is_set: whether it was set. If not, gradients have the dtype of the leaf.
        dtype: None: any dtype.
    """

    is_set: bool = False
    dtype: torch.dtype | None = None


def grad_dtype_of(leaf: torch.Tensor) -> GradDtype:
    """Return the ``grad_dtype`` of a leaf.

    Before torch 2.15, one that was set to the dtype of the leaf itself is taken as not set.
    """
    with without_torch_function():
        dtype = leaf.grad_dtype
        is_set = getattr(leaf, "_has_grad_dtype_override", dtype != leaf.dtype)
    return GradDtype(True, dtype) if is_set else GradDtype()


def take_gradients_as_they_are(
    ctx: Any, outputs: Sequence[torch.Tensor], which: list[bool]
) -> None:
    """Let the backward of a function get gradients of some outputs in the dtype that they have.

    Without it, autograd casts them to the dtype of the output. Call it in the forward.

    Args:
        which: for each output whether it is one of these.
    """
    if hasattr(ctx, "set_output_grad_dtype"):  # since torch 2.15
        pairs = zip(outputs, which, strict=True)
        ctx.set_output_grad_dtype(*[None if each else output.dtype for output, each in pairs])
        return
    for output, each in zip(outputs, which, strict=True):
        if each:
            output.grad_dtype = None


def recorded(what: str, names: Sequence[str]) -> AbstractContextManager[object]:
    """A range for profilers, such as ``vescale::unshard(blocks.3)``.

    Does nothing if no profiler runs.

    Args:
        names: the names of units, as in errors. If there are several, the first and the last are
            shown.
    """
    if not _C._autograd._profiler_enabled():
        return _NOTHING
    first, last = (each.strip("'").removeprefix("the ") or "root" for each in (names[0], names[-1]))
    subject = first if first == last else f"{first} to {last}"
    return torch.autograd.profiler.record_function(f"vescale::{what}({subject})")


def set_versions(tensors: tuple[torch.Tensor, ...], versions: tuple[int, ...]) -> None:
    """Set the version counters of tensors, by which autograd notices in-place writes."""
    _C._autograd._unsafe_set_version_counter(tensors, versions)


def is_reduced_by_ddp(module: torch.nn.Module) -> bool:
    """Whether DDP is around a module, or was told what to ignore in it, as for sharded ones."""
    return isinstance(module, torch.nn.parallel.DistributedDataParallel) or hasattr(
        module, "_ddp_params_and_buffers_to_ignore"
    )


def is_ignored_by_ddp(param: torch.Tensor) -> bool:
    """Whether DDP was told to ignore a parameter."""
    return bool(getattr(param, "_ddp_ignored", False))


def is_transforming() -> bool:
    """Whether a transformation of ``torch.func`` or forward-mode differentiation is active now."""
    transforming: bool = _C._are_functorch_transforms_active()
    return transforming or forward_ad._current_level >= 0


def is_functional() -> bool:
    """Whether a transformation of ``torch.func`` is active now."""
    return bool(_C._are_functorch_transforms_active())


def unwrapped(tensor: torch.Tensor) -> torch.Tensor:
    """What transformations of ``torch.func`` have wrapped."""
    while _C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = _C._functorch.get_unwrapped(tensor)
    return tensor


def parameters_of_running_ddp() -> list[torch.Tensor]:
    """The parameters whose gradients a DistributedDataParallel reduces, in whose forward we are."""
    running = torch.nn.parallel.DistributedDataParallel._active_ddp_module
    return [] if running is None else [*running._module_parameters]


def takes_functional_gradient() -> bool:
    """Whether ``torch.func.grad``, ``vjp``, or a transformation that uses them, is active now."""
    if not _C._are_functorch_transforms_active():
        return False
    stack = _C._functorch.get_interpreter_stack() or []
    return any(each.key() == _C._functorch.TransformType.Grad for each in stack)


def will_run(node: Any) -> bool | None:
    """Whether the backward that runs will run this node. None: it captures it, as an input.

    The latter is ``torch.autograd.grad`` by a leaf.
    """
    try:
        return bool(_C._will_engine_execute_node(node))
    except RuntimeError:
        return None


def runs_all() -> bool:
    """Whether the backward runs all nodes behind its current one, as one without ``inputs`` does.

    Cost: a look at each of these nodes, up to the first that it does not run.
    """
    waiting: list[Any] = [_C._current_autograd_node()]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        if node is not None and not will_run(node):
            return False
        new = {each for each, _ in node.next_functions} - seen if node is not None else ()
        seen.update(new)
        waiting += new
    return True


def apply_outside(function: Any, *args: Any) -> Any:
    """Apply an `OutsideFunction`, also while a transformation of ``torch.func`` is active.

    Such a transformation is one of inputs, and the weights are outside of it.
    """
    if not _C._are_functorch_transforms_active():
        return function.apply(*args)
    with torch._functorch.utils.enable_single_level_autograd_function():
        return function.apply(*args)


def run_when_ready(node: Any) -> None:
    """Let a backward run this node before all others, once its gradients are there.

    Autograd runs the node with the highest number first. Those of leaves have the highest of all.
    """
    node._set_sequence_nr(_BEFORE_OTHERS)


_BEFORE_OTHERS = 1 << 62


def was_made_before(tensor: torch.Tensor, node: Any) -> bool:
    """Whether a tensor is of a node that was made before this one, on one thread; or is a leaf.

    Args:
        node: None if it is gone; then it is not known, and False.
    """
    made_by = tensor.grad_fn
    return made_by is None or bool(node and made_by._sequence_nr() < node._sequence_nr())


def queue_backward_callback(callback: Callable[[], None]) -> None:
    """Run ``callback`` when the current backward has run all of its nodes."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The local tensor of a DTensor, without a copy or a wait; a plain tensor itself."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def storages_of(tensor: torch.Tensor) -> set[int]:
    """The ``_cdata`` of a tensor's storage; of a wrapper, those of the tensors that it wraps."""
    if not is_traceable_wrapper_subclass(tensor):
        return {tensor.untyped_storage()._cdata}
    names, _ = tensor.__tensor_flatten__()
    return {each for name in names for each in storages_of(getattr(tensor, name))}


def concatenate_meshes(meshes: list[DeviceMesh]) -> DeviceMesh:
    """One mesh with the axes of several meshes.

    Raises:
        RuntimeError: the meshes are not slices of one mesh.
    """
    joined: DeviceMesh = DeviceMesh._concatenate(meshes)
    return joined


def forget_meshes() -> None:
    """Empty DTensor's caches of specs. They hold meshes of a default group that is destroyed.

    A mesh of a new default group may compare equal to an old one, but has other process groups.
    """
    from torch.distributed.tensor import _collective_utils, _redistribute

    propagator: Any = DTensor._op_dispatcher.sharding_propagator
    propagator.propagate_op_sharding.cache_clear()
    _redistribute._gen_transform_infos.cache_clear()
    _redistribute.clear_redistribute_planner_cache()
    _collective_utils.MeshTopoInfo.build_from_mesh.cache_clear()
    _C._clear_DTensor_sharding_propagator_cache()


def count_groups_from_zero() -> None:
    """Let the next default group have the name that it has in a new process.

    Its keys in the store begin with it. A default group that could not be made, because a rank died
    meanwhile, is counted, and `destroy_process_group` is not possible then.
    """
    if not dist.is_initialized():
        dist.distributed_c10d._world.group_count = 0


def coalescing(group: dist.ProcessGroup) -> Any:
    """A context in which collectives are started together, which waits like a ``Work``."""
    return dist.distributed_c10d._coalescing_manager(group, async_ops=True)


def symmetric_pool(device: torch.device) -> Any:
    """The memory pool of symmetric memory, which all ranks can access."""
    from torch.distributed import _symmetric_memory as symmetric

    return symmetric.get_mem_pool(device)


def default_store() -> Store:
    """The key-value store behind the default process group."""
    store: Store = dist.distributed_c10d._get_default_store()
    return store


def process_groups() -> list[dist.ProcessGroup]:
    """All process groups of this rank, the default group among them."""
    return [*dist.distributed_c10d._world.pg_map]


def agents_in(file: str, run_id: str) -> Callable[[], int]:
    """Return a function that counts the agents in the newest round of torchrun's rendezvous.

    An agent that has sent no heartbeat for long is taken out of it by the others.

    Args:
        file: of ``--rdzv-backend c10d --rdzv-conf store_type=file``.

    Raises:
        RendezvousError: the file cannot be read. The function raises it too.
    """
    from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend

    backend = C10dRendezvousBackend(FileStore(file), run_id)

    def count() -> int:
        found = backend.get_state()
        return 0 if found is None else len(pickle.loads(found[0]).participants)

    return count


def fqn_of(module: torch.nn.Module, name: str) -> str:
    """The name of a parameter, without the prefixes of wrappers (DDP, compile, checkpointing)."""
    from torch.distributed.checkpoint.state_dict import _get_fqns

    fqn: str
    (fqn,) = _get_fqns(module, name)  # only a flat parameter of FSDP1 has several names
    return fqn


def flattened(state: dict[str, Any]) -> tuple[dict[str, Any], dict[str, tuple[str | int, ...]]]:
    """Flatten a nested state as ``torch.distributed.checkpoint`` does.

    Returns the flat state, and the path of each key in the nested state.
    """
    from torch.distributed.checkpoint._nested_dict import flatten_state_dict

    return flatten_state_dict(state)


def num_holders(tensor: torch.Tensor) -> int:
    """Return the number of references to a tensor's storage, from tensors and from Python.

    Numbers of one storage can be compared; by itself one means nothing.
    """
    storage = tensor.untyped_storage()
    return int(_C._storage_Use_Count(storage._cdata)) + sys.getrefcount(storage)


def chunk_list(tensor: Any) -> list[Any]:
    """DCP's list of the boxes of a tensor that speaks its protocol (`checkpoints`)."""
    from vescale_fsdp.compat import checkpoints

    return checkpoints.chunk_list(tensor)


def write_items(fqn: str, tensor: Any) -> list[Any]:
    """DCP's items for the plan of a save of such a tensor."""
    from vescale_fsdp.compat import checkpoints

    return checkpoints.write_items(fqn, tensor)


def storage_info(path: str, start: int, num_bytes: int) -> Any:
    """Where ``torch.distributed.checkpoint`` finds one item: a file and a range of its bytes."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    return _StorageInfo(path, start, num_bytes)


def init_group(optimizer: torch.optim.Optimizer, group: dict[str, Any], *lists: list[Any]) -> Any:
    """Call torch's own ``_init_group``, which fills the lists of tensors for a step's kernels."""
    return cast(Any, type(optimizer))._init_group(optimizer, group, *lists)


def archive_records(path: Path) -> list[str]:
    """Names of the files in an archive of ``torch.save``, as ``torch.load`` finds them."""
    names: list[str] = torch._C.PyTorchFileReader(str(path)).get_all_records()
    return names


def neg_view(tensor: torch.Tensor) -> torch.Tensor:
    """A view whose elements are the negated ones, as of the imaginary part of a conjugate."""
    found: torch.Tensor = torch._neg_view(tensor)
    return found


def mesh_info(mesh: DeviceMesh, shard: int | None, replicate: int | None) -> Any:
    """FSDP2's description of a mesh and of its axes that shard and replicate."""
    if shard is None:
        return DDPMeshInfo(mesh, replicate_mesh_dim=replicate)
    if replicate is None:
        return FSDPMeshInfo(mesh, shard_mesh_dim=shard)
    return HSDPMeshInfo(mesh, shard_mesh_dim=shard, replicate_mesh_dim=replicate)


def free_workspaces(device: torch.device) -> None:
    """Free what cuBLAS has allocated for itself. It allocates it again at its next product."""
    if device.type == "cuda":
        _C._cuda_clearCublasWorkspaces()


def forget_stages(scaler: torch.amp.GradScaler) -> None:
    """Let a scaler forget which optimizers it has unscaled or stepped, as ``update`` does."""
    states: Any = scaler._per_optimizer_states
    states.clear()
