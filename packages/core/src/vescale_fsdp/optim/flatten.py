"""flatten_: lets an element-wise optimizer step on flat pieces of the shards.

Torch's element-wise optimizers collect their tensors in the method ``_init_group``, and pass the
lists to a function that runs the kernels. `flatten_` replaces this method by one that collects
pieces (see `flat`) instead of parameters. Everything else is torch's: kernels, closures, hooks,
gradient scalers, schedulers, state dicts. The optimizer's states stay per parameter.
"""

from __future__ import annotations

import weakref
from itertools import groupby
from typing import Any, TypeVar

import torch
from torch.distributed.tensor import DTensor
from torch.optim import (
    ASGD,
    SGD,
    Adadelta,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    NAdam,
    Optimizer,
    RAdam,
    RMSprop,
    Rprop,
)

from vescale_fsdp import compat
from vescale_fsdp.optim.flat import (
    SCALARS,
    Member,
    Members,
    Piece,
    Space,
    States,
    pieces_of,
    spaces_of,
)
from vescale_fsdp.ragged import wrap

AnyOptimizer = TypeVar("AnyOptimizer", bound=Optimizer)
Group = dict[str, Any]
State = dict[str, Any]

_ELEMENTWISE = (
    *(ASGD, Adadelta, Adagrad, Adam, AdamW, Adamax),
    *(NAdam, RAdam, RMSprop, Rprop, SGD),
)
_REASONS = {
    "Adafactor": "it takes means over the rows and columns of each matrix",
    "LBFGS": "its direction depends on all parameters at once",
    "Muon": "it takes each matrix as a whole",
    "SparseAdam": "its gradients are sparse",
}


def flatten_(optimizer: AnyOptimizer) -> AnyOptimizer:
    """Let an element-wise optimizer step once per group on the contiguous shard. In place.

    Neighbouring parameters in a shard, with neighbouring gradients, are stepped
    as one flat tensor; short pieces with gaps between them are copied together first.
    The numbers are those of the plain optimizer, bit for bit. ``param_groups``, ``state``,
    ``state_dict()`` and ``load_state_dict()`` are those of the plain optimizer too: the states of
    a parameter are views of flat ones. It may be called before or after schedulers are made,
    states are loaded and parameter groups are added. A ``copy.deepcopy`` is a plain optimizer.

    Some parameters are stepped separately, on their local part: a parameter in its first step,
    which makes its states; one whose `step` differs from that of its neighbours; ``Shard(d)`` with
    d > 0, whose local part is not contiguous. On a CPU also 16-bit parameters, and with
    ``fused=True`` local parts that are no multiple of 64 bytes: the bits of torch's kernels there
    depend on where a tensor ends. Plain tensors step as without this function. So does a whole
    group with ``differentiable=True``, one of which no parameter could join others, and one while a
    gradient has other placements than its parameter.

    Cost: a few µs of host time for each parameter, and the kernels of one tensor for each piece.
    No communication and no wait for a device, except one wait after other code has written to
    `step`.
    Memory: as before; at most 64 MiB more for a moment when states are made or loaded, and the
    parameters and gradients of short pieces (below 8,192 elements) twice during a step.

    Args:
        optimizer: ASGD, Adadelta, Adagrad, Adam, AdamW, Adamax, NAdam, RAdam, RMSprop, Rprop or
            SGD of ``torch.optim``.

    Returns:
        The same optimizer.

    Raises:
        TypeError: another optimizer, or a subclass.
    """
    if type(optimizer) not in _ELEMENTWISE:
        raise TypeError(_refusal(optimizer))
    if not compat.has_other_init_group(optimizer):
        _Flattened(optimizer)
    return optimizer


def _refusal(optimizer: Any) -> str:
    name = type(optimizer).__name__
    known = ", ".join(each.__name__ for each in _ELEMENTWISE)
    reason = _REASONS.get(name)
    if type(optimizer).__module__.startswith("torch.optim") and reason is not None:
        return f"flatten_ got {name}: {reason}, so it cannot step on parts of a flat shard"
    return (
        f"flatten_ got {type(optimizer).__module__}.{name}, and does not know whether it treats "
        f"each element separately. It takes {known} of torch.optim, not their subclasses; pass "
        "the optimizer inside, if this is a wrapper, or do not flatten it"
    )


# The longest vector register of a CPU. Fused kernels divide their work at multiples of it.
_REGISTER_BYTES = 64


class _Flattened:
    """The replaced method and hooks of one optimizer, to which it has a weak reference."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._groups: dict[int, _Parameters] = {}  # by id(group["params"])
        self._pieces: list[Piece] = []  # of the group whose kernels run
        compat.replace_init_group(optimizer, self._init_group)
        optimizer.register_step_pre_hook(self._begin)
        compat.register_first_step_post_hook(optimizer, self._finish)
        optimizer.register_load_state_dict_post_hook(lambda _: self._groups.clear())

    def _begin(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Before a step: drop pieces of a step that raised, and groups that no longer exist."""
        self._pieces = []
        lists = {id(group["params"]) for group in optimizer.param_groups}
        self._groups = {key: known for key, known in self._groups.items() if key in lists}

    def _init_group(self, group: Group, *lists: list[Any]) -> Any:
        """Call torch's method with pieces instead of parameters, if possible."""
        optimizer = self._optimizer()
        assert optimizer is not None, "it is the one that calls"
        self._finish(optimizer)  # first finish the other groups: this one may raise
        key = id(group["params"])
        if key not in self._groups:
            self._groups[key] = _Parameters(group["params"])
        found = None
        if not group.get("differentiable"):
            found = self._groups[key].collect(optimizer, group)
        if found is None:
            return compat.init_group(optimizer, group, *lists)
        pieces, others = found
        self._pieces += pieces
        for piece in pieces:
            optimizer.state[piece.param] = piece.state
        try:
            names = [*(piece.param for piece in pieces), *others]
            return compat.init_group(optimizer, {**group, "params": names}, *lists)
        finally:
            for piece in pieces:
                del optimizer.state[piece.param]

    def _finish(self, optimizer: Optimizer, *hook_args: Any) -> None:
        """After the kernels of a group: write its results to the parameters and their states."""
        pieces, self._pieces = self._pieces, []
        for piece in pieces:
            piece.unpack()
            piece.state |= optimizer.state.pop(piece.param, {})  # SGD puts its momentum there
            if piece.lacks_states and piece.state:
                (owner,) = piece.owners
                optimizer.state[owner].update(_wrapped(piece.state, owner))
            # Autograd and the engine detect a change of a parameter by its version.
            torch.autograd.graph.increment_version(piece.owners)
        for _, alike in groupby(pieces, key=lambda piece: id(piece.space)):
            of_space = list(alike)
            space = of_space[0].space
            if space is not None:
                space.share_scalars([piece.members for piece in of_space])


class _Parameters:
    """The parameters of one group, with their members and spaces."""

    def __init__(self, params: list[torch.Tensor]) -> None:
        self._params = params  # keep a reference, so that its id is not reused
        self._members: dict[int, Member] = {}  # by id(param)
        self._spaces: list[Space] = []
        self._last = Members([])  # members of the last step
        self._settings = (False, False)  # settings of the last step

    def collect(
        self, optimizer: Optimizer, group: Group
    ) -> tuple[list[Piece], list[torch.Tensor]] | None:
        """Return the pieces for the parameters with a gradient, and the plain parameters.

        None: a DTensor cannot be in a piece. Torch refuses lists that mix it with plain tensors, so
        the whole group steps without pieces.
        """
        settings = (bool(group.get("fused")), bool(group.get("momentum")))
        if settings[0] and not self._may_join:
            return None
        if settings != self._settings:  # they decide which can join and which lack states
            self._settings, self._last = settings, Members([])
        ours: list[DTensor] = []
        grads: list[torch.Tensor] = []
        others: list[torch.Tensor] = []
        with compat.without_torch_function():
            for param in self._params:
                grad = param.grad
                if grad is None:
                    continue
                if isinstance(param, DTensor):
                    ours.append(param)
                    grads.append(grad)
                else:
                    others.append(param)
        alone: list[Piece] = []
        parts = self._last.parts_if_intact(ours, grads, optimizer.state)
        if parts is None:
            found = self._look_closer(optimizer, group, ours, grads)
            if found is None:
                return None
            parts, alone = found
        for space in self._spaces:
            space.grads = [None] * len(space.members)
        for member, part in zip(self._last.members, parts, strict=True):
            self._spaces[member.space].grads[member.index] = part.contiguous()
        pieces = [piece for space in self._spaces for piece in pieces_of(space)]
        return [*pieces, *alone], others

    @property
    def _may_join(self) -> bool:
        """Whether any parameter can be in a piece with others, under ``fused=True``."""
        with compat.without_torch_function():
            locals_ = (each._local_tensor for each in self._params if isinstance(each, DTensor))
            return any(_can_join(local, is_fused=True) for local in locals_)

    def _look_closer(
        self,
        optimizer: Optimizer,
        group: Group,
        params: list[DTensor],
        grads: list[torch.Tensor],
    ) -> tuple[list[torch.Tensor], list[Piece]] | None:
        """Find the members of this step. Returns their gradients, and pieces of all others."""
        if len(set(map(id, params))) != len(params):  # torch steps on a duplicate twice
            return None
        states: States = optimizer.state
        joined: list[tuple[DTensor, torch.Tensor]] = []
        alone: list[Piece] = []
        for param, grad in zip(params, grads, strict=True):
            part, state = _local_gradient(param, grad), _local_state(param, states)
            if part is None or state is None:
                return None
            local, lacks = compat.local_tensor(param), _lacks_states(optimizer, group, state)
            if not lacks and _can_join(local, is_fused=self._settings[0]):
                joined.append((param, part))
            else:
                piece = Piece(local.detach(), part, state, owners=[param], lacks_states=lacks)
                alone.append(piece)
        self._join([param for param, _ in joined], states)
        self._last = Members([self._members[id(param)] for param, _ in joined])
        return [part for _, part in joined], alone

    def _join(self, params: list[DTensor], states: States) -> None:
        """Make new spaces of all members if one of these parameters is not in a space yet."""
        stay = {key: each for key, each in self._members.items() if each.is_intact(states)}
        newcomers = {id(param): param for param in params if id(param) not in stay}
        if newcomers:
            wanted = [*(member.param for member in stay.values()), *newcomers.values()]
            members = [Member(param, states.get(param)) for param in wanted]
            self._members = {id(member.param): member for member in members}
            self._spaces = spaces_of(members)


def _can_join(local: torch.Tensor, *, is_fused: bool) -> bool:
    """Whether the results of a step do not depend on the position in a tensor.

    On a CPU they do for 16-bit and fused kernels: the last elements, which do not fill a vector
    register, take a different path that rounds differently (torch 2.13). A part that fills whole
    registers has no such elements, and neither have those before and after it in a piece.
    """
    if not local.is_contiguous() or not local.is_floating_point():
        return False
    if local.device.type != "cpu":
        return True
    return local.itemsize > 2 and (not is_fused or local.nbytes % _REGISTER_BYTES == 0)


def _local_gradient(param: DTensor, grad: torch.Tensor) -> torch.Tensor | None:
    """Return this rank's part of a gradient, or None if it is not sharded as its parameter."""
    if not isinstance(grad, DTensor) or type(compat.local_tensor(param)) is not torch.Tensor:
        return None
    spec, other = param._spec, grad._spec
    if other is not spec and (other.placements != spec.placements or other.mesh != spec.mesh):
        return None
    part = compat.local_tensor(grad)
    return part if type(part) is torch.Tensor and part.dtype == param.dtype else None


def _local_state(param: DTensor, states: States) -> State | None:
    """Return this rank's parts of a parameter's states; None if not sharded as the parameter."""
    shape = compat.local_tensor(param).shape
    parts: State = {}
    for name, value in (states.get(param) or {}).items():
        is_number = name in SCALARS and isinstance(value, torch.Tensor) and value.dim() == 0
        if value is None or is_number:
            parts[name] = value
        elif isinstance(value, DTensor) and compat.local_tensor(value).shape == shape:
            parts[name] = compat.local_tensor(value)
        else:
            return None
    return parts


def _wrapped(parts: State, param: DTensor) -> State:
    """Wrap the states of a local part as states of the parameter."""
    return {
        name: part if part is None or name in SCALARS else wrap(part, param._spec)
        for name, part in parts.items()
    }


def _lacks_states(optimizer: Optimizer, group: Group, state: State) -> bool:
    """Whether torch will make the states of a parameter in this step."""
    if isinstance(optimizer, SGD):
        return group["momentum"] != 0 and state.get("momentum_buffer") is None
    return not state
