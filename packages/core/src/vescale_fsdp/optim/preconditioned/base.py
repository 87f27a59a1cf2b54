"""What Shampoo and SOAP share: matrices with states of their own, each computed on one rank.

A rank has *parts*: whole matrices that it owns, or rows of blocks that lie on it anyway. What
happens to a part does not depend on where it lies, so all layouts give the same bits.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from vescale_fsdp.optim.base import (
    Group,
    ShardedOptimizer,
    State,
    gradient_of,
    local_of,
    zeros_placed,
)
from vescale_fsdp.optim.matrices.layout import layout_of, matrices_of
from vescale_fsdp.optim.matrices.owners import Job, assign_owners
from vescale_fsdp.optim.matrices.routes import Run
from vescale_fsdp.optim.preconditioned.courier import Courier
from vescale_fsdp.optim.preconditioned.resting import (
    Line,
    counts_of,
    held_of,
    line_of,
    resting_line,
    zeros_resting,
)
from vescale_fsdp.optim.preconditioned.roots import apply_

_MOMENTS = ("exp_avg", "exp_avg_sq")


class MatrixPart(NamedTuple):
    """Rows of a matrix on this rank, or all that it has of what is no matrix."""

    turn: int  # in the schedule of refreshes: the same on every rank and at every world size
    state: dict[str, torch.Tensor]  # views of this rank's states


class _Task(NamedTuple):
    """A parameter to step on."""

    param: torch.Tensor
    group: Group
    state: State
    step: int  # of this parameter, from 1
    turn: int  # of its first matrix: its number among all of the optimizer

    @property
    def is_matrix(self) -> bool:
        return not self.state.keys() <= {"step", *_MOMENTS}


class Preconditioned(ShardedOptimizer):
    """Base of Shampoo and SOAP: the order of work, and where states rest."""

    # What a subclass has

    def check_options(self, group: Group) -> None:
        """Raise ValueError if an option is out of range."""

    def matrix_states(
        self, rows: int, matrix: tuple[int, int], group: Group
    ) -> dict[str, tuple[int, ...]]:
        """The shapes of the states of so many rows of a matrix; none if it counts as a vector."""
        raise NotImplementedError

    def cost(self, matrix: tuple[int, int], group: Group) -> int:
        """Floating-point operations of a matrix per step, about."""
        raise NotImplementedError

    def is_local(self, group: Group) -> bool:
        """Whether every rank computes what it holds, instead of owners whole matrices."""
        return False

    def moves(self, step: int) -> bool:
        """Whether parameters move in a step."""
        return True

    def scale(self, group: Group, step: int) -> float:
        """What a direction is multiplied by, besides the learning rate."""
        return 1.0

    def direction(
        self, part: MatrixPart, grad: torch.Tensor, group: Group, step: int
    ) -> torch.Tensor:
        """Where to go, from a gradient of the states' dtype. Updates states."""
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
        """How many equal parts of its states each rank has: the matrices that it owns."""
        state = self.state.get(param)
        if state:  # they rest where they are
            return counts_of(state["exp_avg"], _num_matrices(param))
        given: dict[torch.Tensor, list[int]] = self.__dict__.setdefault("_given", {})
        if param not in given:
            given |= self._give_out(group, line, param)
        return given.pop(param)

    def _give_out(
        self, group: Group, line: Line, wanted: torch.Tensor
    ) -> dict[torch.Tensor, list[int]]:
        """Choose owners for ``wanted`` and all of its group that will have states with it."""
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
            # A stack rests in the order of the ranks: how many each has is all that matters.
            given.setdefault(param, [0] * line.num_ranks)[owner] += 1
        return given

    def held_rows(self, param: torch.Tensor, group: Group, state: State) -> list[tuple[int, int]]:
        """The parts of a parameter on this rank: the number of a matrix, and rows of it."""
        held = held_of(state["exp_avg"], _num_matrices(param))
        return [(number, param.shape[-2]) for number in held]

    def _parts(self, task: _Task) -> dict[int, MatrixPart]:
        """The parts on this rank by the number of their matrix, in order."""
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
        """The parameters with a gradient, with this step counted."""
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
        """Step on what this rank holds, without communication."""
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
        """Step on matrices, each as a whole on its owner."""
        params = [task.param for task in tasks]
        resting = [task.state["exp_avg"] for task in tasks]
        couriers: list[Courier] = self.__dict__.setdefault("_couriers", [])
        courier = Courier.known(couriers, params, resting, dtype)
        if courier is None:
            costs = [self.cost(_matrix(task.param), task.group) for task in tasks]
            courier = Courier(line, params, resting, costs, dtype)
            couriers.append(courier)
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

        courier.run([gradient_of(param) for param in params], compute, sink)
        for local, changed in zip(locals_, flat, strict=True):
            if not local.is_contiguous():
                local.copy_(changed.view(local.shape))

    def _factors(self, task: _Task) -> tuple[float, float] | None:
        """Of the parameter and of its direction, in this step; None if it does not move."""
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
        group: of parameters.
        positive: names of more options that must be positive integers.
        may_sum: whether ``betas[1]`` may be 1.

    Raises:
        ValueError: one is out of range.
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
