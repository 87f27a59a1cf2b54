"""What differs between torch 2.11 and 2.13, and the private parts of torch that we rely on.

Everything that is not public API, or that changed its name, is reached from here and from
nowhere else, so that a new torch release is a change to one file.
"""

from __future__ import annotations

import datetime
import functools
import inspect
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import FunctionType
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store
from torch.autograd import forward_ad
from torch.autograd.grad_mode import _unsafe_preserve_version_counter as preserve_versions
from torch.distributed._composable.contract import STATE_KEY as COMPOSABLE_STATE
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._ops._math_ops import _NormPartial as NormPartial
from torch.distributed.tensor.placement_types import _StridedShard as StridedShard
from torch.optim.optimizer import _foreach_supported_types
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

from vescale_fsdp import backends, devices, waiting

__all__ = [
    "COMPOSABLE_STATE",
    "DTENSOR_SUBCLASSES_NEED_A_MODE",
    "TENSOR_DATA",
    "AsyncCollectiveTensor",
    "DTensorSpec",
    "DispatchMode",
    "NormPartial",
    "ShardPlacementResult",
    "Store",
    "StridedShard",
    "TensorMeta",
    "all_gather_many",
    "all_gather_single",
    "all_reduce",
    "all_reduce_max",
    "all_to_all_single",
    "axis_ranks",
    "broadcast",
    "call_in_mode",
    "concatenate_meshes",
    "current_backward",
    "default_store",
    "flattened",
    "forget_meshes",
    "fqn_of",
    "group_over",
    "has_other_init_group",
    "increment_versions",
    "init_group",
    "is_fsdp2_collective",
    "is_transforming",
    "is_wrapper",
    "local_tensor",
    "members_of",
    "mesh_group",
    "mesh_over",
    "new_gloo_group",
    "new_group",
    "outside_functorch",
    "preserve_versions",
    "process_group_collectives",
    "queue_backward_callback",
    "reduce_scatter_many",
    "reduce_scatter_single",
    "register_first_step_post_hook",
    "replace_init_group",
    "route_distribution",
    "route_numbers",
    "route_redistribute",
    "route_state_creation",
    "set_fsdp2_state",
    "set_versions",
    "storages_of",
    "store_wait",
    "support_foreach",
    "symmetric_memory",
    "symmetric_memory_gather",
    "takes_functional_gradient",
    "uses_symmetric_memory",
    "wish_of_backward",
    "without_torch_function",
]


TENSOR_DATA: Any = torch.Tensor.data  # the descriptor, for a subclass with a ``data`` of its own


try:
    from torch.distributed.fsdp._fully_shard._fsdp_common import ShardPlacementResult
except ImportError:  # older than ShardPlacementResult: nobody can make one

    class ShardPlacementResult:  # type: ignore[no-redef]
        """Stands for what this version of torch does not have."""


def all_gather_single(
    output: torch.Tensor, input: torch.Tensor, group: dist.ProcessGroup
) -> dist.Work:
    """Start an even all-gather into one flat tensor. Resolved at call time, so tools can count."""
    if input.dtype.itemsize == 1:  # gloo does not know floats of eight bits
        output, input = output.view(torch.uint8), input.view(torch.uint8)
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    there, sent = _reachable(output, group, fills=True), _reachable(input, group)
    work: dist.Work = gather(there, sent, group=group, async_op=True)
    return _under_way(work, there, output, group, "an all-gather")


def reduce_scatter_single(
    output: torch.Tensor, input: torch.Tensor, op: Any, group: dist.ProcessGroup
) -> dist.Work:
    """Start an even reduce-scatter of one flat tensor."""
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    there, sent = _reachable(output, group, fills=True), _reachable(input, group)
    work: dist.Work = scatter(there, sent, op=op, group=group, async_op=True)
    return _under_way(work, there, output, group, "a reduce-scatter")


def all_to_all_single(
    output: torch.Tensor,
    input: torch.Tensor,
    group: dist.ProcessGroup,
    output_splits: list[int] | None = None,
    input_splits: list[int] | None = None,
) -> dist.Work:
    """Start an all-to-all of one flat tensor: even, or by the elements for and from each rank."""
    there, sent = _reachable(output, group, fills=True), _reachable(input, group)
    work: dist.Work = dist.all_to_all_single(
        there, sent, output_splits, input_splits, group=group, async_op=True
    )
    return _under_way(work, there, output, group, "an all-to-all")


def all_gather_many(
    outputs: list[torch.Tensor], inputs: list[torch.Tensor], group: dist.ProcessGroup
) -> Any:
    """Start several even all-gathers as one operation, where the group's backend has that."""
    with dist.distributed_c10d._coalescing_manager(group, async_ops=True) as several:
        for output, input in zip(outputs, inputs, strict=True):
            all_gather_single(output, input, group)
    return several


def reduce_scatter_many(
    outputs: list[torch.Tensor], inputs: list[torch.Tensor], op: Any, group: dist.ProcessGroup
) -> Any:
    """Start several even reduce-scatters as one operation, where the group's backend has that."""
    with dist.distributed_c10d._coalescing_manager(group, async_ops=True) as several:
        for output, input in zip(outputs, inputs, strict=True):
            reduce_scatter_single(output, input, op, group)
    return several


def _reachable(
    tensor: torch.Tensor, group: dist.ProcessGroup, *, fills: bool = False
) -> torch.Tensor:
    """The tensor, or where the group cannot reach it, one in its place that it can reach.

    Args:
        fills: the collective writes all of it, so that its values need not come with it.
    """
    device = backends.collective_device(group, tensor.device)
    if device == tensor.device:
        return tensor
    return torch.empty_like(tensor, device=device) if fills else tensor.to(device)


def _under_way(
    work: dist.Work, there: torch.Tensor, here: torch.Tensor, group: dist.ProcessGroup, what: str
) -> dist.Work:
    """What to wait for, until the result is where it was asked for."""
    work = waiting.bounded(work, there, group, what)
    return work if there is here else cast(dist.Work, backends.Detour(work, there, here))


def _default_timeout() -> datetime.timedelta | None:
    """That of ``init_process_group``, which new groups do not take over by themselves."""
    return waiting.timeout_of(dist.group.WORLD)


def new_group(ranks: list[int], like: dist.ProcessGroup | None = None) -> dist.ProcessGroup:
    """A communicator of its own for these global ranks, in this order; only they have to call.

    Args:
        like: a group whose backends it shall have, such as that of a mesh; None for the default
            group.

    Raises:
        NotImplementedError: the ranks are not ascending, and this torch would sort them.
    """
    options: dict[str, Any] = {"timeout": _default_timeout()}
    if ranks != sorted(ranks):
        if "sort_ranks" not in inspect.signature(dist.new_group).parameters:
            raise NotImplementedError(
                f"a mesh with ranks {ranks} along an axis needs a newer torch than "
                f"{torch.__version__}; give the ranks in ascending order"
            )
        options["sort_ranks"] = False
    like = like or dist.group.WORLD
    assert like is not None, "a group is made in an initialised torch.distributed"
    options["backend"] = backends.spelling_of(like)
    kinds = [kind for kind, name in backends.backends_of(like).items() if name == "nccl"]
    if kinds and dist.is_nccl_available():
        options["pg_options"] = _nccl_options(options["timeout"], like, kinds[0])
    with _not_split():
        group = dist.new_group(ranks, use_local_synchronization=True, **options)
    assert isinstance(group, dist.ProcessGroup), "the caller is one of the ranks"
    waiting.register(group)
    return group


def new_gloo_group() -> dist.ProcessGroup | None:
    """A group of all ranks for messages on the CPU, for a long wait. All ranks call.

    None, the default group, in a build without gloo.
    """
    if not dist.is_gloo_available():
        return None
    default, long = _default_timeout(), datetime.timedelta(minutes=30)
    timeout = long if default is None else max(default, long)
    with _not_split():
        group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=timeout)
    return group


def fqn_of(module: torch.nn.Module, name: str) -> str:
    """The name of a parameter without what wrappers (DDP, compile, checkpointing) put in front."""
    from torch.distributed.checkpoint.state_dict import _get_fqns

    names = _get_fqns(module, name)
    assert len(names) == 1, "only the flat parameters of FSDP1 have several names"
    fqn: str = next(iter(names))
    return fqn


def flattened(state: dict[str, Any]) -> tuple[dict[str, Any], dict[str, tuple[str | int, ...]]]:
    """A nested state as ``torch.distributed.checkpoint`` flattens it, and the path of each key."""
    from torch.distributed.checkpoint._nested_dict import flatten_state_dict

    return flatten_state_dict(state)


def _nccl_options(
    timeout: datetime.timedelta | None, like: dist.ProcessGroup, device_type: str
) -> Any:
    """Those of the group ``like``, but on streams of high priority, as FSDP2's are.

    A collective is a few blocks. They start before those of a long kernel that was queued earlier.
    """
    nccl: Any = dist.ProcessGroupNCCL  # not in builds for CPUs
    options = nccl.Options(is_high_priority_stream=True)
    # With it a user says how collectives run, by copy engines for example.
    given = backends.backend_of(like, device_type).options
    options.config = getattr(given, "config", options.config)
    if timeout is not None:
        options._timeout = timeout
    return options


@contextmanager
def _not_split() -> Iterator[None]:
    """Within it, new groups are not split from the default group.

    Where that was given its device (``init_process_group(device_id=...)``) NCCL would split it, and
    all of its ranks would have to call. Those of another pipeline stage do not.
    """
    world = dist.group.WORLD
    device = None if world is None else world.bound_device_id
    if world is None or device is None:
        yield
        return
    world.bound_device_id = None
    try:
        yield
    finally:
        world.bound_device_id = device


_GROUPS: weakref.WeakKeyDictionary[
    dist.ProcessGroup, dict[tuple[str, tuple[int, ...]], dist.ProcessGroup]
]
_GROUPS = weakref.WeakKeyDictionary()  # by default group: a new world has new communicators


def group_over(ranks: list[int], like: dist.ProcessGroup) -> dist.ProcessGroup:
    """A communicator over these global ranks, in this order, made at first use and kept.

    All of them call.

    Args:
        like: a group whose backends it has.
    """
    world = dist.group.WORLD
    assert world is not None, "a device mesh has initialised torch.distributed"
    spelling = backends.spelling_of(like)
    if ranks == [*range(dist.get_world_size())] and spelling == backends.spelling_of(world):
        return world
    known, key = _GROUPS.setdefault(world, {}), (spelling, tuple(ranks))
    if key not in known:
        known[key] = new_group(ranks, like)
    return known[key]


def mesh_over(ranks: list[int], like: DeviceMesh) -> DeviceMesh:
    """A mesh of one axis over these global ranks, in this order, made at first use and kept.

    All of them call.

    Args:
        like: a mesh whose devices and backends it has.
    """
    group, device_type = group_over(ranks, mesh_group(like, 0)), like.device_type
    known = _MESHES.setdefault(group, {})
    if device_type not in known:
        known[device_type] = DeviceMesh.from_group(group, device_type, mesh_dim_names=("data",))
    return known[device_type]


_MESHES: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[str, DeviceMesh]]
_MESHES = weakref.WeakKeyDictionary()  # by device type


def all_reduce(
    tensor: torch.Tensor, group: dist.ProcessGroup, op: Any = dist.ReduceOp.SUM
) -> dist.Work:
    """Start a sum over the ranks of ``group``, or what ``op`` says, in place."""
    there = _reachable(tensor, group)
    work: dist.Work = dist.all_reduce(there, op=op, group=group, async_op=True)
    return _under_way(work, there, tensor, group, "an all-reduce")


def all_reduce_max(tensor: torch.Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Start taking the largest of each element over the ranks of ``group``, in place."""
    return all_reduce(tensor, group, dist.ReduceOp.MAX)


def broadcast(tensor: torch.Tensor, source: int, group: dist.ProcessGroup) -> dist.Work:
    """Start a broadcast from a global rank."""
    there = _reachable(tensor, group)
    work: dist.Work = dist.broadcast(there, source, group=group, async_op=True)
    return _under_way(work, there, tensor, group, "a broadcast")


def _route(function: Any, routed: Callable[..., Any]) -> None:
    """Let every call of a function of torch become ``routed(original, *args, **options)``.

    The function object stays the same and gets other code: it does not matter which modules have
    imported it by its name before.
    """
    code, closure = function.__code__, function.__closure__
    original = FunctionType(
        code, function.__globals__, function.__name__, function.__defaults__, closure
    )
    original.__kwdefaults__ = function.__kwdefaults__
    original.__annotations__ = function.__annotations__

    def entry(*args: Any, _routed: Callable[..., Any], **options: Any) -> Any:
        return _routed(*args, **options)

    function.__code__ = entry.__code__.replace(co_freevars=code.co_freevars)
    function.__defaults__ = None
    function.__kwdefaults__ = {"_routed": functools.partial(routed, original)}
    function.__wrapped__ = original  # of which `inspect` shows the signature


def route_redistribute(
    concerns: Callable[[Any], bool], redistribute: Callable[..., DTensor]
) -> None:
    """Let ``DTensor.redistribute`` hand over to us when a target placement concerns us.

    Torch's own keeps the local tensor as it is for a placement that it does not know, and labels
    it with that placement: wrong data without an error (torch 2.13). Everything else goes to
    torch's method, unchanged. The only method of torch that we touch (`route_distribution` has the
    functions); see docs/design/ragged.md.
    """

    def routed(
        original: Callable[..., DTensor],
        tensor: DTensor,
        device_mesh: Any = None,
        placements: Any = None,
        **options: Any,
    ) -> DTensor:
        ours = placements is not None and any(map(concerns, placements))
        moving = redistribute if ours else original
        return moving(tensor, device_mesh, placements, **options)

    _route(DTensor.redistribute, routed)


def route_distribution(
    concerns: Callable[[Any], bool],
    distribute: Callable[..., DTensor],
    is_ours: Callable[[Any], bool],
    fill: Callable[[Any, torch.Tensor], DTensor],
) -> None:
    """Let ``distribute_tensor`` and the loading of full state dicts hand over what concerns us.

    Torch's own raise for a placement that they do not know, or cut boxes where there are none.

    Args:
        concerns: whether a placement is ours.
        distribute: for ``distribute_tensor(tensor, device_mesh, placements, *, src_data_rank)``.
        is_ours: whether an entry of a state dict is.
        fill: gives such an entry with the values of a full tensor.
    """
    from torch.distributed import _state_dict_utils as utils
    from torch.distributed.tensor import _api

    api: Any = _api

    def routed(
        original: Callable[..., DTensor],
        full_tensor: torch.Tensor,
        device_mesh: DeviceMesh | None = None,
        placements: Any = None,
        **options: Any,
    ) -> DTensor:
        if placements is not None and any(map(concerns, placements)):
            mesh = device_mesh or api._mesh_resources.get_current_mesh()
            return distribute(full_tensor, mesh, placements, **options)
        return original(full_tensor, device_mesh, placements, **options)

    def filled(
        fill_others: Callable[..., None],
        states: dict[str, Any],
        keys: list[str],
        *args: Any,
        **options: Any,
    ) -> None:
        for key in keys:
            pair = states.get(key)
            if isinstance(pair, tuple) and is_ours(pair[0]):
                states[key] = fill(*pair)
        fill_others(states, keys, *args, **options)

    def loaded(
        load: Callable[..., None],
        full: dict[str, Any],
        local: dict[str, Any],
        *args: Any,
        **options: Any,
    ) -> None:
        # It puts plain tensors in the place of those without dimensions. An optimizer would keep
        # the plain tensor as the state of a sharded parameter.
        ours = {key: value for key, value in local.items() if is_ours(value) and not value.dim()}
        load(full, local, *args, **options)
        for key in ours.keys() & local.keys():
            if not is_ours(local[key]):
                local[key] = fill(ours[key], local[key])

    _route(api.distribute_tensor, routed)
    _route(utils._distribute_tensors, filled)
    _route(utils._broadcast_state_dict, loaded)
    _route(utils._distribute_state_dict, loaded)


def route_numbers(number: Callable[[DTensor], Any]) -> None:
    """Let ``item()``, ``float()``, ``bool()`` and the like of any DTensor be ``number(tensor)``.

    DTensor has a table for operators that go another way than its own. Its own gives each rank the
    number of its local tensor, also where that is one part of a sum.
    """

    handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers
    # In inference mode ``item`` is not taken apart before it comes to a tensor subclass.
    for operator in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.item.default):
        handlers[operator] = lambda _, args, __: number(args[0])


def route_state_creation(
    members_of: Callable[[torch.optim.Optimizer], list[torch.optim.Optimizer]],
) -> None:
    """Let state dict functions of ``torch.distributed.checkpoint`` see the members of a group.

    They make the states of an optimizer that has none at all, by a step on gradients of zeros. In
    a group one member may have states while another has none yet.
    """
    from torch.distributed.checkpoint import state_dict as loading

    global _members_of
    _members_of = members_of

    def routed(original: Callable[..., None], optimizer: torch.optim.Optimizer, *args: Any) -> None:
        for member in members_of(optimizer):
            original(member, *args)

    _route(loading._init_optim_state, routed)


_members_of: Callable[[torch.optim.Optimizer], list[torch.optim.Optimizer]] | None = None


def members_of(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """The members of a group of optimizers, as `route_state_creation` knows them, or itself."""
    return [optimizer] if _members_of is None else _members_of(optimizer)


def process_group_collectives(group: dist.ProcessGroup) -> tuple[Any, Any]:
    """FSDP2's gather and reduce-scatter that let the process group allocate."""
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives as fsdp2

    return fsdp2.ProcessGroupAllocAllGather(group), fsdp2.ProcessGroupAllocReduceScatter(group)


def allocates(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether the backend of ``group`` can allocate memory for its collectives."""
    return bool(group._get_backend(device).supports_tensor_alloc(device))


def symmetric_memory_gather(group: dist.ProcessGroup, backend: str) -> Any:
    """FSDP2's gather through symmetric memory. Collective: it has ``group`` connect."""
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives as fsdp2

    return fsdp2.SymmMemAllGather(group, cast(Any, backend))


def symmetric_memory(device: torch.device) -> AbstractContextManager[None]:
    """A context in which this thread allocates memory that all ranks can reach."""
    from torch.distributed import _symmetric_memory as symmetric

    return devices.symmetric_memory(device, symmetric.get_mem_pool(device))


def uses_symmetric_memory(collective: object) -> bool:
    """Whether a custom gather is FSDP2's, through symmetric memory."""
    return is_fsdp2_collective(collective) and "SymmMem" in type(collective).__name__


def is_fsdp2_collective(collective: object) -> bool:
    """Whether a custom gather or reduce-scatter is one of FSDP2's own."""
    return type(collective).__module__.startswith("torch.distributed.fsdp.")


def concatenate_meshes(meshes: list[DeviceMesh]) -> DeviceMesh:
    """One mesh with the axes of several that are cut from the same mesh.

    Raises:
        RuntimeError: they are not.
    """
    joined: DeviceMesh = DeviceMesh._concatenate(meshes)
    return joined


def forget_meshes() -> None:
    """Empty DTensor's caches of specs, which hold meshes of a world that is gone.

    A mesh of a new world may equal one of the old, but its process groups are others.
    """
    from torch.distributed.tensor import _redistribute

    propagator: Any = DTensor._op_dispatcher.sharding_propagator
    propagate = propagator.propagate_op_sharding
    getattr(propagate, "cache", propagate).cache_clear()
    _redistribute._gen_transform_infos.cache_clear()
    clear = getattr(torch._C, "_clear_DTensor_sharding_propagator_cache", None)
    if clear is not None:
        clear()


def set_fsdp2_state(module: torch.nn.Module, state: object) -> None:
    """Make ``state`` what torch's ``fully_shard.state(module)`` returns."""
    states = module.__dict__.setdefault(COMPOSABLE_STATE, {})
    states[inspect.unwrap(torch_fully_shard)] = state


def is_wrapper(tensor: torch.Tensor) -> bool:
    """Whether a tensor's data are those of other tensors, which it wraps (a tensor subclass)."""
    return is_traceable_wrapper_subclass(tensor)


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a DTensor, as it lies there; a plain tensor itself."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def storages_of(tensor: torch.Tensor) -> set[int]:
    """The ``_cdata`` of the storage under a tensor, or of those under the tensors it wraps."""
    if not is_traceable_wrapper_subclass(tensor):
        return {tensor.untyped_storage()._cdata}
    names, _ = tensor.__tensor_flatten__()
    return {each for name in names for each in storages_of(getattr(tensor, name))}


def default_store() -> Store:
    """The key-value store behind the default process group."""
    store: Store = dist.distributed_c10d._get_default_store()
    return store


def store_wait(store: Store, key: str, timeout_s: float) -> None:
    """Block until ``key`` is set. Raises ``dist.DistStoreError`` after ``timeout_s`` seconds."""
    store.wait([key], datetime.timedelta(seconds=timeout_s))


def increment_versions(tensors: Iterable[torch.Tensor]) -> None:
    """Raise the version counters by which autograd knows of writes."""
    torch._C._increment_version(tensors)


def set_versions(tensors: tuple[torch.Tensor, ...], versions: tuple[int, ...]) -> None:
    """Set the version counters by which autograd knows of writes."""
    torch._C._autograd._unsafe_set_version_counter(tensors, versions)


def without_torch_function() -> AbstractContextManager[None]:
    """A context in which an attribute of a tensor subclass is read in half of the time."""
    return torch._C.DisableTorchFunctionSubclass()


def outside_functorch() -> AbstractContextManager[None]:
    """A context in which the transformations of ``torch.func`` do not see what is done."""
    return torch._C._DisableFuncTorch()


def current_backward() -> int:
    """Identity of the autograd graph task that this thread runs, or -1 outside a backward."""
    return int(torch._C._current_graph_task_id())


def is_transforming() -> bool:
    """Whether ``torch.func`` or forward-mode derivatives see what is done now."""
    transforming: bool = torch._C._are_functorch_transforms_active()
    return transforming or forward_ad._current_level >= 0


def takes_functional_gradient() -> bool:
    """Whether ``torch.func.grad`` or ``vjp`` (and what is made of them) runs now."""
    if not torch._C._are_functorch_transforms_active():
        return False
    functorch = torch._C._functorch
    stack = functorch.get_interpreter_stack() or []
    return any(each.key() == functorch.TransformType.Grad for each in stack)


def wish_of_backward(node: Any) -> Literal["leaf", "nothing", "value"]:
    """What the backward that runs now does with a leaf, of which ``node`` takes the gradient.

    It accumulates the gradient there (``leaf``), returns it to who has called
    ``torch.autograd.grad`` (``value``), or does not look at it.
    """
    try:
        return "leaf" if torch._C._will_engine_execute_node(node) else "nothing"
    except RuntimeError:  # what torch says of a leaf whose gradient is returned
        return "value"


def queue_backward_callback(callback: Callable[[], None]) -> None:
    """Run ``callback`` when the backward that is running now has visited all of its nodes."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def support_foreach(tensor_type: type[torch.Tensor]) -> None:
    """Let ``torch.optim`` pick its foreach kernels for a tensor type: it goes by exact type."""
    if tensor_type not in _foreach_supported_types:
        _foreach_supported_types.append(tensor_type)


def init_group(optimizer: torch.optim.Optimizer, group: dict[str, Any], *lists: list[Any]) -> Any:
    """Torch's own ``_init_group``: fills the lists of tensors that the kernels of a step get."""
    return cast(Any, type(optimizer))._init_group(optimizer, group, *lists)


def replace_init_group(optimizer: torch.optim.Optimizer, init_group: Callable[..., Any]) -> None:
    """Let ``step`` of this optimizer call another function for that. Copies of it will not."""
    vars(optimizer)["_init_group"] = init_group


def has_other_init_group(optimizer: torch.optim.Optimizer) -> bool:
    """Whether `replace_init_group` was called for it."""
    return "_init_group" in vars(optimizer)


def register_first_step_post_hook(
    optimizer: torch.optim.Optimizer, hook: Callable[..., None]
) -> None:
    """Register a hook that runs before the other hooks after a step."""
    handle = optimizer.register_step_post_hook(hook)
    optimizer._optimizer_step_post_hooks.move_to_end(handle.id, last=False)  # type: ignore[attr-defined]


# Before 2.13, operators on a subclass of DTensor go to DTensor's own dispatch in C++, past the
# ``__torch_dispatch__`` of the subclass. A dispatch mode is asked before that.
_VERSION = tuple(int(part) for part in torch.__version__.split(".")[:2])
DTENSOR_SUBCLASSES_NEED_A_MODE = _VERSION < (2, 13)


class DispatchMode(TorchDispatchMode):
    """Sends the operators on tensors of one type to a function, and lets all others pass."""

    def __init__(self, tensor_type: type[torch.Tensor], dispatch: Callable[..., Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tensor_type, self._dispatch = tensor_type, dispatch

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Called by torch for every operator while the mode is entered."""
        leaves = torch.utils._pytree.tree_leaves((args, kwargs or {}))
        if any(isinstance(leaf, self._tensor_type) for leaf in leaves):
            return self._dispatch(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


def call_in_mode(mode: DispatchMode, func: Any, args: Any, kwargs: Any) -> Any:
    """What a ``__torch_function__`` does that leaves all to ``mode``."""
    with torch._C.DisableTorchFunctionSubclass(), mode:
        return func(*args, **(kwargs or {}))


def axis_ranks(mesh: DeviceMesh, axis: int) -> list[int]:
    """The global ranks along one axis of a mesh through the caller, in the order of the axis.

    That order is the one that placements go by; the mesh's own process group may have another.
    """
    coordinate = mesh.get_coordinate()
    assert coordinate is not None, "the caller is part of the mesh"
    index = tuple(slice(None) if a == axis else c for a, c in enumerate(coordinate))
    ranks: list[int] = mesh.mesh[index].tolist()
    return ranks


def mesh_group(mesh: DeviceMesh, axis: int) -> dist.ProcessGroup:
    """The process group along one axis of a mesh."""
    group: dist.ProcessGroup = mesh.get_group(axis)
    return group


def current_node() -> Any:
    """The autograd node that this thread runs now, or None outside a backward."""
    return torch._C._current_autograd_node()
