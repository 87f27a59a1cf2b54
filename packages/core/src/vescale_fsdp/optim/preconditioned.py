"""The base class of Shampoo and SOAP: matrices with states, each computed on one rank.

A rank computes *parts*: whole matrices that it owns, or rows of blocks in its shard. The result of
a part does not depend on the rank, so all layouts give the same bits.

The matrices of a parameter are a stack. Each of its states is one tensor whose first dimension is
the stack. Ranks own consecutive matrices, in the order of the ranks. So each state is a DTensor
with a RaggedShard, and a checkpoint can reshard it. Example: five matrices of (4, 4), three ranks::

    owner               0   0   2   2   2           counts (2, 0, 3)
    left  (5, 4, 4)   | 32 elements | | 48 elements |

If other axes of the mesh replicate, each replica has the whole stack. If several axes shard, the
stack is sharded over a new mesh with one axis, made of them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from vescale_fsdp.optim.base import (
    Group,
    ShardedOptimizer,
    State,
    gradient_of,
    local_of,
    zeros_placed,
)
from vescale_fsdp.optim.layout import Matrix, layout_of, matrices_of
from vescale_fsdp.optim.owners import Job, assign_owners
from vescale_fsdp.optim.roots import apply_
from vescale_fsdp.optim.routes import Run, routes_of
from vescale_fsdp.optim.transport import Sink, Transport, from_tensors
from vescale_fsdp.ragged import RaggedShard, RaggedTensor
from vescale_fsdp.ranks import collectives


class Line(NamedTuple):
    """The ranks of one replica, over which the matrices of a parameter are distributed."""

    mesh: DeviceMesh
    axis: int  # of the mesh; the other axes replicate

    @property
    def num_ranks(self) -> int:
        return int(self.mesh.size(self.axis))


def line_of(param: torch.Tensor) -> Line | None:
    """Return the ranks of one replica of a parameter. None: each rank has all of it.

    The first call is collective among these ranks if several axes of the mesh shard the parameter.
    """
    if not isinstance(param, DTensor):
        return None
    axes = [axis for axis, p in enumerate(param.placements) if not p.is_replicate()]
    if not axes:
        return None
    if len(axes) == 1:
        return Line(param.device_mesh, axes[0])
    rank = torch.distributed.get_rank()
    ranks = next(ranks for ranks in layout_of(param).grid() if rank in ranks)
    return Line(collectives.mesh_over(list(ranks), param.device_mesh), 0)


def resting_line(state: torch.Tensor) -> Line | None:
    """Return the line over which a state is distributed. None: each rank has all of it."""
    if not isinstance(state, RaggedTensor):
        return None
    return Line(state.device_mesh, state.ragged_axis)


def zeros_resting(
    param: torch.Tensor,
    line: Line | None,
    dtype: torch.dtype,
    shape: Sequence[int],
    counts: Sequence[int],
) -> torch.Tensor:
    """Make a state of zeros. Each rank of the line has as many equal parts as ``counts`` says."""
    if line is None:  # every rank has all of it
        return zeros_placed(param, dtype, shape)
    part, rest = divmod(math.prod(shape), sum(counts))
    assert not rest, f"{sum(counts)} equal parts of a state of shape {tuple(shape)}"
    ragged = RaggedShard.from_runs_of_elements([(1, count * part) for count in counts], shape)
    axes = range(line.mesh.ndim)
    placements = [ragged if axis == line.axis else Replicate() for axis in axes]
    return zeros_placed(param, dtype, shape, placements, line.mesh)


def counts_of(state: torch.Tensor, num_parts: int) -> list[int]:
    """Return the number of equal parts of a distributed state on each rank of its line."""
    assert isinstance(state, RaggedTensor), "states that a rank keeps are ragged"
    placement = state.ragged_placement
    scale, rest = divmod(num_parts, placement.total_units)
    assert not rest, "each rank holds whole parts"
    return [units * scale for units in placement.local_units]


def held_of(state: torch.Tensor, num_parts: int) -> range:
    """Return the indices of the equal parts of a distributed state on this rank."""
    if not isinstance(state, RaggedTensor):
        return range(num_parts)
    part = math.prod(state.shape) // num_parts
    start, stop = state.local_range
    return range(start // part, stop // part)


_BUCKET_ELEMENTS = 1 << 24  # 64 MiB of fp32; two buckets each way are in memory at a time
_MOST_KEPT = 4  # limit for stored transports

# Returns the update of a matrix from the index of its parameter, its number there, its gradient.
Compute = Callable[[int, int, torch.Tensor], torch.Tensor]


class LineTransport:
    """A transport for the matrices of parameters on one line. Ranks with their states own them.

    Nothing is sent between replicas (HSDP); each has its own transport.

    Args:
        line: the line of all parameters.
        params: parameters of at least two dimensions.
        states: for each parameter a state whose matrices are each whole on their owner.
        costs: for each parameter the cost of one matrix.
        dtype: of the gradients. Updates have the dtype of the states.
    """

    def __init__(
        self,
        line: Line,
        params: Sequence[torch.Tensor],
        states: Sequence[torch.Tensor],
        costs: Sequence[int],
        dtype: torch.dtype,
    ) -> None:
        self._key = _key(params, states, dtype)
        group = collectives.mesh_group(line.mesh, line.axis)
        ranks = collectives.axis_ranks(line.mesh, line.axis)
        self._matrices: list[tuple[int, int]] = []  # (parameter, number)
        matrices: list[Matrix] = []
        owners: list[int] = []
        for index, (param, state) in enumerate(zip(params, states, strict=True)):
            found = matrices_of(layout_of(param), index)
            matrices += found
            self._matrices += [(index, number) for number in range(len(found))]
            counts = counts_of(state, len(found))
            owners += [rank for rank, n in zip(ranks, counts, strict=True) for _ in range(n)]
        routes = routes_of(
            matrices,
            owners,
            [costs[index] for index, _ in self._matrices],
            [[ranks]] * len(params),
            dist.get_process_group_ranks(group),
            dist.get_rank(),
            _BUCKET_ELEMENTS,
        )
        self._transport = Transport(
            matrices,
            routes,
            group,
            gather_dtype=dtype,
            scatter_dtype=states[0].dtype,
            device=local_of(states[0]).device,
        )

    @staticmethod
    def known(
        transports: list[LineTransport],
        params: Sequence[torch.Tensor],
        states: Sequence[torch.Tensor],
        dtype: torch.dtype,
    ) -> LineTransport | None:
        """Return the transport for tensors with these placements, if any.

        Else the longest unused ones are dropped.
        """
        key = _key(params, states, dtype)
        for transport in transports:
            if transport._key == key:
                transports.remove(transport)
                transports.append(transport)
                return transport
        del transports[: 1 - _MOST_KEPT]
        return None

    def run(self, grads: Sequence[torch.Tensor], compute: Compute, sink: Sink) -> None:
        """Compute each matrix on its owner, and send the updates to the ranks with its elements.

        Collective on the line.

        Args:
            grads: this rank's parts, one per parameter.
            compute: called for the matrices that this rank owns.
            sink: gets the updates, as in `Transport`.
        """

        def of_index(index: int, grad: torch.Tensor) -> torch.Tensor:
            return compute(*self._matrices[index], grad)

        self._transport.run(from_tensors(grads), of_index, sink)


def _key(
    params: Sequence[torch.Tensor], states: Sequence[torch.Tensor], dtype: torch.dtype
) -> list[object]:
    """Return a key of everything that the routes depend on: meshes, shapes, placements, dtypes."""
    specs = [each._spec for each in (*params, *states) if isinstance(each, DTensor)]
    return [dtype, *specs]


_MOMENTS = ("exp_avg", "exp_avg_sq")


class MatrixPart(NamedTuple):
    """Rows of a matrix on this rank; or this rank's part of a parameter that is not a matrix."""

    turn: int  # in the schedule of refreshes; the same on every rank and for any world size
    state: dict[str, torch.Tensor]  # views of this rank's states


class _Task(NamedTuple):
    """A parameter to step on."""

    param: torch.Tensor
    group: Group
    state: State
    step: int  # of this parameter, counted from 1
    turn: int  # number of its first matrix among all of the optimizer

    @property
    def is_matrix(self) -> bool:
        return not self.state.keys() <= {"step", *_MOMENTS}


class Preconditioned(ShardedOptimizer):
    """Base class of Shampoo and SOAP: runs the step, and distributes the states over ranks."""

    # Methods of subclasses

    def check_options(self, group: Group) -> None:
        """Raise ValueError if an option is out of range."""

    def matrix_states(
        self, rows: int, matrix: tuple[int, int], group: Group
    ) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the states for ``rows`` rows of a matrix; {} if it is a vector."""
        raise NotImplementedError

    def cost(self, matrix: tuple[int, int], group: Group) -> int:
        """Return the approximate number of floating-point operations of a matrix per step."""
        raise NotImplementedError

    def is_local(self, group: Group) -> bool:
        """Whether each rank computes its own shard. False: owners compute whole matrices."""
        return False

    def moves(self, step: int) -> bool:
        """Whether this step changes parameters."""
        return True

    def scale(self, group: Group, step: int) -> float:
        """Return a factor of the direction, in addition to the learning rate."""
        return 1.0

    def direction(
        self, part: MatrixPart, grad: torch.Tensor, group: Group, step: int
    ) -> torch.Tensor:
        """Return the direction for a gradient, which has the states' dtype. Updates states."""
        raise NotImplementedError

    def learn(self, part: MatrixPart, grad: torch.Tensor, group: Group, step: int) -> None:
        """Update the states that the direction of this step does not need."""

    # States

    def check_layout(self, param: torch.Tensor, group: Group, name: str) -> None:
        self.check_options(group)
        if not param.is_floating_point():
            raise ValueError(f"{type(self).__name__}: {name} has {param.dtype}, expected floats")
        layout_of(param, name)

    def is_matrix(self, param: torch.Tensor, group: Group) -> bool:
        """Whether a parameter has preconditioners."""
        if param.dim() < 2 or not param.numel():
            return False
        return bool(self.matrix_states(param.shape[-2], _matrix(param), group))

    def init_state(self, param: torch.Tensor, group: Group) -> State:
        dtype = torch.promote_types(param.dtype, torch.float32)
        state: State = {"step": torch.zeros((), dtype=torch.float32)}
        if not self.is_matrix(param, group):
            return state | {name: zeros_placed(param, dtype) for name in _MOMENTS}
        shapes = self.matrix_states(param.shape[-2], _matrix(param), group)
        line = line_of(param)
        counts = self.counts(param, group, line) if line else ()
        for name, shape in shapes.items():
            if name in _MOMENTS and self.is_local(group):
                state[name] = zeros_placed(param, dtype, param.shape)
            else:
                state[name] = zeros_resting(param, line, dtype, (*param.shape[:-2], *shape), counts)
        return state

    def counts(self, param: torch.Tensor, group: Group, line: Line) -> Sequence[int]:
        """Return how many matrices of a parameter each rank owns."""
        state = self.state.get(param)
        if state:  # existing states stay on their ranks
            return counts_of(state["exp_avg"], _num_matrices(param))
        given: dict[torch.Tensor, list[int]] = self.__dict__.setdefault("_given", {})
        if param not in given:
            given |= self._give_out(group, line, param)
        return given.pop(param)

    def _give_out(
        self, group: Group, line: Line, wanted: torch.Tensor
    ) -> dict[torch.Tensor, list[int]]:
        """Choose owners for ``wanted``, and for the parameters of its group without states."""
        loads = [0] * line.num_ranks
        jobs: list[Job] = []
        owned: list[torch.Tensor] = []
        for _, param, of_param in self.named_params():
            if self.is_local(of_param) or not self.is_matrix(param, of_param):
                continue
            if line_of(param) != line:
                continue
            cost = self.cost(_matrix(param), of_param)
            if self.state.get(param):
                counts = counts_of(self.state[param]["exp_avg"], _num_matrices(param))
                loads = [load + count * cost for load, count in zip(loads, counts, strict=True)]
            elif of_param is group and (param.requires_grad or param is wanted):
                for matrix in matrices_of(layout_of(param)):
                    held: Counter[int] = Counter()
                    for part in matrix.parts:
                        held[part.position] += part.numel
                    jobs.append(Job(cost, matrix.numel * param.itemsize, "", [*held.items()]))
                    owned.append(param)
        given: dict[torch.Tensor, list[int]] = {}
        owners = assign_owners(jobs, line.num_ranks, loads=loads)
        for param, owner in zip(owned, owners, strict=True):
            # Matrices of a stack are distributed in the order of the ranks, so only counts matter.
            given.setdefault(param, [0] * line.num_ranks)[owner] += 1
        return given

    def held_rows(self, param: torch.Tensor, group: Group, state: State) -> list[tuple[int, int]]:
        """Return the parts of a parameter on this rank: number of a matrix, and number of rows."""
        held = held_of(state["exp_avg"], _num_matrices(param))
        return [(number, param.shape[-2]) for number in held]

    def _parts(self, task: _Task) -> dict[int, MatrixPart]:
        """Return the parts on this rank by the number of their matrix, in order."""
        matrix, parts = _matrix(task.param), {}
        flat = {key: local_of(v).view(-1) for key, v in task.state.items() if key != "step"}
        for number, rows in self.held_rows(task.param, task.group, task.state):
            views = {}
            for name, shape in self.matrix_states(rows, matrix, task.group).items():
                numel = math.prod(shape)
                views[name], flat[name] = flat[name][:numel].view(shape), flat[name][numel:]
            parts[number] = MatrixPart(task.turn + number if task.group["stagger"] else 0, views)
        return parts

    # Steps

    def update(self) -> None:
        here: list[_Task] = []
        away: dict[tuple[Any, ...], list[_Task]] = {}
        for task in self._tasks():
            line = resting_line(task.state["exp_avg"])
            if line is None or not task.is_matrix or self.is_local(task.group):
                here.append(task)
            else:
                assert task.param.grad is not None, "it has a task"
                dtypes = task.param.grad.dtype, task.state["exp_avg"].dtype
                away.setdefault((line, task.param.device, *dtypes), []).append(task)
        for (line, _, dtype, _), tasks in away.items():
            self._step_away(line, dtype, tasks)
        for task in here:
            self._step_here(task)

    def _tasks(self) -> list[_Task]:
        """Return the parameters with a gradient. Increments their `step`."""
        tasks, turn = [], 0
        for group in self.param_groups:
            stepping = {id(param) for param in self.with_gradient(group)}
            for param in group["params"]:
                if id(param) in stepping:
                    state = self.state[param]
                    state["step"] += 1
                    tasks.append(_Task(param, group, state, int(state["step"]), turn))
                turn += _num_matrices(param) if self.is_matrix(param, group) else 0
        return tasks

    def _step_here(self, task: _Task) -> None:
        """Step on this rank's shard, without communication."""
        param, grad = local_of(task.param), gradient_of(task.param)
        if task.is_matrix:
            rows = grad.reshape(-1, task.param.shape[-1])
            update = torch.empty_like(rows, dtype=task.state["exp_avg"].dtype)
            start = 0
            for part in self._parts(task).values():
                stop = start + len(part.state["exp_avg"])
                update[start:stop] = self._computed(part, rows[start:stop], task)
                start = stop
            assert start == len(rows), "the parts are all rows of this rank"
        else:
            part = MatrixPart(0, {name: local_of(task.state[name]) for name in _MOMENTS})
            update = self._computed(part, grad, task)
        factors = self._factors(task)
        if factors is not None:
            apply_(param, update.view(param.shape), *factors)

    def _step_away(self, line: Line, dtype: torch.dtype, tasks: list[_Task]) -> None:
        """Step on matrices that are computed by their owners."""
        params = [task.param for task in tasks]
        resting = [task.state["exp_avg"] for task in tasks]
        transports: list[LineTransport] = self.__dict__.setdefault("_transports", [])
        transport = LineTransport.known(transports, params, resting, dtype)
        if transport is None:
            costs = [self.cost(_matrix(task.param), task.group) for task in tasks]
            transport = LineTransport(line, params, resting, costs, dtype)
            transports.append(transport)
        parts = [self._parts(task) for task in tasks]
        factors = [self._factors(task) for task in tasks]
        locals_ = [local_of(param) for param in params]
        flat = [local.contiguous().view(-1) for local in locals_]

        def compute(index: int, number: int, grad: torch.Tensor) -> torch.Tensor:
            return self._computed(parts[index][number], grad, tasks[index])

        def sink(run: Run, _: int, update: torch.Tensor) -> None:
            factors_of_run = factors[run.param]
            if factors_of_run is not None:
                apply_(flat[run.param][run.start : run.stop], update, *factors_of_run)

        transport.run([gradient_of(param) for param in params], compute, sink)
        for local, changed in zip(locals_, flat, strict=True):
            if not local.is_contiguous():
                local.copy_(changed.view(local.shape))

    def _factors(self, task: _Task) -> tuple[float, float] | None:
        """Return the factors of parameter and direction. None: this step does not change it."""
        if not self.moves(task.step):
            return None
        lr = float(task.group["lr"])
        return 1 - lr * task.group["weight_decay"], -lr * self.scale(task.group, task.step)

    def _computed(self, part: MatrixPart, grad: torch.Tensor, task: _Task) -> torch.Tensor:
        grad = grad.to(part.state["exp_avg"].dtype)
        if self.moves(task.step):
            update = self.direction(part, grad, task.group, task.step)
        else:
            update = torch.zeros_like(grad)
        self.learn(part, grad, task.group, task.step)
        return update


def check_options(name: str, group: Group, *positive: str, may_sum: bool = False) -> None:
    """Check the options that Shampoo and SOAP share.

    Args:
        name: of the optimizer.
        group: the group of parameters.
        positive: names of other options that must be positive integers.
        may_sum: whether ``betas[1]`` may be 1.

    Raises:
        ValueError: an option is out of range.
    """
    lr, weight_decay, eps = group["lr"], group["weight_decay"], group["eps"]
    if isinstance(lr, torch.Tensor) and lr.numel() != 1:
        raise ValueError(f"{name}: lr must have one element, got shape {tuple(lr.shape)}")
    if not float(lr) >= 0:
        raise ValueError(f"{name}: lr must not be negative, got {lr}")
    if not weight_decay >= 0:
        raise ValueError(f"{name}: weight_decay must not be negative, got {weight_decay}")
    if not isinstance(group["betas"], Sequence) or len(group["betas"]) != 2:
        raise ValueError(f"{name}: betas must be two numbers, got {group['betas']}")
    beta1, beta2 = group["betas"]
    if not 0 <= beta1 < 1 or not 0 <= beta2 <= 1 or (beta2 == 1 and not may_sum):
        raise ValueError(f"{name}: betas must be in [0, 1), got {group['betas']}")
    if not eps > 0:
        raise ValueError(f"{name}: eps must be positive, got {eps}")
    for option in ("precondition_frequency", *positive):
        if not isinstance(group[option], int) or group[option] < 1:
            raise ValueError(f"{name}: {option} must be a positive int, got {group[option]!r}")


def _matrix(param: torch.Tensor) -> tuple[int, int]:
    return param.shape[-2], param.shape[-1]


def _num_matrices(param: torch.Tensor) -> int:
    return math.prod(param.shape[:-2])
