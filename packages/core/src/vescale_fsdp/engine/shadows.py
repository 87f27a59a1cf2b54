"""Shadows: what a forward finds in the place of sharded parameters.

Each parameter is one ``nn.Parameter``, the sharded one. It stays in ``module._parameters``, where
optimizers, ``state_dict()`` and ``zero_grad()`` find it at all times. While a unit is unsharded for
a forward or a backward, ``module.__dict__["weight"]`` holds the unsharded view. Python looks there
before it asks ``nn.Module.__getattr__``, so the forward computes with the whole weight::

    module.__dict__    {"weight": view of the full buffer, "_parameters": {"weight": shard}, ...}
    module.weight      the view
    parameters()       the shard
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from vescale_fsdp import compat

if TYPE_CHECKING:
    from vescale_fsdp.engine.fsdp_param import FSDPParam


class Registered(dict[str, Any]):
    """The ``_parameters`` of a module with shadows.

    Where other code registers something else, or deletes a parameter (``functional_call``,
    ``del module.weight``), the shadow steps aside: what is registered is meant.
    """

    __slots__ = ("_module", "aside", "replaced", "shadows")

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module._parameters)
        self._module = weakref.ref(module)
        self.shadows: dict[str, tuple[Shadows, int]] = {}
        self.aside: dict[str, torch.Tensor] = {}  # views that have stepped aside
        self.replaced: set[str] = set()  # names that have got something else in a forward
        module.__dict__["_parameters"] = self

    def __getitem__(self, name: str) -> Any:
        """Read by name, so there is no shadow, or none any more.

        If the shards were written to in the forward that runs, this read is to see that.
        """
        known = self.shadows.get(name)
        if known is not None and known[0].renew is not None:
            known[0].renew()
            module = self._module()
            if module is not None and name in module.__dict__:
                return module.__dict__[name]
        return super().__getitem__(name)

    def __setitem__(self, name: str, value: Any) -> None:
        if name in self.shadows:
            shadows, index = self.shadows[name]
            # ``functional_call`` puts back what it has read here.
            if value is not None and value is self.aside.get(name):
                value = shadows.sharded(index)
            value = shadows.sharded_of(index, value)
        super().__setitem__(name, value)
        self._step_aside(name, value)

    def __delitem__(self, name: str) -> None:
        super().__delitem__(name)
        self._step_aside(name, None)

    def pop(self, name: str, *default: Any) -> Any:
        """As of a dict."""
        found = super().pop(name, *default)
        self._step_aside(name, None)
        return found

    def update(self, *others: Any, **more: Any) -> None:
        """As of a dict."""
        for name, value in dict(*others, **more).items():
            self[name] = value

    def items(self) -> Any:
        """As of a dict, and so of ``named_parameters``.

        While a forward of the unit runs, DTensors of an inner parallelism are the unsharded ones,
        as with FSDP2: transformers makes local tensors of them there, for its kernels of experts.
        """
        module = self._module()
        views = {
            name: module.__dict__[name]
            for name, (shadows, index) in self.shadows.items()
            if shadows.is_read and index in shadows.inner and module and name in module.__dict__
        }
        return {**self, **views}.items() if views else super().items()

    def _step_aside(self, name: str, value: Any) -> None:
        module = self._module()
        if name not in self.shadows or module is None:
            return
        shadows, index = self.shadows[name]
        if shadows.owns(index, value):
            view = self.aside.pop(name, None)
            self.replaced.discard(name)
            if view is not None and shadows.is_shown:
                module.__dict__[name] = view
            return
        shadows.has_substitutes = True
        is_plain = isinstance(value, nn.Parameter) and not isinstance(value, DTensor)
        if is_plain and (shadows.is_shown or shadows.renew is not None):
            self.replaced.add(name)
        view = module.__dict__.pop(name, None)
        if view is not None:
            self.aside[name] = view

    # A copy, and a pickle, are of plain dicts: their modules have no shadows.

    def __reduce_ex__(self, protocol: Any) -> Any:
        self._refuse_shadows()
        return dict, (dict(self),)

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        self._refuse_shadows()
        return copy.deepcopy(dict(self), memo)

    def _refuse_shadows(self) -> None:
        names = [name for name, (shadows, _) in self.shadows.items() if shadows.is_shown]
        if names:
            raise RuntimeError(
                f"a module was copied or pickled while its parameters {names} are unsharded for a "
                "forward or its backward; do that between steps, or inside of `with "
                "unsharded(model):`, where the copy is a plain module"
            )


class Shadows:
    """The places of a group's parameters, where their unsharded views are shown.

    Attributes:
        is_shown: whether unsharded views are shown.
        renew: unshards again, in a forward that runs, after a write to the shards.
        is_swapped: whether the unsharded parameters are registered, for the user.
        has_substitutes: whether other code has registered something else in one of the places.
        is_read: whether a forward of the unit runs, also again in a backward.
    """

    def __init__(self, fsdp_params: Sequence[FSDPParam]) -> None:
        self._fsdp_params = fsdp_params
        self.has_substitutes = self.is_shown = self.is_swapped = self.is_read = False
        # Those with an inner parallelism (see `Registered.items`).
        self.inner = {i for i, fsdp_param in enumerate(fsdp_params) if fsdp_param.given is not None}
        self.renew: Callable[[], None] | None = None
        # Weak references: a strong one would keep a deleted model until the garbage collector runs.
        self._places = []
        self._rnns = []
        for index, fsdp_param in enumerate(fsdp_params):
            for ref, name in fsdp_param.sites:
                module = ref()
                if module is None:
                    continue
                registered = module._parameters
                if not isinstance(registered, Registered):
                    registered = Registered(module)
                registered.shadows[name] = self, index
                self.has_substitutes |= not self.owns(index, registered.get(name))
                self._places.append((ref, name, index))
                if isinstance(module, nn.RNNBase):
                    self._rnns.append(ref)

    def owns(self, index: int, registered: object) -> bool:
        """Whether what is registered in a place is the parameter of it."""
        fsdp_param = self._fsdp_params[index]
        return registered is fsdp_param.sharded or registered is fsdp_param.gathered

    def sharded(self, index: int) -> nn.Parameter:
        """The parameter of a place."""
        return self._fsdp_params[index].sharded

    def sharded_of(self, index: int, value: Any) -> Any:
        """The sharded parameter, if ``value`` is a view of this one; else ``value``."""
        fsdp_param = self._fsdp_params[index]
        is_view = isinstance(value, torch.Tensor) and vars(value) is fsdp_param.attributes
        is_meant = value is fsdp_param.gathered and self.is_swapped
        return fsdp_param.sharded if is_view and not is_meant else value

    def show(self, views: Sequence[torch.Tensor]) -> None:
        """Show these, one for each parameter, in all places of it."""
        if self.has_substitutes:
            self._show_beside_substitutes(views)
        else:
            for ref, name, index in self._places:
                if (module := ref()) is not None:
                    module.__dict__[name] = views[index]
        self.is_shown, self.renew = True, None
        self._list_weights()

    def hide(self) -> None:
        """Show the sharded parameters again."""
        self.renew = None
        if self.is_shown:
            self.is_shown = False
            for ref, name, _ in self._places:
                if (module := ref()) is not None:
                    module.__dict__.pop(name, None)
                    if self.has_substitutes:
                        cast(Registered, module._parameters).aside.pop(name, None)
            self._list_weights()

    def _show_beside_substitutes(self, views: Sequence[torch.Tensor]) -> None:
        self.has_substitutes = False
        for ref, name, index in self._places:
            if (module := ref()) is None:
                continue
            if self.owns(index, module._parameters.get(name)):
                module.__dict__[name] = views[index]
            else:
                self.has_substitutes = True
                cast(Registered, module._parameters).aside[name] = views[index]

    @property
    def finds_substitutes(self) -> bool:
        """Whether something else is registered in one of the places now."""
        for ref, name, index in self._places:
            module = ref()
            if module is not None and not self.owns(index, module._parameters.get(name)):
                return True
        return False

    def _list_weights(self) -> None:
        for ref in self._rnns:  # they keep a list of their weights
            if (module := ref()) is not None:
                names = cast(list[str], module._flat_weights_names)
                module.__dict__["_flat_weights"] = [getattr(module, n, None) for n in names]

    @property
    def have_moved(self) -> bool:
        """Whether ``p.data = ...`` has given a view other memory than that of the parameter."""
        for ref, name, index in self._places:
            view = None if (module := ref()) is None else module.__dict__.get(name)
            if view is None:
                continue
            whole = self._fsdp_params[index].whole
            if compat.local_tensor(view).data_ptr() != compat.local_tensor(whole).data_ptr():
                return True
        return False

    def refuse_writes(self, fsdp_params: Sequence[FSDPParam]) -> None:
        """Raise if a forward has written to a view while autograd was on, as for a parameter.

        Raises:
            RuntimeError: names the parameter.
        """
        for ref, name, index in self._places:
            view = None if (module := ref()) is None else module.__dict__.get(name)
            node = None if view is None else view.grad_fn
            if node is not None and not hasattr(node, "gathered"):
                raise RuntimeError(
                    f"forward has written to the parameter {fsdp_params[index].fqn!r} in place "
                    "while autograd records; write to it within torch.no_grad()"
                )

    def refuse_replaced(self, fsdp_params: Sequence[FSDPParam]) -> None:
        """Raise if a forward has registered other parameters, and they are still there at its end.

        Raises:
            RuntimeError: names one.
        """
        for ref, name, index in self._places:
            module = ref()
            if module is not None and name in cast(Registered, module._parameters).replaced:
                raise RuntimeError(
                    f"forward has replaced the parameter {fsdp_params[index].fqn!r}, and each rank "
                    "would train its own. Write the values into the parameter, or replace it "
                    "before fully_shard"
                )


def refuse_hidden(fsdp_param: FSDPParam) -> None:
    """Raise if a class has an attribute with the parameter's name, which Python finds first.

    Raises:
        ValueError: names the class.
    """
    for ref, name in fsdp_param.sites:
        for cls in type(ref()).__mro__:
            if name in vars(cls):
                raise ValueError(
                    f"fully_shard: {cls.__name__} has an attribute {name!r}, which hides the "
                    f"parameter {fsdp_param.fqn!r} from forward. Rename one of them"
                )
