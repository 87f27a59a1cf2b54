"""Random numbers in ragged tensors: those that a single process would draw for the whole tensor.

Every rank draws the whole tensor and keeps its part, so the numbers do not depend on the layout
or on the number of ranks. The state of the generator is that of the mesh's first rank, however
the ranks were seeded. A rank whose own state was the same continues after the numbers drawn, as
a single process would; any other rank keeps its own state.

Cost: the bytes of the whole tensor on every rank while it is drawn, and one broadcast of the
state (about 5 KB on CPU, 16 bytes on CUDA). A generator that is passed is used as it is, without
communication: then every rank must have seeded it alike. Nothing is drawn or sent on ``meta``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from vescale_fsdp import devices
from vescale_fsdp.compat import DTensorSpec
from vescale_fsdp.ragged.operands import refuse_partial, start_move
from vescale_fsdp.ragged.recuts import held_here, respecified_as
from vescale_fsdp.ragged.tensor import RaggedTensor, local_part, wrap_local
from vescale_fsdp.ranks import collectives

aten = torch.ops.aten


def _in_place(func: Any, x: RaggedTensor, *args: Any, **kwargs: Any) -> RaggedTensor:
    """``x.normal_()`` and the like: the old numbers do not matter."""
    refuse_partial(func, x._spec)
    local = x._local_tensor
    if local.device.type == "meta":
        return x
    given = [local.new_empty(x.shape), *(_whole(func, arg, x._spec) for arg in args)]
    with numbers_of_first_rank(func, x._spec.mesh, given, kwargs):
        drawn = func(*given, **kwargs)
    local.copy_(local_part(drawn, x._spec))
    torch.autograd.graph.increment_version(local)
    return x


def _new(func: Any, x: RaggedTensor, *args: Any, **kwargs: Any) -> Any:
    """``rand_like(x)``, ``bernoulli(x)``, ``native_dropout(x)``: results of the shape of ``x``."""
    refuse_partial(func, x._spec)
    kwargs.pop("memory_format", None)
    device = torch.device(kwargs.get("device") or x._local_tensor.device)
    if device.type == "meta" or func not in _READING:
        given = x._local_tensor.new_empty(x.shape, device="meta")
        if "_like" in func._schema.name:
            kwargs["device"] = device
    else:
        given = _whole(func, x, x._spec)
    with numbers_of_first_rank(func, x._spec.mesh, [given, *args], {**kwargs, "device": device}):
        drawn = func(given, *args, **kwargs)
    if isinstance(drawn, torch.Tensor):
        return _kept(drawn, x._spec)
    return tuple(_kept(each, x._spec) for each in drawn)


def _kept(drawn: torch.Tensor, spec: DTensorSpec) -> RaggedTensor:
    # A clone, so that the whole is freed.
    local = local_part(drawn, spec).clone()
    return wrap_local(local, respecified_as(spec, dtype=drawn.dtype), False)


def _whole(func: Any, arg: Any, spec: DTensorSpec) -> Any:
    """An argument in the shape of the whole, with this rank's elements in their places.

    The other elements are 0. They are drawn for as well, so that each takes its random numbers,
    but what comes out there is not kept.
    """
    if isinstance(arg, RaggedTensor):
        local = start_move(func, arg, spec).wait()
        whole = local.new_zeros(spec.shape)
        for box in held_here(spec).boxes:
            box.of(whole).copy_(box.in_local(local))
        return whole
    if isinstance(arg, torch.Tensor) and arg.numel() != 1:
        raise ValueError(
            f"{func} got a ragged tensor together with one of shape {tuple(arg.shape)}; make both "
            "ragged with the same placements"
        )
    return arg


@contextmanager
def numbers_of_first_rank(
    func: Any, mesh: DeviceMesh, args: Sequence[Any], kwargs: dict[str, Any]
) -> Iterator[None]:
    """Inside, a random operator on these local operands draws what the mesh's first rank draws.

    The default generator has the state of that rank's. Other operators need nothing.
    """
    operands = (*args, *kwargs.values())
    is_random = torch.Tag.nondeterministic_seeded in func.tags
    # By type: Dynamo cannot trace isinstance of a generator.
    own_generator = any(type(each) is torch.Generator for each in operands)
    if not is_random or mesh.size() == 1 or own_generator:
        yield
        return
    of_tensor = next(each.device for each in operands if isinstance(each, torch.Tensor))
    device = torch.device(kwargs.get("device") or of_tensor)
    if device.type == "meta":
        yield
        return
    default = devices.default_generator(device)
    group = collectives.mesh_group(mesh, 0)
    own = default.get_state()
    ranks = mesh.mesh.flatten().tolist()
    group = group if mesh.ndim == 1 else collectives.group_over(ranks, group)
    state = own.to(device if mesh.device_type == device.type else mesh.device_type, copy=True)
    collectives.broadcast(state, ranks[0], group).wait()
    shared = state.to(own.device)
    default.set_state(shared)
    try:
        yield
    finally:
        if not torch.equal(own, shared):
            default.set_state(own)


_READING = {aten.bernoulli.default, aten.bernoulli.p, aten.native_dropout.default}

RANDOM: dict[Any, Callable[..., Any]] = {
    aten.bernoulli_.Tensor: _in_place,
    aten.bernoulli_.float: _in_place,
    aten.cauchy_.default: _in_place,
    aten.exponential_.default: _in_place,
    aten.geometric_.default: _in_place,
    aten.log_normal_.default: _in_place,
    aten.normal_.default: _in_place,
    aten.random_.default: _in_place,
    getattr(aten.random_, "from"): _in_place,
    aten.random_.to: _in_place,
    aten.uniform_.default: _in_place,
    aten.bernoulli.default: _new,
    aten.bernoulli.p: _new,
    aten.native_dropout.default: _new,
}
for _name in ("rand_like", "randn_like", "randint_like"):
    for _overload in getattr(aten, _name).overloads():
        if not _overload.endswith("out") and "Tensor" not in _overload:
            RANDOM[getattr(getattr(aten, _name), _overload)] = _new
