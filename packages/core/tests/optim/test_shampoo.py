"""Shampoo computes what its papers say, and refuses what it cannot compute."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from vescale_fsdp import PlanError, RaggedShard, fully_shard
from vescale_fsdp.optim import Shampoo, shampoo
from vescale_fsdp.testing import run_ranks

from .preconditioning import Twins, line, on_line, randn, sharded

DOUBLE = torch.float64
LR, BETA1, BETA2, EPS, DECAY, FREQUENCY, SIZE = 0.01, 0.9, 0.8, 1e-4, 0.1, 3, 3
OPTIONS: dict[str, Any] = {
    "lr": LR,
    "betas": (BETA1, BETA2),
    "eps": EPS,
    "weight_decay": DECAY,
    "precondition_frequency": FREQUENCY,
    "block_size": SIZE,
}


def inverse_fourth_root(matrix: Tensor) -> Tensor:
    """By another decomposition than Shampoo's."""
    left, values, _ = torch.linalg.svd(matrix + EPS * torch.eye(len(matrix), dtype=DOUBLE))
    return left @ torch.diag(values**-0.25) @ left.mT


class Reference:
    """Shampoo with averages and grafting from Adam on one block."""

    def __init__(self, weight: Tensor, turn: int) -> None:
        self.weight, self.turn, self.step = weight, turn, 0
        self.roots: list[Tensor] = []
        self.left, self.right = (torch.zeros(d, d, dtype=DOUBLE) for d in weight.shape)
        self.average, self.squares = torch.zeros_like(weight), torch.zeros_like(weight)

    def __call__(self, grad: Tensor) -> None:
        self.step += 1
        self.average = BETA1 * self.average + (1 - BETA1) * grad
        self.squares = BETA2 * self.squares + (1 - BETA2) * grad**2
        self.left = BETA2 * self.left + (1 - BETA2) * grad @ grad.mT
        self.right = BETA2 * self.right + (1 - BETA2) * grad.mT @ grad
        correction = 1 - BETA2**self.step
        if self.step >= FREQUENCY and (self.step + self.turn) % FREQUENCY == 0:
            self.roots = [inverse_fourth_root(s / correction) for s in (self.left, self.right)]
        average = self.average / (1 - BETA1**self.step)
        adam = average / ((self.squares / correction).sqrt() + 1e-8)
        moved = adam
        if self.roots:
            moved = self.roots[0] @ average @ self.roots[1]
        self.weight -= LR * (DECAY * self.weight + moved * (adam.norm() / moved.norm()))


@pytest.mark.parametrize("mode", ["local", "owner"])
def test_the_numbers_are_those_of_the_paper(mode: str) -> None:
    """A matrix of 2 x 3 blocks, and a stack of two of 2 x 1, whose turns are the next ones."""
    params = [nn.Parameter(randn(0, (5, 7), DOUBLE)), nn.Parameter(randn(1, (2, 4, 3), DOUBLE))]
    expected = [param.detach().clone() for param in params]
    places = [(0, None, i, j) for i in (0, 3) for j in (0, 3, 6)]
    places += [(1, k, i, 0) for k in range(2) for i in (0, 3)]

    def block_of(tensors: list[Tensor], place: tuple[int, int | None, int, int]) -> Tensor:
        index, number, row, col = place
        matrix = tensors[index] if number is None else tensors[index][number]
        return matrix[row : row + SIZE, col : col + SIZE]

    turns = [0 if number is None else 1 + number for _, number, _, _ in places]
    blocks = [
        Reference(block_of(expected, place), turn)
        for place, turn in zip(places, turns, strict=True)
    ]
    optimizer = Shampoo(params, **OPTIONS, mode=mode)
    for step in range(8):
        grads = [randn(10 * step + index, p.shape, DOUBLE) for index, p in enumerate(params)]
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad
        optimizer.step()
        for place, block in zip(places, blocks, strict=True):
            block(block_of(grads, place))
    for param, weight in zip(params, expected, strict=True):
        torch.testing.assert_close(param.detach(), weight, rtol=0, atol=1e-9)


def test_without_averages_and_grafting_it_is_the_first_paper() -> None:
    param = nn.Parameter(randn(0, (3, 5), DOUBLE))
    weight = param.detach().clone()
    left, right = torch.zeros(3, 3, dtype=DOUBLE), torch.zeros(5, 5, dtype=DOUBLE)
    optimizer = Shampoo(
        [param], lr=LR, betas=(0.0, 1.0), eps=EPS, precondition_frequency=1, grafting=None
    )
    for step in range(4):
        param.grad = randn(step, (3, 5), DOUBLE)
        optimizer.step()
        left += param.grad @ param.grad.mT
        right += param.grad.mT @ param.grad
        weight -= LR * inverse_fourth_root(left) @ param.grad @ inverse_fourth_root(right)
    torch.testing.assert_close(param.detach(), weight, rtol=0, atol=1e-9)


def test_grafting_from_sgd_gives_each_block_the_length_of_its_gradient() -> None:
    param = nn.Parameter(torch.zeros(4, 3, dtype=DOUBLE))
    optimizer = Shampoo(
        [param], 1.0, (0.0, 0.9), block_size=2, grafting="sgd", precondition_frequency=1
    )
    assert "exp_avg_sq" not in optimizer.state[param]
    param.grad = randn(0, (4, 3), DOUBLE)
    optimizer.step()
    assert not torch.allclose(param.detach(), -param.grad), "its direction is another"
    for rows in (slice(0, 2), slice(2, 4)):
        for cols in (slice(0, 2), slice(2, 3)):
            found, expected = param.detach()[rows, cols].norm(), param.grad[rows, cols].norm()
            torch.testing.assert_close(found, expected)


def test_a_vector_takes_the_step_of_adam() -> None:
    param, other = (nn.Parameter(randn(0, (7,), DOUBLE)) for _ in "ab")
    ours = Shampoo([param], lr=LR, betas=(0.9, 0.99), weight_decay=DECAY)
    theirs = torch.optim.AdamW([other], lr=LR, betas=(0.9, 0.99), weight_decay=DECAY)
    for step in range(5):
        param.grad, other.grad = randn(step, (7,), DOUBLE), randn(step, (7,), DOUBLE)
        ours.step()
        theirs.step()
    torch.testing.assert_close(param, other, rtol=0, atol=1e-12)


def test_a_gradient_of_zeros_moves_nothing() -> None:
    param = nn.Parameter(torch.ones(4, 4))
    param.grad = torch.zeros(4, 4)
    Shampoo([param], precondition_frequency=1).step()
    assert torch.equal(param, torch.ones(4, 4))


def test_bytes_of_state_are_those_that_the_docstring_says() -> None:
    """(8, 12) in blocks of 4: fp32, two moments and four states of a block's size."""
    param = nn.Parameter(torch.ones(8, 12))
    states = Shampoo([param], block_size=4).state[param]
    num_bytes = sum(s.nbytes for key, s in states.items() if key != "step")
    assert num_bytes == 24 * param.numel()


# Layouts


def test_the_granularity_keeps_rows_of_blocks_together() -> None:
    policy = Shampoo.granularity(4)
    blocks = {}
    for shape in [(10, 3), (5, 8, 3), (5, 6, 3)]:
        granularity = policy("weight", nn.Parameter(torch.ones(shape)))
        assert granularity is not None
        blocks[shape] = granularity.block(shape)
    # rows of blocks, also in a stack; whole matrices where these would go over their ends
    assert blocks == {(10, 3): 12, (5, 8, 3): 12, (5, 6, 3): 18}
    assert policy("bias", nn.Parameter(torch.ones(3))) is None


def messages_of_cut_blocks() -> list[str]:
    messages = []
    for shape, elements in [((6, 4), (12, 12)), ((6, 4), (10, 14)), ((2, 3, 4), (16, 8))]:
        placement = RaggedShard.from_runs_of_elements([(1, count) for count in elements], shape)
        with pytest.raises(PlanError) as error:
            Shampoo([nn.Parameter(sharded(torch.ones(shape), line(), [placement]))], block_size=2)
        messages.append(str(error.value))
    model = nn.Linear(5, 6, bias=False)
    fully_shard(model)
    with pytest.raises(PlanError) as error:
        Shampoo(model.named_parameters(), block_size=4)
    messages.append(str(error.value))
    return messages


def test_cut_blocks_are_refused_on_every_rank_with_what_to_pass() -> None:
    first, second = run_ranks(messages_of_cut_blocks, 2)
    assert first == second
    cuts = ["12 (row 3, column 0)", "10 (row 2, column 2)", "16 (row 4, column 0)"]
    for message, cut in zip(first, [*cuts, "16 (row 3, column 1)"], strict=True):
        assert f"is split at element {cut}" in message
    assert "Pass fully_shard(granularity=Shampoo.granularity(2))" in first[0]
    assert "Shampoo: 'weight' of shape (6, 5)" in first[3]


def differs_if_forced() -> bool:
    """Rows 0 to 2 and 3 to 6 are two rows of blocks each, as many as there are without a cut."""
    placement = RaggedShard((0,), (3, 4))
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(shampoo, "_check_blocks", lambda *_: None)
        twins = Twins(
            lambda p: Shampoo(p, lr=0.1, block_size=2, precondition_frequency=1),
            [(7, 4)],
            line(),
            on_line(lambda _: placement),
        )
    for step in range(2):
        twins.gradients(step)
        twins.optimizer.step()
        twins.plain_optimizer.step()
    found = twins.params[0].full_tensor()
    return not torch.allclose(found, twins.plain[0], rtol=1e-3, atol=1e-3)


def test_local_mode_on_cut_blocks_would_be_wrong() -> None:
    assert all(run_ranks(differs_if_forced, 2))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "remote"}, 'mode must be "local" or "owner", got \'remote\''),
        ({"grafting": "lamb"}, 'grafting must be "adam", "sgd" or None, got \'lamb\''),
        ({"block_size": 0}, "block_size must be a positive int, got 0"),
        ({"betas": (1.0, 0.9)}, r"betas must be in \[0, 1\)"),
        ({"betas": (0.9,)}, r"betas must be two numbers, got \(0\.9,\)"),
    ],
)
def test_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Shampoo([nn.Parameter(torch.ones(2, 2))], **options)
