"""Changes to torch: some of its functions call ours for ragged tensors, and tables get entries."""

from __future__ import annotations

import functools
import inspect
import os
import queue
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import torch
from torch.distributed._composable.checkpoint_activation import checkpoint as recompute
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY, RegistryItem
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer, _foreach_supported_types


def route(function: Any, routed: Callable[..., Any]) -> None:
    """Turn every call of a function of torch into ``routed(original, *args, **options)``.

    The function object stays the same, but its code is replaced. So the change also holds for
    modules that imported the function by name before.
    """
    code, scope, name = function.__code__, function.__globals__, function.__name__
    original = FunctionType(code, scope, name, function.__defaults__, function.__closure__)
    original.__kwdefaults__ = function.__kwdefaults__
    original.__annotations__ = function.__annotations__

    def entry(*args: Any, _routed: Callable[..., Any], **options: Any) -> Any:
        return _routed(*args, **options)

    function.__code__ = entry.__code__.replace(co_freevars=code.co_freevars)
    function.__defaults__ = None
    function.__kwdefaults__ = {"_routed": functools.partial(routed, original)}
    function.__wrapped__ = original  # so that `inspect` shows the original signature


def _current_mesh() -> Any:
    """The mesh of the ``with`` statement around the call."""
    from torch.distributed.tensor import _api

    api: Any = _api
    return api._mesh_resources.get_current_mesh()


def route_redistribute(concerns: Callable[[Any], bool], redistribute: Callable[..., Any]) -> None:
    """Let ``DTensor.redistribute`` call ``redistribute`` if it ``concerns`` a target placement.

    Torch's own function does not know our placements. It would keep the local tensor and label it
    with the new placement: wrong data without an error. See docs/design/ragged.md.
    """

    def routed(
        original: Any, self: DTensor, device_mesh: Any = None, placements: Any = None, **rest: Any
    ) -> Any:
        ours = placements is not None and any(map(concerns, placements))
        return (redistribute if ours else original)(self, device_mesh, placements, **rest)

    route(DTensor.redistribute, routed)


def route_from_local(concerns: Callable[[Any], bool], from_local: Callable[..., Any]) -> None:
    """Let ``DTensor.from_local`` hand over to us when a placement concerns us.

    Torch's own makes a plain DTensor, which takes a placement that it does not know for
    replication. ``torch.distributed.checkpoint`` calls it for tensors on meta.
    """

    def routed(
        original: Any,
        local_tensor: Any,
        device_mesh: Any = None,
        placements: Any = None,
        *,
        stride: Any = None,
        **options: Any,
    ) -> Any:
        if placements is not None and any(map(concerns, placements)):  # always contiguous
            mesh = device_mesh or _current_mesh()
            return from_local(local_tensor, mesh, placements, **options)
        return original(local_tensor, device_mesh, placements, stride=stride, **options)

    route(DTensor.from_local, routed)


def route_creation(concerns: Callable[[Any], bool], create: Callable[..., DTensor]) -> None:
    """Let ``torch.distributed.tensor.zeros`` and the like call ``create`` for our placements."""
    from torch.distributed.tensor import _api

    api: Any = _api

    def routed(
        original: Any,
        init_op: Any,
        size: Any,
        device_mesh: Any = None,
        placements: Any = None,
        **options: Any,
    ) -> Any:
        if placements is not None and any(map(concerns, placements)):
            return create(init_op, size, device_mesh or _current_mesh(), placements, **options)
        return original(init_op, size, device_mesh, placements, **options)

    route(api._dtensor_init_helper, routed)


def refuse_boxes(concerns: Callable[[Any], bool], message: str) -> None:
    """Let torch's function for the shape and the offset of a local tensor raise for our placements.

    It skips placements that it does not know, and would return the whole.
    """
    from torch.distributed.tensor import _utils

    def routed(
        original: Any, global_shape: Any, mesh: Any, placements: Any, *rest: Any, **options: Any
    ) -> Any:
        if any(map(concerns, placements)):
            raise NotImplementedError(message.format(placements=list(placements)))
        return original(global_shape, mesh, placements, *rest, **options)

    route(_utils.compute_local_shape_and_global_offset, routed)


def route_distribution(
    concerns: Callable[[Any], bool],
    distribute: Callable[..., DTensor],
    is_ours: Callable[[Any], bool],
    fill: Callable[[Any, torch.Tensor], DTensor],
) -> None:
    """Let ``distribute_tensor`` and the loading of full state dicts support our placements.

    Torch's own functions raise for placements that they do not know, or treat each shard as one
    box, which a ragged shard need not be.

    Args:
        concerns: tells whether a placement is ours.
        distribute: replaces ``distribute_tensor(tensor, device_mesh, placements, *,
            src_data_rank)`` for our placements.
        is_ours: tells whether an entry of a state dict has one of our placements.
        fill: takes such an entry and a full tensor, and returns the entry with these values.
    """
    from torch.distributed import _state_dict_utils as utils
    from torch.distributed.tensor import _api

    api: Any = _api

    def routed(
        original: Any, tensor: Any, device_mesh: Any = None, placements: Any = None, **rest: Any
    ) -> Any:
        if placements is not None and any(map(concerns, placements)):
            return distribute(tensor, device_mesh or _current_mesh(), placements, **rest)
        return original(tensor, device_mesh, placements, **rest)

    def filled(original: Any, states: Any, keys: list[str], *args: Any, **options: Any) -> None:
        for key in keys:
            pair = states.get(key)
            if isinstance(pair, tuple) and is_ours(pair[0]):
                states[key] = fill(*pair)
        original(states, keys, *args, **options)

    def loaded(original: Any, full: Any, local: Any, *args: Any, **options: Any) -> None:
        # Torch replaces tensors without dimensions by plain ones. An optimizer would keep a plain
        # tensor as the state of a sharded parameter.
        ours = {key: value for key, value in local.items() if is_ours(value) and not value.dim()}
        original(full, local, *args, **options)
        for key in ours.keys() & local.keys():
            if not is_ours(local[key]):
                local[key] = fill(ours[key], local[key])

    route(api.distribute_tensor, routed)
    route(utils._distribute_tensors, filled)
    route(utils._broadcast_state_dict, loaded)
    route(utils._distribute_state_dict, loaded)


def route_numbers(number: Callable[[DTensor], Any]) -> None:
    """Let ``item()``, ``float()``, ``bool()`` and the like of any DTensor call ``number``.

    DTensor's own ``item`` gives each rank the number of its local tensor, even if that is only one
    part of a sum. DTensor has a table of handlers for single operators; this adds to it.
    """
    handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers
    # In inference mode a tensor subclass gets ``item`` itself, not the operator inside of it.
    for operator in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.item.default):
        handlers[operator] = lambda _, args, __: number(args[0])


_groups_of_optimizers: list[Callable[[Optimizer], list[Optimizer]]] = []


def route_state_creation(members: Callable[[Optimizer], list[Optimizer]]) -> None:
    """Let ``torch.distributed.checkpoint`` create the states of each optimizer in a group.

    Its state dict functions create the states of an optimizer by a step on gradients of zeros, but
    only if it has no state at all. In a group of optimizers, one member may have states while
    another has none yet.
    """
    from torch.distributed.checkpoint import state_dict as loading

    def routed(original: Any, optimizer: Optimizer, *args: Any) -> None:
        for member in members(optimizer):
            original(member, *args)

    _groups_of_optimizers.append(members)
    route(loading._init_optim_state, routed)


def members_of(optimizer: Optimizer) -> list[Optimizer]:
    """The members of a group of optimizers (`route_state_creation`), or the optimizer itself."""
    return _groups_of_optimizers[-1](optimizer) if _groups_of_optimizers else [optimizer]


def support_foreach(tensor_type: type[torch.Tensor]) -> None:
    """Let ``torch.optim`` use its foreach kernels for a tensor type. It compares exact types."""
    if tensor_type not in _foreach_supported_types:
        _foreach_supported_types.append(tensor_type)


def write_all_boxes() -> None:
    """Let safetensors that ``torch.distributed.checkpoint`` writes have all boxes of each tensor.

    Torch's writer keeps one tensor for each file and name, the last. A flat range may be several
    boxes, and then the others get files of their own, ``...-box-00002.safetensors``. Its readers
    and its consolidation take all files of the directory.
    """
    from torch.distributed.checkpoint import filesystem
    from torch.distributed.checkpoint._consolidate_hf_safetensors import (
        _write_sub_tensor_to_file_optimized as copy_into_whole,
    )

    def written(original: Any, self: Any, planner: Any, files: queue.Queue[Any]) -> Any:
        if self.serialization_format == filesystem.SerializationFormat.SAFETENSORS:
            given, files = files, queue.Queue()
            while not given.empty():
                for each in _one_box_of_each_name(self, *given.get()):
                    files.put(each)
        return original(self, planner, files)

    def copied(original: Any, whole: Any, part: Any, size: int, shape: Any, *rest: Any) -> None:
        if shape:
            original(whole, part, size, shape, *rest)
        else:  # torch leaves a tensor without dimensions zero
            whole[:] = part

    route(filesystem._FileSystemWriter._write_data, written)
    route(copy_into_whole, copied)


def _one_box_of_each_name(writer: Any, path: Any, key: str, items: list[Any]) -> Iterator[Any]:
    """The files, ``(path, name, items)``, that hold what one of torch's writers puts into one."""
    counts: dict[str, int] = {}
    files: list[list[Any]] = [[]]
    for item in items:
        number = counts.get(item.index.fqn, 0)
        counts[item.index.fqn] = number + 1
        if number == len(files):
            files.append([])
        files[number].append(item)
    yield path, key, files[0]

    def place(number: int) -> tuple[Any, str]:
        stem, suffix = os.path.splitext(key)
        name = f"{stem}-box-{number + 1:05}{suffix}"
        return writer.fs.concat_path(writer.path, name), name

    number = 1
    for file in files[1:]:
        yield *place(number), file
        number += 1
    while writer.fs.exists(place(number)[0]):  # an older save into this directory had more
        writer.fs.rm_file(place(number)[0])
        number += 1


def refuse_overwriting(message: str) -> None:
    """Let torch's HuggingFaceStorageWriter raise if files or tensors would overwrite each other.

    Without ``save_distributed`` the names of files do not tell ranks apart, so the last rank to
    write would win. The first rank sees the plans of all. All raise, before anything is written.

    Args:
        message: with ``{name}``, of a tensor in such a file.
    """
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

    def planned(original: Any, self: Any, plans: list[Any]) -> Any:
        writers: dict[int, int] = {}
        seen: set[str] = set()
        for rank, plan in enumerate([] if self.save_distributed else plans):
            for item in plan.items:
                name = item.index.fqn
                file = (self.fqn_to_index_mapping or {}).get(name, 1)
                if writers.setdefault(file, rank) != rank or name in seen:
                    raise ValueError(message.format(name=name))
                seen.add(name)
        return original(self, plans)

    route(HuggingFaceStorageWriter.prepare_global_plan, planned)


def set_fsdp2_state(module: torch.nn.Module, state: object) -> None:
    """Let torch's ``fully_shard.state(module)`` return ``state``.

    Torch's other composable functions see that the module is sharded: ``replicate`` leaves it out.
    """
    module.__dict__.setdefault(STATE_KEY, {})[inspect.unwrap(torch_fully_shard)] = state
    registry = module.__dict__.setdefault(REGISTRY_KEY, OrderedDict())
    registry["fully_shard"] = RegistryItem()


def unregister_recompute(module: torch.nn.Module) -> None:
    """Remove torch's composable ``checkpoint`` from a module."""
    vars(module)[STATE_KEY].pop(inspect.unwrap(recompute), None)
    unregister(module, "checkpoint", recompute.__module__)


def unregister(module: torch.nn.Module, name: str, hooks_of: str) -> None:
    """Remove the name of a composable function from a module, and its hooks that a file defines.

    Args:
        name: "fully_shard" makes a module an FSDP2 one for others.
        hooks_of: ``__module__`` of these hooks.
    """
    vars(module)[REGISTRY_KEY].pop(name, None)
    kinds = ("forward_pre", "forward", "state_dict_pre", "state_dict")
    for kind in (*kinds, "load_state_dict_pre", "load_state_dict_post"):
        hooks = vars(module)[f"_{kind}_hooks"]
        for key, each in list(hooks.items()):
            if getattr(each, "hook", each).__module__ == hooks_of:
                del hooks[key]
                for flag in ("with_kwargs", "always_called"):
                    vars(module).get(f"_{kind}_hooks_{flag}", {}).pop(key, None)


def replace_init_group(optimizer: Optimizer, init_group: Callable[..., Any]) -> None:
    """Let ``step`` of this optimizer call another ``_init_group``. Copies of it do not call it."""
    vars(optimizer)["_init_group"] = init_group


def has_other_init_group(optimizer: Optimizer) -> bool:
    """Whether `replace_init_group` was called for it."""
    return "_init_group" in vars(optimizer)


@contextmanager
def without_step_hooks(optimizer: Optimizer, keeps: Callable[[Any], bool]) -> Iterator[None]:
    """A context in which a step runs only those of the optimizer's hooks that ``keeps`` is true of.

    Hooks of all optimizers do not run.
    """
    names = ["_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"]
    names_of_all = ["_global_optimizer_pre_hooks", "_global_optimizer_post_hooks"]
    # A wrapper that is an Optimizer by type only has none.
    places: list[tuple[Any, str]] = [(optimizer, name) for name in names if name in vars(optimizer)]
    of_all = sys.modules[Optimizer.__module__]  # torch.optim has deleted its name for it
    places += [(of_all, name) for name in names_of_all]
    before = [getattr(place, name) for place, name in places]
    try:
        for (place, name), hooks in zip(places, before, strict=True):
            kept = hooks.items() if place is optimizer else ()
            setattr(place, name, OrderedDict((key, each) for key, each in kept if keeps(each)))
        yield
    finally:
        for (place, name), hooks in zip(places, before, strict=True):
            setattr(place, name, hooks)


def register_first_step_post_hook(optimizer: Optimizer, hook: Callable[..., None]) -> None:
    """Register a hook that runs before the other hooks after a step."""
    handle = optimizer.register_step_post_hook(hook)
    optimizer._optimizer_step_post_hooks.move_to_end(handle.id, last=False)  # type: ignore[attr-defined]


def register_first_forward_hook(module: torch.nn.Module, hook: Callable[..., Any]) -> None:
    """Call ``hook`` after each forward, before the hooks that are there, but after recomputation.

    ``torch.distributed._composable.checkpoint`` opens a context in its hook before forward, and has
    to close it first.
    """
    module.register_forward_hook(hook, prepend=True, always_call=True)
    for key, each in list(module._forward_hooks.items()):
        if getattr(each, "__module__", None) == recompute.__module__:
            module._forward_hooks.move_to_end(key, last=False)  # type: ignore[attr-defined]
