"""Shampoo: multiplies gradients by inverse roots of their second moments, for each block.

Source: arXiv 1802.09568; moving averages, grafting and blocks as in arXiv 2309.06497.

Blocks of b x b tile each matrix from its first element; the last ones may be smaller. A rank with
complete rows of blocks needs nothing from others. Example: a matrix of (5, 7) with b = 2 has 3 x 4
blocks. It is split after row 4, and the states of its blocks are split in the same way::

              cols 0-1   2-3   4-5   6
    rows 0-1     .        .     .    .     rank 0: 2 rows of blocks
    rows 2-3     .        .     .    .
    row  4       .        .     .    .     rank 1: 1 row of blocks
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import nn

from vescale_fsdp.engine import Granularity, GranularityPolicy
from vescale_fsdp.errors import PlanError
from vescale_fsdp.optim.base import Group, Params, State
from vescale_fsdp.optim.layout import layout_of, spans_of
from vescale_fsdp.optim.preconditioned import (
    Line,
    MatrixPart,
    Preconditioned,
    check_options,
    line_of,
)
from vescale_fsdp.optim.roots import (
    accumulate_,
    aligned,
    bias_corrections,
    first_due,
    inverse_root,
    is_due,
    update_moments_,
)

Mode = Literal["local", "owner"]
Grafting = Literal["adam", "sgd"]

_EXPONENT = 1 / 4  # 1 / (2 * order), and a matrix has order 2
_TINY = 1e-16  # added to norms, against division by 0


class Shampoo(Preconditioned):
    """Blocked Shampoo for sharded and for plain parameters, with the same numbers.

    Each block ``G`` (r, c) of a matrix has the statistics ``left`` (r, r) and ``right`` (c, c),
    averages of ``G Gᵀ`` and ``Gᵀ G``. Its direction is ``left^-1/4 M right^-1/4``, where ``M`` is
    the average of gradients, scaled to the length of another method's step (grafting). Until the
    statistics have seen ``precondition_frequency`` gradients, that step itself is taken, because
    roots of few gradients would amplify directions that these gradients do not have. In a stack of
    matrices (three dimensions and more) each is a matrix. Vectors take Adam's step.

    - ``mode="local"``: each rank preconditions the blocks that it holds, without communication.
      Shards must hold whole rows of blocks: ``fully_shard(granularity=Shampoo.granularity(b))``.
    - ``mode="owner"``: each matrix has an owner, which computes it as a whole; blocks may be as
      large as matrices, and parameters may be split anywhere. Owners are assigned by cost; those
      of one stack in the order of the ranks. Replicas (HSDP) compute the same.

    The mode decides where blocks are computed. The numbers are the same.

    Args:
        params: parameters, (name, parameter) pairs or groups.
        lr: learning rate, a number or a tensor.
        betas: decay of the averages of gradients, and of statistics and squares. ``betas[1] = 1``
            sums instead, as the original Shampoo and AdaGrad.
        eps: added to the eigenvalues of the statistics.
        weight_decay: decoupled, as in AdamW.
        mode: where matrices are computed.
        block_size: rows and columns of a block, b.
        precondition_frequency: steps from one computation of roots to the next.
        grafting: the method that gives each block's step its length: ``"adam"`` (AdaGrad with
            ``betas[1] = 1``), ``"sgd"`` (``M`` itself), or None for Shampoo's own, with roots from
            the first step on. None needs a frequency of 1, or a much larger ``eps``.
        grafting_eps: added to the root of the squares, in Adam's steps.
        stagger: matrices compute their roots in different steps, by their number among all
            matrices of this optimizer; else all at the same time.

    State: ``step``, ``exp_avg`` and, with ``grafting="adam"``, ``exp_avg_sq`` of the parameter's
    shape; ``left``, ``left_root`` and ``right``, ``right_root``, one (b, b) for each block, all in
    fp32 at least: 24 bytes per parameter (20 without ``exp_avg_sq``) where b divides rows and
    columns. They are on the rank that computes the block. Each is a DTensor, so a checkpoint loads
    on other ranks, also in the other mode.

    Cost of a step of (m, n): about 8 m n b floating-point operations and, when roots are due, 50
    m n b. No communication in local mode. In owner mode, gradients are sent to the owners in their
    dtype and updates back in fp32, except for matrices that are whole on their owner.

    Raises:
        PlanError: in local mode, a block of a parameter is split.
        ValueError: an option is out of range, or a parameter is a plain tensor from `to_local`.
    """

    fixed_options: ClassVar[frozenset[str]] = frozenset({"mode", "block_size", "grafting"})

    def __init__(
        self,
        params: Params,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-12,
        weight_decay: float = 0.0,
        *,
        mode: Mode = "local",
        block_size: int = 128,
        precondition_frequency: int = 10,
        grafting: Grafting | None = "adam",
        grafting_eps: float = 1e-8,
        stagger: bool = True,
    ) -> None:
        defaults: dict[str, Any] = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "mode": mode,
            "block_size": block_size,
            "precondition_frequency": precondition_frequency,
            "grafting": grafting,
            "grafting_eps": grafting_eps,
            "stagger": stagger,
        }
        super().__init__(params, defaults)

    @staticmethod
    def granularity(block_size: int = 128) -> GranularityPolicy:
        """The policy for local mode: rows of blocks of a matrix stay whole; vectors may be split.

        ::

            fully_shard(model, granularity=Shampoo.granularity(64))
            optimizer = Shampoo(model.parameters(), block_size=64)
        """
        tile = Granularity.tile(block_size, block_size)

        def policy(fqn: str, param: nn.Parameter) -> Granularity | None:
            return tile if param.dim() >= 2 else None

        return policy

    # Layouts

    def check_options(self, group: Group) -> None:
        check_options("Shampoo", group, "block_size", may_sum=True)
        if group["mode"] not in get_args(Mode):
            raise ValueError(f'Shampoo: mode must be "local" or "owner", got {group["mode"]!r}')
        if group["grafting"] not in (*get_args(Grafting), None):
            raise ValueError(
                f'Shampoo: grafting must be "adam", "sgd" or None, got {group["grafting"]!r}'
            )

    def check_layout(self, param: torch.Tensor, group: Group, name: str) -> None:
        super().check_layout(param, group, name)
        if self.is_local(group) and self.is_matrix(param, group):
            _check_blocks(param, group["block_size"], name)

    def is_local(self, group: Group) -> bool:
        return bool(group["mode"] == "local")

    def matrix_states(
        self, rows: int, matrix: tuple[int, int], group: Group
    ) -> dict[str, tuple[int, ...]]:
        size = group["block_size"]
        blocks = (-(-rows // size), -(-matrix[1] // size))
        left, right = ((*blocks, *(min(size, length),) * 2) for length in matrix)
        states = {"exp_avg": (rows, matrix[1])}
        if group["grafting"] == "adam":
            states["exp_avg_sq"] = (rows, matrix[1])
        return states | {"left": left, "left_root": left, "right": right, "right_root": right}

    def cost(self, matrix: tuple[int, int], group: Group) -> int:
        m, n = matrix
        each_step = m * n * min(int(group["block_size"]), max(m, n))
        return 8 * each_step + 50 * each_step // int(group["precondition_frequency"])

    def counts(self, param: torch.Tensor, group: Group, line: Line) -> Sequence[int]:
        if not self.is_local(group):
            return super().counts(param, group, line)
        counts = [0] * line.num_ranks
        for position, start, stop in _ranges(param):
            rows = [rows for _, rows in _rows_of(param, start, stop)]
            counts[position] = sum(-(-each // group["block_size"]) for each in rows)
        return counts

    def held_rows(self, param: torch.Tensor, group: Group, state: State) -> list[tuple[int, int]]:
        if not self.is_local(group):
            return super().held_rows(param, group, state)
        line = line_of(param)
        here = line.mesh.get_local_rank(line.axis) if line else 0
        return [
            each
            for position, start, stop in _ranges(param)
            if position == here
            for each in _rows_of(param, start, stop)
        ]

    # Steps

    def direction(
        self, part: MatrixPart, grad: torch.Tensor, group: Group, step: int
    ) -> torch.Tensor:
        update_moments_(part.state, grad, group["betas"])
        first, second = bias_corrections(group["betas"], step)
        average = graft = part.state["exp_avg"] / first
        if "exp_avg_sq" in part.state:
            squares = part.state["exp_avg_sq"] / second
            graft = average / squares.sqrt_().add_(group["grafting_eps"])
        if "left" not in part.state:
            return graft
        start, due = _roots_due(part.turn, group, step)
        update = torch.empty_like(average)
        for place, block in _blocks(grad, group["block_size"]):
            sides = _sides(part.state, place, grad[block])
            _learn(sides, grad[block], group, second if due else None)
            if step < start:
                continue
            (_, left), (_, right) = sides
            moved = aligned(left) @ aligned(average[block]) @ aligned(right)
            if group["grafting"] is not None:
                wanted, found = (torch.linalg.vector_norm(each) for each in (graft[block], moved))
                moved *= wanted / (found + _TINY)
            update[block] = moved
        return graft if step < start else update


def _roots_due(turn: int, group: Group, step: int) -> tuple[int, bool]:
    """Return the step of a matrix' first roots, and whether this step computes new ones."""
    frequency = group["precondition_frequency"]
    start = 1 if group["grafting"] is None else first_due(frequency, turn)
    return start, step == start or (step > start and is_due(step, frequency, turn))


_Block = tuple[slice, slice]  # rows and columns of a matrix
_Side = tuple[torch.Tensor, torch.Tensor]  # statistic and root


def _blocks(matrix: torch.Tensor, size: int) -> Iterator[tuple[tuple[int, int], _Block]]:
    """Yield the blocks of some rows: the row and column of the block, and its slices."""
    rows, cols = matrix.shape
    for i, row in enumerate(range(0, rows, size)):
        for j, col in enumerate(range(0, cols, size)):
            yield (i, j), (slice(row, row + size), slice(col, col + size))


def _sides(
    state: dict[str, torch.Tensor], place: tuple[int, int], block: torch.Tensor
) -> tuple[_Side, _Side]:
    """Return statistic and root of a block's left side, and of its right side."""
    rows, cols = (slice(length) for length in block.shape)  # the last ones are smaller
    left = state["left"][place][rows, rows], state["left_root"][place][rows, rows]
    return left, (state["right"][place][cols, cols], state["right_root"][place][cols, cols])


def _learn(
    sides: tuple[_Side, _Side], grad: torch.Tensor, group: Group, correction: float | None
) -> None:
    """Update the statistics of a block and, with a bias correction, its roots."""
    for side, (statistic, root) in enumerate(sides):
        accumulate_(statistic, grad, side, group["betas"][1])
        if correction is not None:
            root.copy_(inverse_root(statistic / correction, _EXPONENT, group["eps"]))


# Layouts of local mode


def _ranges(param: torch.Tensor) -> Iterator[tuple[int, int, int]]:
    """Yield (position, first row, last row + 1) of ranks with rows, counted over all matrices."""
    layout, cols = layout_of(param), param.shape[-1]
    for position, spans in spans_of(layout.shape, layout.placements, layout.mesh_shape):
        (span,) = spans
        yield position, span.first // cols, (span.first + span.numel) // cols


def _rows_of(param: torch.Tensor, start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Split rows [start, stop), counted over all matrices, into (number of a matrix, rows)."""
    height = param.shape[-2]
    while start < stop:
        number = start // height
        end = min(stop, (number + 1) * height)
        yield number, end - start
        start = end


def _check_blocks(param: torch.Tensor, size: int, name: str) -> None:
    """Raise unless every rank has complete rows of blocks."""
    layout = layout_of(param, name)
    *_, height, cols = layout.shape
    axes = [axis for axis, p in enumerate(layout.placements) if not p.is_replicate()]
    what_to_do = (
        f"Pass fully_shard(granularity=Shampoo.granularity({size})), another block_size, or "
        'mode="owner", which accepts any sharding'
    )
    if len(axes) > 1:
        raise PlanError(
            f'Shampoo: {name} is sharded over {len(axes)} axes of its mesh; mode="local" needs one '
            'that shards between rows of blocks. Use mode="owner"'
        )
    for position, spans in spans_of(layout.shape, layout.placements, layout.mesh_shape):
        if len(spans) > 1 or spans[0].width != spans[0].numel:
            raise PlanError(
                f"Shampoo: {name} of shape {layout.shape} has the placements {layout.placements}, "
                f'which split its rows; mode="local" needs whole rows of blocks of {size}. '
                f"{what_to_do}"
            )
        for cut in (spans[0].first, spans[0].first + spans[0].numel):
            row, rest = divmod(cut, cols)
            if rest or row % height % size:
                raise PlanError(
                    f"Shampoo: {name} of shape {layout.shape} is split at element {cut} (row "
                    f"{row}, column {rest}) for position {position} of its mesh, inside a block; "
                    f'mode="local" needs splits at every {size} rows of each matrix, or between '
                    f"matrices. {what_to_do}"
                )
