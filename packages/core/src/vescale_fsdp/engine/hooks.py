"""What calls a unit when its module runs: hooks, and methods that are wrapped like ``forward``.

All of them find the unit through the module, so that they keep neither alive. Dynamo does not look
into those around a forward: its graphs end where a unit begins and where it ends, as with FSDP2.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from vescale_fsdp.engine import calls
from vescale_fsdp.engine.unit import unit_of


def register_hooks(module: nn.Module) -> None:
    """Hooks that find the unit through the module, and so keep neither alive."""

    def before_state_dict(module: nn.Module, *_: Any) -> None:
        unit = unit_of(module)
        if unit is not None:
            unit.rest()

    def after_state_dict(module: nn.Module, state_dict: Any, *_: Any) -> None:
        unit = unit_of(module)
        if unit is not None and unit.num_pins:  # gathered: they must outlive the context
            unit.copy_gathered(state_dict)

    def before_load(module: nn.Module, *_: Any) -> None:
        unit = unit_of(module)
        if unit is not None:
            unit.refuse_if_pinned("load_state_dict")
            unit.rest()

    def after_load(module: nn.Module, _: Any) -> None:
        unit = unit_of(module)
        if unit is not None and unit.is_sharded:
            for group in unit.groups:
                group.rebind(may_wait=len(unit.module_refs) > 1)

    pre_forward, post_forward = _around_forward()
    module.register_forward_pre_hook(pre_forward, prepend=True, with_kwargs=True)
    module.register_forward_hook(post_forward, always_call=True)
    module.register_state_dict_pre_hook(before_state_dict)
    module.register_state_dict_post_hook(after_state_dict)
    module.register_load_state_dict_pre_hook(before_load)
    module.register_load_state_dict_post_hook(after_load)


def _pre_forward(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], method: str = "forward"
) -> Any:
    unit = unit_of(module)
    assert unit is not None, "the hook is only on sharded modules"
    return calls.pre_forward(unit, module, args, kwargs, method)


def _post_forward(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    unit = unit_of(module)
    assert unit is not None, "the hook is only on sharded modules"
    return calls.post_forward(unit, output)


@functools.cache
def _around_forward() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The hooks before and after a forward. Not made at import: Dynamo takes a second to load."""
    disable: Callable[..., Any] = torch.compiler.disable
    return disable(_pre_forward), disable(_post_forward)


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Let a method other than ``forward`` gather the module's parameters around itself.

    For example ``generate``, or a Lightning module's ``training_step``. Calls of the module
    inside the method are part of the same pass. Does nothing on a module that is not sharded.

    Raises:
        ValueError: the module has no such method.
    """
    if unit_of(module) is None:
        return
    if not callable(getattr(module, method_name, None)):
        raise ValueError(f"{type(module)} does not have a method {method_name}")
    method = getattr(module, method_name)
    module_ref = weakref.ref(module)
    function = getattr(method, "__func__", method)  # bound anew: the module owns no cycle
    pre_forward, post_forward = _around_forward()

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        owner = module_ref()
        assert owner is not None, "its method is being called"
        output = None
        try:
            args, kwargs = pre_forward(owner, args, kwargs, method_name)
            if function is method:
                output = function(*args, **kwargs)
            else:
                output = function(owner, *args, **kwargs)
        finally:
            output = post_forward(owner, args, output)
        return output

    # What a caller has to pass: that of the function would have ``self`` too.
    wrapped.__signature__ = inspect.signature(method)  # type: ignore[attr-defined]
    module.__dict__[method_name] = wrapped
    unit = unit_of(module)
    assert unit is not None, "checked above"
    unit.forward_methods.add(method_name)
