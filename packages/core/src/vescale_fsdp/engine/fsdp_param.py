"""FSDPParam: one parameter of a group, its places in the model, and its ``.grad``.

A parameter with ``Shard(d)`` (by ``shard_placement_fn``) is stored in the buffer with dimension d
first, so that a rank's part is contiguous. The parameters that users see are views with dimension d
in its place.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from vescale_fsdp import compat
from vescale_fsdp.compat import DTensorSpec, GradDtype
from vescale_fsdp.engine.axes import Axes
from vescale_fsdp.engine.placement import (
    annotated_spec,
    as_gathered,
    inner_spec,
    local_data,
    local_gradient,
    mesh_at_rest,
    placements_of,
    spec_at_rest,
)
from vescale_fsdp.ragged import (
    NAME,
    RaggedTensor,
    ReplicatedTensor,
    boxes_of,
    redistribute,
    wrap_local,
    wrap_replicated,
)
from vescale_fsdp.ranks import collectives

if TYPE_CHECKING:
    from vescale_fsdp.dbuffer import Coding

Site: TypeAlias = tuple["weakref.ref[nn.Module]", str]  # a module and the name it has there
# How names of attributes begin that are not those of users, but ours and torch's.
_NOT_OF_USERS = ("_vescale_fsdp_", "_is_param", "_sym_sizes_", "_sym_strides_")
# A weak reference to a gradient, and its version, which each write to it changes.
Seen: TypeAlias = tuple[Callable[[], torch.Tensor | None], int]
# On an unsharded parameter, and the sharded one: the id of the former. A copy has another.
_UNSHARDED = "_vescale_fsdp_unsharded"
_MAX_NAMED = 3  # parameters in a message; the rest are counted
_FSDP_PARAMS: weakref.WeakValueDictionary[int, FSDPParam] = (
    weakref.WeakValueDictionary()
)  # by id of both


def _none() -> None:
    """In place of a weak reference."""


@dataclass(eq=False)
class FSDPParam:
    """A parameter: the sharded one, the unsharded one, and where modules have it.

    The sharded one is registered in the modules, the unsharded one only while a user has unsharded
    it by hand (`substitutes`). What forwards read are views of the unsharded one (`shadows`).
    """

    fqn: str
    sites: list[Site]
    shape: torch.Size  # in the buffer: what an inner parallelism leaves on this rank
    spec: DTensorSpec  # of the sharded one
    axes: Axes
    given: DTensorSpec | None  # of the parameter before, if it was a DTensor
    inner: DTensorSpec | None  # what of it is not about the data axes
    dim: int | None  # that comes first in the buffer, for Shard(dim); None for a ragged one
    sharded: nn.Parameter
    local: torch.Tensor  # the view of the shard that ``sharded`` wraps
    original: Callable[[], nn.Parameter | None]  # the parameter before it was sharded, if it lives
    gradient_before: Seen  # that it had then
    is_followed: bool = False  # who had it for training got the sharded one (an optimizer)
    sums: Sequence[dist.ProcessGroup] = ()  # over which a plain gradient is summed first
    gathered: nn.Parameter | None = None  # None while the group is on meta
    used: bool = False  # whether a gradient appeared since the last reduction
    attributes: dict[str, Any] = field(default_factory=dict)  # ``vars`` of the sharded one
    gradients: Callable[[], Any] = _none  # the `reduce.Gradients` that has its gradients
    # Of the sharded one, which loses it if it is converted.
    grad_dtype: GradDtype = field(default_factory=GradDtype)
    # That of gradients in another dtype, with the spec that it was made of.
    _gradient_spec: tuple[DTensorSpec, torch.dtype, DTensorSpec] | None = None

    def __post_init__(self) -> None:
        # Whether a gradient of the gathered parameter is what the buffer wants.
        self.lies_plainly = self.given is None and not self.dim and not self.sums
        whole = all(placement.is_replicate() for placement in self.spec.placements)
        self.is_replicated = whole and not self.dim

    def hold(self, sharded: nn.Parameter) -> None:
        """Set the sharded parameter, for optimizers and state dicts."""
        self.sharded, self.local = sharded, local_of(sharded)
        # Foreach and fused operators on a DTensor of torch raise no version: on a ``Shard(d)``, and
        # on what gathers itself.
        self.counts_writes = isinstance(sharded, RaggedTensor | ReplicatedTensor)
        _FSDP_PARAMS[id(sharded)] = self
        # ``module.to()`` gives the same parameter other attributes, and users give another one.
        _add_attributes(sharded, self.attributes)
        self.attributes = vars(sharded)
        if self.gathered is not None:
            self.hold_gathered(self.gathered)

    def hold_gathered(self, gathered: nn.Parameter) -> None:
        """Set the unsharded parameter, for forward and backward.

        What users set on one of the two is seen on the other: they have one ``__dict__``. One of a
        tensor subclass keeps its own there, and gets what is set now.
        """
        self.gathered = gathered
        _FSDP_PARAMS[id(gathered)] = self
        if type(gathered) is nn.Parameter:
            gathered.__dict__ = self.attributes
        else:
            _add_attributes(gathered, self.attributes)
        setattr(gathered, _UNSHARDED, id(gathered))

    def leaf(self) -> torch.Tensor:
        """What a graph has of it: the sharded parameter, or an alias, if that has hooks.

        Autograd would call them when it comes to the parameter, without a gradient.
        """
        sharded = self.sharded
        if sharded._backward_hooks or sharded._post_accumulate_grad_hooks:
            return sharded.detach().requires_grad_()
        return sharded

    @property
    def whole(self) -> nn.Parameter:
        """The unsharded parameter, of a group that was gathered."""
        assert self.gathered is not None, "it is gathered"
        return self.gathered

    @property
    def is_viewed_plainly(self) -> bool:
        """Whether views are plain tensors, so that they can have the ``__dict__`` of the shard."""
        return type(self.gathered) is nn.Parameter

    def dress(self, view: torch.Tensor) -> None:
        """Give a view the attributes of users, and those of an ``nn.Parameter``."""
        if self.is_viewed_plainly:
            view.__dict__ = self.attributes
        else:
            _add_attributes(view, self.attributes)
            view._is_param = True

    def copied(self, sharded: nn.Parameter) -> FSDPParam:
        """Return a fsdp_param for a copy of the sharded parameter, in no module yet.

        Both have the same objects as attributes: one may be the model, or not be copied.
        """
        twin = replace(self, sites=[], gathered=None, used=False, original=_none)
        twin.hold(sharded)
        return twin

    def wrap(self, part: torch.Tensor) -> DTensor:
        """Return the sharded tensor for this rank's part, which may be flat.

        A gradient may have another dtype than the parameter.
        """
        spec = self.spec
        if part.dtype != spec.tensor_meta.dtype:  # type: ignore[union-attr]
            spec = self._spec_in(part.dtype)
        if self.axes.shard is None:
            part = part.view(self.shape)
            if self.is_replicated:
                return wrap_replicated(part, spec)
        elif self.dim is None:
            return wrap_local(part, spec, False)
        elif part.dim() != len(self.shape):
            part = part.view(self._rows(part), *self.shape[1:])
        if self.dim:
            part = part.movedim(0, self.dim)
        return DTensor(part, spec, requires_grad=False)

    def _spec_in(self, dtype: torch.dtype) -> DTensorSpec:
        """Return the spec with another dtype. Kept, because each step asks for it."""
        known, own = self._gradient_spec, self.spec
        if known is None or known[0] is not own or known[1] != dtype:
            known = own, dtype, spec_at_rest(own.mesh, own.placements, own.shape, dtype)
            self._gradient_spec = known
        return known[2]

    def _rows(self, part: torch.Tensor) -> int:
        """The size of dimension 0 of this rank's part, also where the others are empty."""
        size, inner = self.shape[0], math.prod(self.shape[1:])
        if inner:
            return part.numel() // inner
        chunk = -(-size // self.axes.num_resting_shards)
        return max(0, min(chunk, size - chunk * self.axes.resting_rank))

    def new_sharded(self, part: torch.Tensor, requires_grad: bool) -> nn.Parameter:
        """Make the sharded parameter for this rank's part. Errors can name it."""
        param = nn.Parameter(self.wrap(part), requires_grad=requires_grad)
        setattr(param, NAME, self.fqn)
        self.keep_grad_dtype(param)
        return param

    def keep_grad_dtype(self, param: nn.Parameter) -> None:
        """Set the ``grad_dtype`` again on a parameter that was converted, or given by assignment.

        Its gradient may have been converted too.
        """
        is_set, dtype = self.grad_dtype
        if is_set and not compat.grad_dtype_of(param).is_set:
            gradient, param.grad = param.grad, None
            param.grad_dtype = dtype
            if gradient is not None:
                param.grad = gradient if dtype is None else gradient.to(dtype)

    def flat(self, local: torch.Tensor) -> torch.Tensor:
        """Return the flat part of a local tensor of `wrap`."""
        return (local.movedim(self.dim, 0) if self.dim else local).reshape(-1)

    def in_buffer(self, gradient: torch.Tensor) -> torch.Tensor:
        """Return a gradient of the unsharded parameter in its shape in the buffer.

        Cost: one all-reduce for each inner axis over which it is a part of a sum.
        """
        local = local_gradient(gradient, self.given, self.axes)
        if self.sums:
            local = local.clone(memory_format=torch.contiguous_format)
        for group in self.sums:
            collectives.all_reduce(local, group).wait()
        return local.movedim(self.dim, 0) if self.dim else local

    def in_forward(self, view: torch.Tensor) -> torch.Tensor:
        """Return the unsharded parameter for its view of the full buffer."""
        return as_gathered(view.movedim(0, self.dim) if self.dim else view, self.given)

    def hooked(self, gradient: torch.Tensor) -> torch.Tensor:
        """Return the gradient after the hooks that users have put on it by ``register_hook``.

        As under DDP they get this rank's gradient of the whole parameter, before the average.
        """
        for hook in list((self.sharded._backward_hooks or {}).values()):
            if hasattr(hook, "keeps_layout"):  # ours, for gradients of the shard
                continue
            if isinstance(gradient, DTensor) and self.given is None:  # beside a penalty on shards
                gradient = gradient.full_tensor()
            changed = hook(gradient)
            if changed is None:
                continue
            if changed.shape != gradient.shape:
                raise RuntimeError(
                    f"a hook on {self.fqn!r} has returned a gradient of shape "
                    f"{tuple(changed.shape)}; expected {tuple(gradient.shape)}, that of the whole "
                    "parameter on this rank"
                )
            gradient = changed.to(gradient.dtype)
        return gradient

    def refuse_graph(self) -> NoReturn:
        """Refuse ``create_graph=True`` for the gradient by this parameter."""
        raise NotImplementedError(
            f"create_graph=True for the gradient by {self.fqn!r}: vescale_fsdp averages and shards "
            "gradients by parameters, without a graph. Gradients by inputs can have one: "
            "torch.autograd.grad(loss, inputs, create_graph=True)"
        )

    def register(self, param: nn.Parameter) -> None:
        """Register ``param`` in the modules, but where a tie has registered another one's.

        As in FSDP2, by the module's own ``__setattr__`` if it has one: an LSTM has a list of its
        parameters too.
        """
        for module_ref, name in self.sites:
            module = module_ref()
            if module is None or self.is_tied_away(module, name):
                continue
            if type(module).__setattr__ is nn.Module.__setattr__:
                module._parameters[name] = param
            else:
                setattr(module, name, param)

    def replaced(self) -> nn.Parameter | None:
        """The parameter that the sharded one has replaced, if other code still holds it."""
        original = self.original()
        return None if original is self.sharded else original

    def has_reached(self, replaced: nn.Parameter) -> bool:
        """Whether a gradient has come to the ``replaced`` parameter since then.

        Either it has another gradient, or there is more in the one that it had. An optimizer that
        was made before may have set that to zero, by ``zero_grad(set_to_none=False)``.
        """
        gradient, (former, version) = replaced.grad, self.gradient_before
        if gradient is None or gradient is not former():
            return gradient is not None
        return gradient._version != version and bool(compat.local_tensor(gradient).norm() != 0)

    def is_tied_away(self, module: nn.Module, name: str) -> bool:
        """Whether the sharded parameter of another one is registered at a site of this one."""
        param = module._parameters.get(name)
        return param is not None and holder_of(param) not in (None, self)

    def registered(self) -> nn.Parameter:
        """The parameter that is registered in the modules now.

        A tensor that is no parameter stands in for one during a call (see `substitutes`). The
        parameter of another one, to which code has tied this one since, is not this one's.

        Raises:
            RuntimeError: none is registered by its name any more.
        """
        if not self.sites:  # of a copy of a part of the unit
            return self.sharded
        module_ref, name = self.sites[0]
        module = module_ref()
        if module is not None and name not in module._parameters:
            raise RuntimeError(
                f"the parameter {self.fqn!r} is no longer registered in its module: after "
                "fully_shard it was removed, or replaced by a parametrization (torch.nn.utils."
                "parametrize, parametrizations or prune). Do that before fully_shard"
            )
        if module is None or self.is_tied_away(module, name):
            return self.sharded
        param = module._parameters[name]
        return param if isinstance(param, nn.Parameter) else self.sharded


@dataclass(frozen=True)
class ParamToShard:
    """An original parameter, with the information that a group needs."""

    fqn: str
    param: nn.Parameter
    sites: list[Site]
    block: int
    axes: Axes
    dim: int | None = None  # for Shard(dim)
    extends: bool = False  # whether it gathers itself (see `extension`)
    gather: Coding | None = None  # how it travels, if not as it is
    reduce: Coding | None = None  # and how its gradient does
    mp_policy: MixedPrecisionPolicy = field(default_factory=MixedPrecisionPolicy)  # for this one

    @property
    def stays_coded(self) -> bool:
        """Whether it is not decoded, so that forward gets codes."""
        return self.gather is not None and not self.gather.decodes

    @property
    def inner(self) -> DTensorSpec | None:
        """Its spec by inner parallelism, if it is a DTensor or has types of ``spmd_types``."""
        return inner_spec(self.param, self.axes, self.fqn)

    @property
    def sums(self) -> Sequence[dist.ProcessGroup]:
        """The groups over which its plain gradients are summed, before those of the data axes."""
        if self.axes.whole is None or isinstance(self.param, DTensor):
            return ()
        return annotated_spec(self.param, self.axes, self.fqn)[1]

    @property
    def parts(self) -> list[tuple[int, ...]]:
        """The shapes of `data` on the ranks of the inner parallelism, the largest one first.

        With ``Shard(dim)``, which splits what each rank has, that of this rank.
        """
        if self.inner is None or self.dim is not None:
            return [tuple(self.data.shape)]
        return boxes_of(self.inner.shape, self.inner.placements, self.inner.mesh.shape)

    @property
    def data(self) -> torch.Tensor:
        """This rank's data to shard, in the order of the buffer."""
        data = local_data(self.param)
        return data.movedim(self.dim, 0) if self.dim else data


def gradient_seen(param: torch.Tensor) -> Seen:
    """Return what tells the gradient that a parameter has now from what comes later."""
    gradient = param.grad
    return (_none, 0) if gradient is None else (weakref.ref(gradient), gradient._version)


def holder_of(param: torch.Tensor) -> FSDPParam | None:
    """Return the fsdp_param of which ``param`` is the sharded parameter."""
    fsdp_param = _FSDP_PARAMS.get(id(param))
    return fsdp_param if fsdp_param is not None and fsdp_param.sharded is param else None


def fsdp_param_of(param: torch.Tensor) -> FSDPParam | None:
    """Return the fsdp_param of which ``param`` is the sharded or the unsharded parameter."""
    fsdp_param = _FSDP_PARAMS.get(id(param))
    is_one = fsdp_param is not None and (
        param is fsdp_param.sharded or param is fsdp_param.gathered
    )
    return fsdp_param if is_one else None


def is_unsharded(param: torch.Tensor) -> bool:
    """Whether ``param`` is an unsharded parameter. It is faster than `fsdp_param_of`."""
    return vars(param).get(_UNSHARDED) == id(param)


def was_sharded(param: torch.Tensor) -> bool:
    """Whether ``param`` is a parameter of a unit, or a copy of a sharded one."""
    is_copy = isinstance(param, RaggedTensor | ReplicatedTensor)
    is_copy = is_copy or (isinstance(param, DTensor) and NAME in vars(param))
    return is_copy or fsdp_param_of(param) is not None


def listed(names: Sequence[str]) -> str:
    """Return the first names in quotes, and how many more there are, for errors."""
    shown = ", ".join(map(repr, names[:_MAX_NAMED]))
    return shown + (f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else "")


def flags_of(fsdp_params: Sequence[FSDPParam]) -> list[bool]:
    """Return ``requires_grad`` of the sharded parameters."""
    with compat.without_torch_function():
        return [fsdp_param.sharded.requires_grad for fsdp_param in fsdp_params]


def local_of(param: torch.Tensor) -> torch.Tensor:
    """Return the local part of a sharded parameter."""
    local: torch.Tensor = param._local_tensor  # type: ignore[attr-defined]
    return local


def resting_spec(p: ParamToShard, placement: Placement, dtype: torch.dtype) -> DTensorSpec:
    """Return the spec of the sharded parameter, with ``placement`` on the data axes.

    Raises:
        NotImplementedError: ``Shard(dim)`` of a dimension that the inner parallelism has sharded
            unevenly.
        ValueError: as `mesh_at_rest`.
    """
    if p.inner is not None and p.dim is not None and p.axes.shard is not None:
        parts = boxes_of(p.inner.shape, p.inner.placements, p.inner.mesh.shape)
        if len({part[p.dim] for part in parts}) > 1:
            # torch's strided shard has other elements than these, of 7 over 3 x 2 ranks for example
            raise NotImplementedError(
                f"fully_shard: dimension {p.dim} of {p.fqn!r}, of shape {tuple(p.inner.shape)}, is "
                f"unevenly sharded by {p.inner.placements}, and no placement of torch says how "
                f"Shard({p.dim}) shards it again. Let shard_placement_fn return None or another "
                "dimension for it, or pad that dimension to a multiple"
            )
    placements = placements_of(p.axes, placement, p.inner)
    mesh = mesh_at_rest(p.axes, p.inner, p.fqn)
    # Of a DTensor: the global one.
    is_annotated = p.inner is not None and not isinstance(p.param, DTensor)
    shape = annotated_spec(p.param, p.axes, p.fqn)[0].shape if is_annotated else p.param.shape
    return spec_at_rest(mesh, placements, shape, dtype)


def same_memory(param: torch.Tensor, view: torch.Tensor) -> bool:
    """Whether the local part of a sharded parameter has the memory and dtype of ``view``."""
    local = local_of(param)
    return bool(
        local.untyped_storage()._cdata == view.untyped_storage()._cdata
        and local.storage_offset() == view.storage_offset()
        and local.dtype == view.dtype
    )


def checked_local(param: nn.Parameter, fsdp_param: FSDPParam) -> torch.Tensor:
    """The local part of a parameter that has replaced the sharded one, or been converted.

    Collective where that has other placements: it is redistributed to those of the fsdp_param.

    Raises:
        ValueError: it is no DTensor, or one of another shape, or of other placements on another
            mesh.
    """
    expected = f"of shape {tuple(fsdp_param.spec.shape)} with {fsdp_param.spec.placements}"
    if not isinstance(param, DTensor):
        # That it is the same on every rank is not known here, and would take a comparison.
        raise ValueError(
            f"parameter {fsdp_param.fqn!r} was replaced by a plain tensor of shape "
            f"{tuple(param.shape)}; expected a DTensor {expected}. Load it into the existing "
            "parameter (assign=False), or give it to vescale_fsdp.ragged."
            "distribute_tensor with the mesh of that one"
        )
    if param.shape != fsdp_param.spec.shape:
        raise ValueError(
            f"parameter {fsdp_param.fqn!r} was replaced by one of shape {tuple(param.shape)}; "
            f"expected one {expected}. Call fully_shard after the shapes are final"
        )
    if param.placements == fsdp_param.spec.placements:
        return local_of(param)
    if param.is_meta:
        return torch.empty(fsdp_param.local.shape, dtype=param.dtype, device="meta")
    if param.device_mesh != fsdp_param.spec.mesh:
        raise ValueError(
            f"parameter {fsdp_param.fqn!r} was replaced by one on {param.device_mesh} with "
            f"{param.placements}; expected one on {fsdp_param.spec.mesh}, {expected}. Give its "
            "full_tensor() to vescale_fsdp.ragged.distribute_tensor with that mesh"
        )
    whole = cast(DTensor, param.detach())
    return local_of(redistribute(whole, placements=fsdp_param.spec.placements))


def refuse_methods(fsdp_param: FSDPParam) -> None:
    """Raise if the local part was told, too late, to gather itself."""
    if hasattr(fsdp_param.local, "fsdp_pre_all_gather"):
        raise NotImplementedError(
            f"the local part of parameter {fsdp_param.fqn!r} was given fsdp_pre_all_gather, but it "
            "lies in a flat buffer, which is gathered as it is. Make the parameter a tensor "
            "subclass before fully_shard: its local part may be given the methods until the first "
            "forward"
        )


def publish(
    fsdp_params: Sequence[FSDPParam], locals_: Iterable[torch.Tensor], gets: Iterable[bool]
) -> None:
    """Set, or add to, the gradients of those that get one, and call the hooks on them.

    A gradient is a new tensor in each step, as in FSDP2: what users have set on one, and those who
    hold it, must not meet the next one.

    Args:
        locals_: this rank's part of each reduced gradient, flat.
    """
    hooked: list[FSDPParam] = []
    with compat.without_torch_function():
        for fsdp_param, local, gets_one in zip(fsdp_params, locals_, gets, strict=True):
            if not gets_one:
                continue
            param = fsdp_param.sharded
            former = param.grad
            if former is None:
                param.grad = fsdp_param.wrap(local)
            else:
                local_of(former).add_(local_of(fsdp_param.wrap(local)))
            if param._post_accumulate_grad_hooks:
                hooked.append(fsdp_param)
    for fsdp_param in hooked:
        for hook in (fsdp_param.sharded._post_accumulate_grad_hooks or {}).values():
            hook(fsdp_param.sharded)


def carry(source: nn.Parameter, target: nn.Parameter) -> None:
    """Give a parameter what users have put on the one that it replaces: hooks and attributes.

    An attribute of both has the value of the one that is replaced. So does ``grad_dtype``.
    """
    vars(target).update(_of_users(attributes_of(source)))
    grad_dtype = compat.grad_dtype_of(source)
    if grad_dtype.is_set and grad_dtype != compat.grad_dtype_of(target):
        target.grad_dtype = grad_dtype.dtype
    # The dictionaries themselves, so that handles of users remove from both.
    if source._backward_hooks is not None:
        target._backward_hooks = source._backward_hooks
    if source._post_accumulate_grad_hooks is not None:
        target._post_accumulate_grad_hooks = source._post_accumulate_grad_hooks


def attributes_of(param: nn.Parameter) -> dict[str, Any]:
    """Return what users have set on a parameter, such as that it has no weight decay."""
    # A subclass has its own attributes there, also tensors; those are on what it is detached to.
    own: dict[str, Any] = vars(param.detach()) if compat.is_wrapper(param) else {}
    return {name: value for name, value in vars(param).items() if name not in own}


def _add_attributes(param: torch.Tensor, attributes: Mapping[str, Any]) -> None:
    """Set attributes of users that ``param`` does not have."""
    own = vars(param)
    own.update({n: value for n, value in _of_users(attributes).items() if n not in own})


def _of_users(attributes: Mapping[str, Any]) -> dict[str, Any]:
    return {n: value for n, value in attributes.items() if not n.startswith(_NOT_OF_USERS)}
