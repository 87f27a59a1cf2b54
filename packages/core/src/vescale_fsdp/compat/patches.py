"""What is added to objects and tables of torch; and the three functions that are wrapped."""

from __future__ import annotations

import functools
import inspect
import sys
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed._composable.checkpoint_activation import checkpoint as recompute
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY, RegistryItem
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer, _foreach_supported_types


def support_foreach(tensor_type: type[torch.Tensor]) -> None:
    """Let ``torch.optim`` use its foreach kernels for a tensor type. It compares exact types."""
    if tensor_type not in _foreach_supported_types:
        _foreach_supported_types.append(tensor_type)


def wrap_from_local(concerns: Callable[[Any], bool], from_local: Callable[..., Any]) -> None:
    """Let ``DTensor.from_local`` call ``from_local`` where it ``concerns`` a placement.

    If it is told a shape, torch's own asks placements nothing, and makes a plain DTensor, whose
    operators take ours for replication. Optimizers of other libraries make states so, and
    ``torch.distributed.checkpoint`` tensors for a state on meta.
    """
    original = DTensor.from_local
    names = ["local_tensor", "device_mesh", "placements", "run_check", "shape", "stride"]
    if [*inspect.signature(original).parameters][:6] != names:
        _step_aside(
            "DTensor.from_local",
            "it takes a RaggedShard for replication, so call vescale_fsdp.ragged.from_local",
        )
        return

    @functools.wraps(original)
    def wrapper(
        local_tensor: Any, device_mesh: Any = None, placements: Any = None, **options: Any
    ) -> Any:
        if placements is not None and any(map(concerns, placements)):
            return from_local(local_tensor, device_mesh, placements, **options)
        return original(local_tensor, device_mesh, placements, **options)

    DTensor.from_local = staticmethod(wrapper)  # type: ignore[method-assign]


def _step_aside(name: str, what: str) -> None:
    warnings.warn(
        f"{name} of torch {torch.__version__} is not known to vescale_fsdp: {what}", stacklevel=4
    )


def refuse_boxes(concerns: Callable[[Any], bool], message: str) -> None:
    """Let torch's function for the shape and the offset of a local tensor raise for our placements.

    It skips placements that it does not know, and would return the whole: ``zeros(placements=)``
    and torch's loading of whole state dicts go on with that.

    Args:
        message: with ``{placements}``.
    """
    from torch.distributed.tensor import _utils

    name = "compute_local_shape_and_global_offset"
    original = getattr(_utils, name)
    if [*inspect.signature(original).parameters][:3] != ["global_shape", "mesh", "placements"]:
        _step_aside(name, "it takes a RaggedShard for replication: do not call it for parameters")
        return

    @functools.wraps(original)
    def compute(global_shape: Any, mesh: Any, placements: Any, *rest: Any, **options: Any) -> Any:
        if any(map(concerns, placements)):
            raise NotImplementedError(message.format(placements=list(placements)))
        return original(global_shape, mesh, placements, *rest, **options)

    for module in [*sys.modules.values()]:  # files of torch that have imported it
        is_of_torch = getattr(module, "__name__", "").startswith("torch.distributed.")
        if is_of_torch and vars(module).get(name) is original:
            setattr(module, name, compute)


def refuse_lost_boxes(
    is_box: Callable[[Any], bool], several: str, shared: str, number: str
) -> None:
    """Let torch's HuggingFaceStorageWriter raise where it would lose boxes of our tensors.

    Its files hold one box for each name, the last. A rank's flat range may be several. And without
    ``save_distributed`` the names of files do not tell ranks apart, so the last to write wins. The
    first rank sees the plans of all. All raise, before anything is written. A tensor without
    dimensions is zero after its consolidation.

    Args:
        is_box: whether an item of a plan is a box of one of our tensors.
        several: the message for several boxes of one rank, with ``{name}``, of the tensor.
        shared: the message for several ranks in one file, with ``{name}``.
        number: the message for a tensor without dimensions that is consolidated, with ``{name}``.
    """
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter as Writer

    original = Writer.prepare_global_plan
    if [*inspect.signature(original).parameters] != ["self", "plans"]:
        _step_aside(
            "HuggingFaceStorageWriter",
            "save with planner=vescale_fsdp.checkpoint.SavePlanner() and save_distributed=True, "
            "else it loses parts of tensors",
        )
        return

    @functools.wraps(original)
    def prepare_global_plan(self: Any, plans: list[Any]) -> Any:
        writers: dict[str, int] = {}
        for rank, plan in enumerate(plans):
            seen: set[str] = set()
            for item in filter(is_box, plan.items):
                name = item.index.fqn
                if name in seen:
                    raise ValueError(several.format(name=name))
                seen.add(name)
                if self.enable_consolidation and not item.tensor_data.size:
                    raise ValueError(number.format(name=name))
                if writers.setdefault(name, rank) != rank and not self.save_distributed:
                    raise ValueError(shared.format(name=name))
        return original(self, plans)

    Writer.prepare_global_plan = prepare_global_plan  # type: ignore[method-assign]


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
