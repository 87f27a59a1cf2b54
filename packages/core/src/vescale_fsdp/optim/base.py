"""ShardedOptimizer: the base class of our optimizers.

States are made on every rank when a parameter is added. They have the parameter's placement, or one
computed from it. So `torch.distributed.checkpoint` saves and reshards them like parameters.

If an optimizer for whole matrices got the local part of a sharded parameter, it would compute wrong
results without an error. So a plain parameter must not be what `RaggedTensor.to_local` returned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import deepcopy
from typing import Any, ClassVar, overload

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement
from torch.optim import Optimizer

from vescale_fsdp import compat
from vescale_fsdp.compat import AsyncCollectiveTensor, TensorMeta
from vescale_fsdp.ragged import (
    PendingTensor,
    contiguous_strides,
    distribute_tensor,
    holding_of,
    parameter_cut_into,
    redistribute,
    spec_of,
    wrap,
)


def refuse_cut(param: torch.Tensor, name: str) -> None:
    """Raise if a plain tensor is the local part of a sharded parameter, as `to_local` returns it.

    Raises:
        ValueError: it shares memory with one.
    """
    if isinstance(param, DTensor) or param.is_meta or param.layout != torch.strided:
        return
    for storage in compat.storages_of(param):
        whole = parameter_cut_into(storage)
        if whole is not None:
            raise ValueError(
                f"{name} is a plain tensor of shape {tuple(param.shape)} in the memory of a "
                f"sharded parameter of shape {tuple(whole.shape)}, {whole._spec.placements}, as "
                "to_local() returns. An optimizer would treat this rank's part as the whole "
                "parameter; pass the sharded parameter itself, as model.parameters() gives it"
            )


Group = dict[str, Any]
State = dict[str, Any]
Params = Iterable[torch.Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, torch.Tensor]]


class ShardedOptimizer(Optimizer):
    """Base class of our optimizers: a ``torch.optim.Optimizer`` for sharded parameters.

    It takes parameters or (name, parameter) pairs, in any number of groups: plain tensors, DTensors
    (also FSDP2's) and RaggedTensors. Parameters without a gradient are skipped. A gradient must be
    None on all ranks or on none.

    States are made when a parameter is added, if it requires a gradient and is not on the meta
    device; else in its first step with a gradient. ``copy.deepcopy`` and ``pickle`` copy defaults,
    groups and states, as in torch; a subclass must make its other attributes again if missing.

    A subclass implements `check_layout`, `init_state` and `update`, and `convert_state` if it loads
    state dicts of other optimizers. It calls ``super().__init__`` last.
    """

    # Options that determine the layout of states. `load_state_dict` does not change them.
    fixed_options: ClassVar[frozenset[str]] = frozenset()
    is_fresh = False  # whether it has not stepped, nor loaded states, so that those it has are new

    def __init__(self, params: Params, defaults: dict[str, Any]) -> None:
        self._prepared: list[int] | None = None  # id(param) of all parameters
        super().__init__(params, defaults)
        self.is_fresh = True

    # Methods of subclasses

    def check_layout(self, param: torch.Tensor, group: Group, name: str) -> None:
        """Raise if the update of ``param`` cannot be exact with its placement. Same on all ranks.

        Raises:
            ValueError: names the parameter, the split, and the granularity to pass.
        """

    def init_state(self, param: torch.Tensor, group: Group) -> State:
        """Return the states of a parameter before its first step. No communication."""
        raise NotImplementedError

    def update(self) -> None:
        """Step on all parameters that have a gradient (`with_gradient`)."""
        raise NotImplementedError

    def convert_state(self, param: torch.Tensor, group: Group, saved: State) -> State:
        """Convert the states of a state dict, possibly of another optimizer, to this optimizer's.

        Args:
            param: a parameter that has states in ``self.state``. The result is copied into these.
            group: its options.
            saved: the states in the state dict. This method may change the dict.

        Returns:
            The same names as in `init_state`, with values that `assign` accepts.
        """
        return saved

    # Parameters

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters with its options, as in torch. Its states are made at once.

        Raises:
            ValueError: the layout of a parameter is not supported, or it is a plain tensor that is
                the local part of a sharded one. The optimizer has not changed.
        """
        if isinstance(param_group, dict) and not isinstance(
            param_group["params"], torch.Tensor | set
        ):
            param_group["params"] = list(param_group["params"])  # it may be an iterator
        self._refuse_cuts(param_group)
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            self._prepare(group, len(self.param_groups) - 1)
        except BaseException:
            self.param_groups.pop()
            for param in group["params"]:
                self.state.pop(param, None)
            raise
        self._prepared = self._identities()

    def _refuse_cuts(self, param_group: dict[str, Any]) -> None:
        given = param_group["params"] if isinstance(param_group, dict) else []
        index = len(self.param_groups)
        for position, each in enumerate([given] if isinstance(given, torch.Tensor) else given):
            name, param = each if isinstance(each, tuple) else ("", each)
            if isinstance(param, torch.Tensor) and not isinstance(param, DTensor):
                refuse_cut(param, _title(name, position, index))

    def _prepare(self, group: Group, index: int) -> None:
        names = group.get("param_names") or [""] * len(group["params"])
        for position, (name, param) in enumerate(zip(names, group["params"], strict=True)):
            if param not in self.state:
                self.check_layout(param, group, _title(name, position, index))
        for param in group["params"]:
            if param not in self.state and param.requires_grad and not local_of(param).is_meta:
                self.state[param] = self.init_state(param, group)

    def _identities(self) -> list[int]:
        return [id(param) for group in self.param_groups for param in group["params"]]

    def _catch_up(self) -> None:
        """Make states for parameters that other code, such as Accelerate, has put into groups."""
        identities = self._identities()
        if identities == self._prepared:
            return
        present = set(identities)
        for param in [p for p in self.state if isinstance(p, torch.Tensor)]:
            if id(param) not in present:
                del self.state[param]
        for index, group in enumerate(self.param_groups):
            self._refuse_cuts_of(group, index)
            self._prepare(group, index)
        self._prepared = identities

    def _refuse_cuts_of(self, group: Group, index: int) -> None:
        for position, param in enumerate(group["params"]):
            if param not in self.state:
                refuse_cut(param, _title("", position, index))

    def named_params(self) -> Iterator[tuple[str, torch.Tensor, Group]]:
        """Yield all parameters with names and groups, in order.

        The name is the user's, or one like ``parameter 3 of group 0``.
        """
        for index, group in enumerate(self.param_groups):
            names = group.get("param_names") or [""] * len(group["params"])
            for position, (name, param) in enumerate(zip(names, group["params"], strict=True)):
                yield name or _title("", position, index), param, group

    def with_gradient(self, group: Group) -> list[torch.Tensor]:
        """Return the parameters of a group that have a gradient. All have states.

        Raises:
            RuntimeError: a gradient is sparse.
        """
        params: list[torch.Tensor] = [p for p in group["params"] if p.grad is not None]
        for param in params:
            assert param.grad is not None, "by the search above"
            if param.grad.is_sparse:
                raise RuntimeError(f"{type(self).__name__} does not support sparse gradients")
            if not self.state.get(param):
                self.state[param] = self.init_state(param, group)
        return params

    # Steps

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Step once. ``closure``, if any, is called once, with gradients enabled.

        Returns:
            The result of the closure.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._catch_up()
        self.is_fresh = False
        stepped = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        self.update()
        # Autograd and the engine detect a change of a parameter by its version.
        torch.autograd.graph.increment_version(stepped)
        return loss

    # State dicts

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._prepared = None
        super().__setstate__(state)

    def state_dict(self) -> dict[str, Any]:
        """Return a state dict as torch does. Tensors are not copied; they may be DTensors."""
        self._catch_up()
        return super().state_dict()

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Copy states and options from a state dict, by position. States keep their dtypes.

        If the parameter is a DTensor, a saved state may be a DTensor with any placements, or the
        full tensor. If the parameter is a plain tensor, it may also be a DTensor. A parameter
        without an entry gets the states of `init_state`.

        Cost: local copies; a ``redistribute`` for other placements.

        Raises:
            ValueError: groups or states do not match. Nothing has changed then.
        """
        self.is_fresh = False
        state_dict = state_dict.copy()
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            changed = pre_hook(self, state_dict)
            state_dict = state_dict if changed is None else changed
        self._catch_up()
        groups = self._loaded_groups(state_dict["param_groups"])
        saved = self._by_param(state_dict)
        fitted = self._fitted(saved)
        for _, param, group in self.named_params():
            if param in fitted:
                state, values = fitted[param]
                self.state[param] = {key: assign(state[key], values[key]) for key in state}
            elif param in self.state:
                self.state[param] = self.init_state(param, group)
        self.state.update({key: v for key, v in saved.items() if not isinstance(key, torch.Tensor)})
        for group, loaded in zip(self.param_groups, groups, strict=True):
            group.update(loaded)
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def _loaded_groups(self, saved: list[Group]) -> list[Group]:
        """Return the options to set, by group."""
        sizes, saved_sizes = (
            [len(group["params"]) for group in groups] for groups in (self.param_groups, saved)
        )
        if sizes != saved_sizes:
            raise ValueError(
                f"the loaded state dict has parameter groups of {saved_sizes} parameters, the "
                f"optimizer of {sizes}; build it with the groups that were saved"
            )
        ours = {"params", "param_names"} | self.fixed_options
        return [
            {key: deepcopy(v) for key, v in group.items() if key not in ours} for group in saved
        ]

    def _by_param(self, state_dict: dict[str, Any]) -> dict[Any, State]:
        """Return the saved states with parameters as keys. Other keys stay."""
        keys = [key for group in state_dict["param_groups"] for key in group["params"]]
        params = [param for group in self.param_groups for param in group["params"]]
        by_key = dict(zip(keys, params, strict=True))
        return {by_key.get(key, key): state for key, state in state_dict["state"].items() if state}

    def _fitted(self, saved: dict[Any, State]) -> dict[torch.Tensor, tuple[State, State]]:
        """Return for each parameter with saved states its own states, and the values for them."""
        found = {}
        for name, param, group in self.named_params():
            if param in saved:
                state = self.state.get(param) or self.init_state(param, group)
                values = self.convert_state(param, group, dict(saved[param]))
                _check_values(state, values, f"{type(self).__name__}, {name}")
                found[param] = (state, values)
        return found


# Tensors


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a DTensor. A plain tensor is returned as is. Never a copy."""
    if not isinstance(tensor, DTensor):
        return tensor
    local = tensor._local_tensor
    if isinstance(local, PendingTensor | AsyncCollectiveTensor):
        return local.wait()
    return local


def gradient_of(param: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of the gradient, sharded as the parameter.

    Cost: none if the gradient has the parameter's placements; else a redistribution.
    """
    grad = param.grad
    assert grad is not None, "parameters without a gradient are passed over"
    if isinstance(param, DTensor) and isinstance(grad, DTensor):
        placements = param._spec.placements
        grad = (
            grad
            if grad._spec.placements == placements
            else redistribute(grad, placements=placements)
        )
    return local_of(grad)


def zeros_placed(
    param: torch.Tensor,
    dtype: torch.dtype,
    shape: Sequence[int] | None = None,
    placements: Sequence[Placement] | None = None,
    mesh: DeviceMesh | None = None,
) -> torch.Tensor:
    """Make a state of zeros: a DTensor, or a plain tensor if the parameter is one.

    Args:
        param: the parameter. The state is on its device.
        dtype: of the state.
        shape: of the full state. None: the parameter's.
        placements: one for each axis of the mesh. None: the parameter's.
        mesh: of the state. None: the parameter's.
    """
    if shape is None and placements is None:
        return torch.zeros_like(param, dtype=dtype, requires_grad=False)
    shape = torch.Size(param.shape if shape is None else shape)
    if not isinstance(param, DTensor):
        return torch.zeros(shape, dtype=dtype, device=param.device)
    mesh = param.device_mesh if mesh is None else mesh
    placements = tuple(param._spec.placements if placements is None else placements)
    coordinate = mesh.get_coordinate()
    assert coordinate is not None, "parameters are made by the ranks of their mesh"
    held = holding_of(shape, placements, mesh.shape, coordinate)
    local = torch.zeros(held.local_shape, dtype=dtype, device=local_of(param).device)
    meta = TensorMeta(shape, contiguous_strides(shape), dtype)
    return wrap(local, spec_of(mesh, placements, meta))


def assign(target: Any, value: Any) -> Any:
    """Copy ``value`` into ``target`` and return it; return ``value`` if it is not a tensor.

    For a DTensor, a full tensor is sharded, and a DTensor of other placements is redistributed.
    """
    if not isinstance(target, torch.Tensor) or value is target:
        return value
    if not isinstance(value, torch.Tensor):
        return target.fill_(value)
    local_of(target).copy_(_placed_like(target, value))
    return target


def _placed_like(target: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of ``value``, sharded as ``target``."""
    if not isinstance(target, DTensor):
        return value.full_tensor() if isinstance(value, DTensor) else value
    spec = target._spec
    if isinstance(value, DTensor):
        if value.device_mesh == spec.mesh:
            return local_of(redistribute(value, placements=spec.placements))
        value = value.full_tensor()
    value = value.detach().to(local_of(target).device)
    return local_of(distribute_tensor(value, spec.mesh, spec.placements, src_data_rank=None))


def _check_values(state: State, values: State, where: str) -> None:
    """Raise if `assign` cannot copy these values into these states."""
    if state.keys() != values.keys():
        raise ValueError(
            f"{where}: the loaded state dict has the states {sorted(values)}, expected "
            f"{sorted(state)}; load one of this optimizer, saved with the same options"
        )
    for key, value in values.items():
        target = state[key]
        if not isinstance(target, torch.Tensor):
            continue
        shape = value.shape if isinstance(value, torch.Tensor) else torch.Size()
        if shape != target.shape:
            raise ValueError(
                f"{where}: the loaded {key!r} has shape {tuple(shape)}, expected the whole "
                f"tensor's, {tuple(target.shape)}"
            )
        if (
            isinstance(value, torch.Tensor)
            and value.is_floating_point() > target.is_floating_point()
        ):
            raise ValueError(
                f"{where}: the loaded {key!r} has {value.dtype}, expected {target.dtype}"
            )


def _title(name: str, position: int, group: int) -> str:
    return repr(name) if name else f"parameter {position} of group {group}"
