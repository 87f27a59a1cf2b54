"""The hooks that ``fully_shard`` puts on a module. They find the unit through the module."""

from __future__ import annotations

from typing import Any

from torch import nn

from vescale_fsdp.engine.unit import unit_of

__all__ = ["register_hooks"]


def register_hooks(module: nn.Module) -> None:
    """Hooks that find the unit through the module, and so keep neither alive."""

    def pre_forward(module: nn.Module, args: Any, kwargs: Any) -> Any:
        unit = unit_of(module)
        assert unit is not None, "the hook is only on sharded modules"
        return unit.pre_forward(module, args, kwargs)

    def post_forward(module: nn.Module, args: Any, output: Any) -> Any:
        unit = unit_of(module)
        assert unit is not None, "the hook is only on sharded modules"
        return unit.post_forward(output)

    def before_state_dict(module: nn.Module, *_: Any) -> None:
        unit = unit_of(module)
        if unit is not None:
            unit.reshard()

    def after_state_dict(module: nn.Module, state_dict: Any, *_: Any) -> None:
        unit = unit_of(module)
        if unit is not None and unit.pins:  # gathered: they must outlive the context
            unit.copy_gathered(state_dict)

    def before_load(module: nn.Module, *_: Any) -> None:
        unit = unit_of(module)
        if unit is not None:
            unit.refuse_if_pinned("load_state_dict")
            unit.reshard()

    def after_load(module: nn.Module, _: Any) -> None:
        unit = unit_of(module)
        if unit is not None and unit.is_sharded:
            for group in unit.groups:
                group.rebind()

    module.register_forward_pre_hook(pre_forward, prepend=True, with_kwargs=True)
    module.register_forward_hook(post_forward, always_call=True)
    module.register_state_dict_pre_hook(before_state_dict)
    module.register_state_dict_post_hook(after_state_dict)
    module.register_load_state_dict_pre_hook(before_load)
    module.register_load_state_dict_post_hook(after_load)
