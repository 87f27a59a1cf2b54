"""Muon for sharded parameters. Momentum is sharded; one rank, the owner, computes each matrix.

Source: arXiv 2602.22437, Algorithm 2, for the scheme; Keller Jordan's Muon
(kellerjordan.github.io/posts/muon) and arXiv 2502.16982 for the optimizer, with the signature and
the numbers of ``torch.optim.Muon``.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, partial
from operator import is_
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from vescale_fsdp.engine import Granularity, GranularityPolicy
from vescale_fsdp.optim.base import (
    Group,
    Params,
    ShardedOptimizer,
    State,
    gradient_of,
    local_of,
    zeros_placed,
)
from vescale_fsdp.optim.layout import layout_of, split_heights
from vescale_fsdp.optim.muon_rule import (
    apply_update,
    direction,
    newton_schulz_cost,
    orthogonalized,
    step_by_redistribution,
    step_whole,
)
from vescale_fsdp.optim.owners import (
    Assignment,
    CommunicationPlan,
    Entry,
    assignments_of,
    communication_of,
)
from vescale_fsdp.optim.routes import Run, routes_of
from vescale_fsdp.optim.transport import Transport
from vescale_fsdp.ranks import collectives

# The dtype of messages. Newton-Schulz starts and ends in bf16, so sending bf16 loses nothing.
WIRE_DTYPE = torch.bfloat16


Sharded = tuple[DTensor, dict[str, Any]]  # a parameter, and the options of its group


def key_of(sharded: Sequence[Sharded]) -> tuple[Any, ...]:
    """Return a key of everything that a plan depends on, except placements."""
    return tuple(
        (id(param), _frozen(group["split_rows"]), group["ns_steps"]) for param, group in sharded
    )


def _frozen(split_rows: Any) -> Any:
    return tuple(split_rows) if isinstance(split_rows, Sequence) else split_rows


class Plan:
    """The assignments of a set of parameters to owners, and the transports for them.

    Cost: tens of microseconds for each matrix, once. No communication, except to make the first
    process group over several axes of a mesh.
    """

    def __init__(self, sharded: Sequence[Sharded], bucket_bytes: int) -> None:
        self._params = [param for param, _ in sharded]
        self._specs = [param._spec for param in self._params]
        self._bucket_elements = max(1, bucket_bytes // WIRE_DTYPE.itemsize)
        entries = [
            Entry(
                layout=layout_of(param),
                split_rows=group["split_rows"],
                cost=partial(newton_schulz_cost, steps=group["ns_steps"]),
            )
            for param, group in sharded
        ]
        self.assignments = assignments_of(entries)

    def fits(self, sharded: Sequence[Sharded]) -> bool:
        """Whether the parameters still have the same placements."""
        return all(map(is_, (param._spec for param, _ in sharded), self._specs))

    @property
    def communication(self) -> CommunicationPlan:
        """Return the communication of a step."""
        return communication_of(self.assignments, WIRE_DTYPE.itemsize, WIRE_DTYPE.itemsize)

    @cached_property
    def transports(self) -> list[Transport]:
        """Make a transport for each assignment. Call it in the same order on all their ranks."""
        return [self._transport(each) for each in self.assignments]

    def _transport(self, assignment: Assignment) -> Transport:
        params = [self._params[index] for index in assignment.params]
        group = _group_of(params, assignment.members)
        order = dist.get_process_group_ranks(group) if group else assignment.members
        routes = routes_of(
            assignment.matrices,
            assignment.owners,
            assignment.costs,
            assignment.grids,
            order,
            dist.get_rank(),
            self._bucket_elements,
        )
        return Transport(
            assignment.matrices,
            routes,
            group,
            gather_dtype=WIRE_DTYPE,
            scatter_dtype=WIRE_DTYPE,
            device=_device_of(params[0]),
        )


def _group_of(params: Sequence[DTensor], members: Sequence[int]) -> dist.ProcessGroup | None:
    """Return the process group of the members: a mesh's if it has one, else a new one."""
    if len(members) == 1:
        return None
    meshes = [param.device_mesh for param in params]
    group = collectives.mesh_group(meshes[0], 0)
    mesh = next((mesh for mesh in meshes if mesh.ndim == 1), None)
    return (
        collectives.group_over(list(members), group)
        if mesh is None
        else collectives.mesh_group(mesh, 0)
    )


def _device_of(param: DTensor) -> torch.device:
    """Return the device that computes matrices: the mesh's, also if parameters are offloaded."""
    local, kind = local_of(param).device, param.device_mesh.device_type
    return local if local.type == kind else torch.device(kind)


_ADJUSTMENTS = (None, "original", "match_rms_adamw")
_MOST_PLANS = 8  # limit for stored plans; each is for one set of parameters with a gradient


class _Task(NamedTuple):
    """A parameter to step on."""

    param: Any  # a tensor
    grad: torch.Tensor  # this rank's part
    momentum: torch.Tensor  # this rank's part
    group: Group


class Muon(ShardedOptimizer):
    """Muon: momentum, orthogonalized by Newton-Schulz, for the matrices of hidden layers.

    Bitwise equal to ``torch.optim.Muon`` on one process for fp32 parameters and the same gradients,
    on any number of ranks and with any sharding. Parameters in half precision are
    rounded once per step (torch: twice).

    A parameter of two dimensions is one matrix. One of more dimensions is a stack of matrices over
    its last two, such as experts, each treated as a parameter of its own.

    Each matrix is computed by its owner, one of the ranks that hold its parameter. Owners are
    chosen by cost; within 5% of the best balance, the rank that holds the most of a matrix is its
    owner. With replicas (HSDP) the work is divided over all of them.

    Args:
        params: parameters or (name, parameter) pairs: plain tensors, DTensors (FSDP2's as well)
            and RaggedTensors, of two or more dimensions.
        lr: learning rate, a float or a tensor of one element.
        weight_decay: decoupled; uses the learning rate before it is adjusted.
        momentum: of the moving average of gradients.
        nesterov: orthogonalize a mean of gradient and momentum, not the momentum.
        ns_coefficients: of the Newton-Schulz polynomial.
        eps: the least norm that a matrix is divided by.
        ns_steps: Newton-Schulz steps, below 100.
        adjust_lr_fn: how the learning rate depends on a matrix of A x B: ``"original"`` (or None)
            sqrt(max(1, A / B)), ``"match_rms_adamw"`` 0.2 * sqrt(max(A, B)).
        split_rows: for parameters that stack several matrices along the rows: the rows of each,
            such as ``[2048, 512, 512]`` for fused projections, or one number for all, such as the
            size of a head. An option of each group.
        overlap: False redistributes one parameter after another to one owner, as Algorithm 2 of
            the paper, with the same bits. Slow.
        bucket_bytes: approximately the number of bytes that a rank receives at a time.

    State: ``momentum_buffer``, in the dtype and with the placements of the parameter: 4 bytes for
    each fp32 element.

    Cost of a step: 2 bytes each way for each element that the owner of a matrix does not hold, in
    at most two uneven all-to-alls per bucket; nothing for a matrix that is whole on one rank (with
    replicas, the result is sent to the others). All messages but the first and the last overlap
    with compute. Memory: about eight times ``bucket_bytes``, and five times the largest matrix in
    bf16. See `communication_plan`.

    Raises:
        ValueError: an option is invalid; a parameter has fewer than two dimensions, is
            complex, or does not have the rows of ``split_rows``.
    """

    def __init__(
        self,
        params: Params,
        lr: float | torch.Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        *,
        split_rows: int | Sequence[int] | None = None,
        overlap: bool = True,
        bucket_bytes: int = 8 << 20,
    ) -> None:
        if bucket_bytes < 1:
            raise ValueError(f"Muon: bucket_bytes must be positive, got {bucket_bytes}")
        self.overlap, self.bucket_bytes = overlap, bucket_bytes
        self._plans: dict[Any, Plan] = {}
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": ns_coefficients,
            "eps": eps,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
            "split_rows": split_rows,
        }
        super().__init__(params, defaults)

    @staticmethod
    def granularity(*, whole_experts: bool = False) -> GranularityPolicy:
        """A policy for ``fully_shard(granularity=...)``. Muon needs none: any split is exact.

        Larger blocks pad the shards and seldom save communication, because a matrix is sent to a
        rank that holds most of it. By a model, for gpt-oss-120b on 64 ranks 10% of all elements
        are sent if parameters are split anywhere, 24% with whole experts, which also pad by 32%;
        for Mixtral-8x7B on 4 ranks 6% and none, for 2% of padding.

        Args:
            whole_experts: split stacks of matrices (three or more dimensions) only between
                matrices, so that an expert is sent only to balance the work. This can help if a
                stack has several times as many matrices as there are ranks.
        """
        return _whole_matrices_of_stacks if whole_experts else _anywhere

    def communication_plan(self) -> CommunicationPlan:
        """Which rank computes which matrix and sends how much, if all parameters have a gradient.

        No communication; the same on all ranks of one set of parameters.
        """
        sharded = [
            (param, group)
            for _, param, group in self.named_params()
            if param.requires_grad and param.numel() and isinstance(param, DTensor)
        ]
        return self._plan_of(sharded).communication

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = super().__getstate__()
        return state | {"overlap": self.overlap, "bucket_bytes": self.bucket_bytes}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._plans = {}
        super().__setstate__(state)

    def check_layout(self, param: torch.Tensor, group: Group, name: str) -> None:
        """See the base. Any split of a matrix is allowed."""
        _check_options(group)
        if param.dim() < 2:
            raise ValueError(
                f"Muon only supports parameters of two or more dimensions, whereas {name} has "
                f"shape {tuple(param.shape)}. Use another optimizer for biases, gains and other "
                "vectors, AdamW for example"
            )
        if param.is_complex():
            raise ValueError(f"Muon does not support complex parameters, and {name} is one")
        try:
            split_heights(param.shape[-2], group["split_rows"])
        except ValueError as error:
            raise ValueError(f"Muon: {name} of shape {tuple(param.shape)}: {error}") from None
        layout_of(param, name)

    def init_state(self, param: torch.Tensor, group: Group) -> State:
        """See the base."""
        return {"momentum_buffer": zeros_placed(param, param.dtype)}

    def update(self) -> None:
        """See the base."""
        tasks = self._tasks()
        for task in tasks:
            task.momentum.lerp_(task.grad, 1 - task.group["momentum"])
        sharded: list[_Task] = []
        for task in tasks:
            if isinstance(task.param, DTensor):
                sharded.append(task)
            else:
                step_whole(task.param, task.grad, task.momentum, task.group)
        if not sharded:
            return
        if self.overlap:
            plan = self._plan_of([(task.param, task.group) for task in sharded])
            for assignment, transport in zip(plan.assignments, plan.transports, strict=True):
                _step([sharded[index] for index in assignment.params], assignment, transport)
        else:
            for root, task in enumerate(sharded):
                step_by_redistribution(*task, root=root)
        torch.autograd.graph.increment_version([task.param for task in sharded])

    def _tasks(self) -> list[_Task]:
        """Return the parameters with a gradient, with options whose learning rate is a float."""
        tasks = []
        for group in self.param_groups:
            options = {**group, "lr": float(group["lr"])}  # once: it may be on a device
            for param in self.with_gradient(group):
                if not param.numel():
                    continue
                momentum = local_of(self.state[param]["momentum_buffer"])
                tasks.append(_Task(param, gradient_of(param), momentum, options))
        return tasks

    def _plan_of(self, sharded: list[Sharded]) -> Plan:
        key = (key_of(sharded), self.bucket_bytes)
        plan = self._plans.get(key)
        if plan is None or not plan.fits(sharded):
            if len(self._plans) >= _MOST_PLANS:
                self._plans.clear()
            plan = self._plans[key] = Plan(sharded, self.bucket_bytes)
        return plan


def _check_options(group: Group) -> None:
    """Raise ValueError if an option other than ``split_rows`` is invalid."""
    lr = group["lr"]
    if isinstance(lr, torch.Tensor) and lr.numel() != 1:
        raise ValueError("Tensor lr must be 1-element")
    for what in ("lr", "momentum", "weight_decay"):
        if not group[what] >= 0.0:  # also NaN
            raise ValueError(f"Muon: {what} must be at least 0, got {group[what]}")
    if group["adjust_lr_fn"] not in _ADJUSTMENTS:
        raise ValueError(
            f"Adjust learning rate function {group['adjust_lr_fn']} is not supported, expected "
            f"one of {_ADJUSTMENTS}"
        )
    if len(group["ns_coefficients"]) != 3 or not 0 <= group["ns_steps"] < 100:
        raise ValueError(
            f"Muon: expected 3 ns_coefficients and ns_steps in [0, 100), got "
            f"{group['ns_coefficients']} and {group['ns_steps']}"
        )


def _step(tasks: list[_Task], assignment: Assignment, transport: Transport) -> None:
    """Step on parameters that are on the same ranks. Their momentum is already updated."""
    groups, matrices = [task.group for task in tasks], assignment.matrices
    params = [local_of(task.param) for task in tasks]
    # A local part that is not contiguous (Shard(1)) is copied, and copied back after the step.
    flat = [param.reshape(-1) for param in params]
    grads = [task.grad.reshape(-1) for task in tasks]
    momenta = [task.momentum.reshape(-1) for task in tasks]

    def source(run: Run) -> torch.Tensor:
        part = slice(run.start, run.stop)
        return direction(grads[run.param][part], momenta[run.param][part], groups[run.param])

    def compute(index: int, matrix: torch.Tensor) -> torch.Tensor:
        return orthogonalized(matrix, groups[matrices[index].param])

    def sink(run: Run, index: int, update: torch.Tensor) -> None:
        matrix, part = matrices[index], flat[run.param][run.start : run.stop]
        apply_update(part, update.to(part.device), groups[run.param], matrix.rows, matrix.cols)

    transport.run(source, compute, sink)
    for param, stepped in zip(params, flat, strict=True):
        if not param.is_contiguous():
            param.copy_(stepped.view(param.shape))


def _whole_matrices_of_stacks(fqn: str, param: nn.Parameter) -> Granularity | None:
    return Granularity.rows(param.shape[-2]) if param.dim() >= 3 else None


def _anywhere(fqn: str, param: nn.Parameter) -> Granularity | None:
    return None
