"""What holds for Shampoo and SOAP alike: the numbers of one process, wherever matrices lie."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.optim import Optimizer

from vescale_fsdp import Granularity, RaggedShard, checkpoint, fully_shard
from vescale_fsdp.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from vescale_fsdp.optim import SOAP, Shampoo
from vescale_fsdp.ranks import collectives
from vescale_fsdp.testing import run_ranks

from .preconditioning import (
    SHAPES,
    Twins,
    assert_same,
    line,
    on_line,
    on_replicas,
    randn,
    random_cut,
    random_row_cut,
    sharded,
)

BLOCK = 2


def make_soap(params: Any) -> Optimizer:
    """Sides above 9 are not turned, so SHAPES has matrices with two, one and no bases."""
    return SOAP(params, lr=0.01, precondition_frequency=2, max_precond_dim=9)


def make_owner(params: Any) -> Optimizer:
    return Shampoo(params, lr=0.01, precondition_frequency=2, mode="owner", block_size=4)


def make_local(params: Any, mode: Any = "local") -> Optimizer:
    return Shampoo(params, lr=0.01, precondition_frequency=2, mode=mode, block_size=BLOCK)


MAKERS = {"soap": make_soap, "owner": make_owner, "local": make_local}


def in_two_groups(make: Any) -> Any:
    """The second with a tensor as learning rate."""

    def make_in_groups(params: Sequence[Tensor]) -> Optimizer:
        second = {"params": params[3:], "lr": torch.tensor(0.02), "weight_decay": 0.1}
        return make([{"params": params[:3]}, second])

    return make_in_groups


# Layouts


def check_random_cuts() -> None:
    """Some gradients are missing in some steps."""
    generator = random.Random(0)
    for name, make in MAKERS.items():
        cut = random_row_cut(generator, BLOCK) if name == "local" else random_cut(generator)
        twins = Twins(in_two_groups(make), SHAPES, line(), on_line(cut))
        for step in range(6):
            twins.step(step, skip=[step % 5] if step in (2, 3, 5) else [])
        twins.check(f"{name}:")


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_any_cuts_give_the_bits_of_one_process(num_ranks: int) -> None:
    run_ranks(check_random_cuts, num_ranks)


def check_meshes() -> None:
    generator = random.Random(0)
    flat, square = line(), init_device_mesh("cpu", (2, 2))
    matrices = [(6, 10), (5, 3, 4), (12, 5)]
    halves = random_cut(generator, 2)
    ragged_rows = RaggedShard((0,), (1, 1))
    cases = {
        "HSDP": (square, on_replicas(halves), [*matrices, (7,)]),
        "tensor parallel": (square, lambda _: [ragged_rows, Shard(1)], [(6, 10), (12, 6)]),
        "two shards": (square, lambda _: [Shard(0), Shard(1)], matrices),
        "FSDP2": (flat, lambda _: [Shard(0)], [*matrices, (7,)]),
        "FSDP2, columns": (flat, lambda _: [Shard(1)], matrices),
        "replicated": (flat, lambda _: [Replicate()], [*matrices, (7,)]),
    }
    for name, (mesh, placements, shapes) in cases.items():
        for make in (make_soap, make_owner):
            twins = Twins(make, shapes, mesh, placements)
            for step in range(4):
                twins.step(step)
            twins.check(f"{name}:")
    # 14 rows over 4 ranks by FSDP2 are 4, 4, 4, 2: whole rows of blocks
    twins = Twins(make_local, [(14, 5), (4, 3, 2)], flat, lambda _: [Shard(0)])
    for step in range(4):
        twins.step(step)
    twins.check("FSDP2, local:")
    for dtype in (torch.bfloat16, torch.float64):
        for make in (make_soap, make_owner):
            twins = Twins(make, matrices, flat, on_line(random_cut(generator)), dtype)
            for step in range(4):
                twins.step(step)
            twins.check(f"{dtype}:")


@pytest.mark.nightly
def test_all_meshes_and_dtypes_give_the_bits_of_one_process() -> None:
    run_ranks(check_meshes, 4)


# Models


class Holder(nn.Module):
    """Parameters of many kinds; their gradients are set by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(randn(0, (6, 10)))
        self.experts = nn.Parameter(randn(1, (5, 4, 6)))
        self.vector = nn.Parameter(randn(2, (7,)))
        self.wide = nn.Parameter(randn(3, (8, 4)))
        self.frozen = nn.Parameter(randn(4, (2, 2)), requires_grad=False)

    def set_gradients(self, step: int) -> None:
        for index, param in enumerate(self.parameters()):
            if param.requires_grad:
                grad = randn(1000 * step + index, param.shape)
                is_cut = isinstance(param, DTensor)
                param.grad = sharded(grad, param.device_mesh, param.placements) if is_cut else grad


def make_model(name: str, *, shard: bool) -> tuple[Holder, Optimizer]:
    model = Holder()
    if shard:
        granularity = Shampoo.granularity(BLOCK) if name == "local" else None
        fully_shard(model, granularity=granularity)
    named = list(model.named_parameters())
    return model, MAKERS[name](named) if name in MAKERS else make_local(named, mode="owner")


def train(model: Holder, optimizer: Optimizer, steps: range) -> None:
    for step in steps:
        model.set_gradients(step)
        optimizer.step()


def assert_same_training(found: Any, expected: Any, name: str) -> None:
    (model, optimizer), (plain, plain_optimizer) = found, expected
    for (key, param), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert_same(param, other, f"{name}: {key}")
        for state, value in plain_optimizer.state[other].items():
            assert_same(optimizer.state[param][state], value, f"{name}: {state} of {key}")


def save_after_four_steps(root: Path) -> None:
    for name in MAKERS:
        model, optimizer = make_model(name, shard=True)
        train(model, optimizer, range(4))
        checkpoint.save(root / name, model, optimizer)


def go_on_from(root: Path, shard: bool) -> None:
    """Four steps more are those of one process that was never stopped, also in another mode."""
    for saved, name in [*zip(MAKERS, MAKERS, strict=True), ("local", "owner, local's blocks")]:
        expected = make_model(saved, shard=False)
        train(*expected, range(8))
        found = make_model(name, shard=shard)
        checkpoint.load(root / saved, *found)
        train(*found, range(4, 8))
        assert_same_training(found, expected, name)


def test_a_checkpoint_goes_on_at_another_world_size_and_on_plain_parameters(tmp_path: Path) -> None:
    run_ranks(save_after_four_steps, 2, tmp_path)
    run_ranks(go_on_from, 3, tmp_path, True)
    run_ranks(go_on_from, 1, tmp_path, False)


def check_state_dicts() -> None:
    options = StateDictOptions(full_state_dict=True)
    for name in MAKERS:
        expected = make_model(name, shard=False)
        train(*expected, range(4))
        plain_dict = copy.deepcopy(expected[1].state_dict())
        plain_model = copy.deepcopy(expected[0].state_dict())
        train(*expected, range(4, 8))

        first = make_model(name, shard=True)
        train(*first, range(4))
        whole = get_optimizer_state_dict(*first, options=options)
        others = [make_model(name, shard=shard) for shard in (True, True, False)]
        others[0][1].load_state_dict(plain_dict)
        for other in others[1:]:
            set_optimizer_state_dict(*other, whole, options=options)
        for model, _ in others:
            with torch.no_grad():
                for key, param in model.named_parameters():
                    value = plain_model[key]
                    is_cut = isinstance(param, DTensor)
                    param.copy_(
                        sharded(value, param.device_mesh, param.placements) if is_cut else value
                    )
        for found in others:
            train(*found, range(4, 8))
            assert_same_training(found, expected, name)


def test_whole_state_dicts_go_from_plain_to_sharded_and_back() -> None:
    run_ranks(check_state_dicts, 2)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 12)
        self.middle = nn.Linear(12, 9)
        self.last = nn.Linear(9, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # [batch, 6] -> [batch, 3]
        return self.last(torch.tanh(self.middle(torch.tanh(self.first(x)))))


def check_end_to_end() -> None:
    """The batch is the same on both ranks: the mean of their gradients is that of one process."""
    for name, make in MAKERS.items():
        torch.manual_seed(0)
        plain = Net()
        net = copy.deepcopy(plain)
        granularity = Shampoo.granularity(BLOCK) if name == "local" else Granularity.elements(8)
        for unit in (net.first, net.middle, net):
            fully_shard(unit, granularity=granularity)
        optimizers = [make(list(model.named_parameters())) for model in (net, plain)]
        first_loss = None
        for step in range(10):
            losses = []
            for model, optimizer in zip((net, plain), optimizers, strict=True):
                optimizer.zero_grad()

                def closure(model: nn.Module = model, step: int = step) -> Tensor:
                    loss = (model(randn(step % 2, (5, 6))) - 1).square().mean()
                    loss.backward()
                    return loss

                losses.append(optimizer.step(closure))
            assert torch.equal(losses[0], losses[1]), f"{name}, step {step}"
            first_loss = first_loss or losses[0].item()
        assert losses[0] < first_loss, name
        assert_same_training((net, optimizers[0]), (plain, optimizers[1]), name)


def test_ten_steps_of_a_sharded_model_are_those_of_a_plain_one() -> None:
    run_ranks(check_end_to_end, 2)


def check_copies() -> None:
    """A copy goes on as the original does."""
    for name in MAKERS:
        model, optimizer = make_model(name, shard=True)
        train(model, optimizer, range(2))
        params, copied = copy.deepcopy((list(model.parameters()), optimizer))
        train(model, optimizer, range(2, 6))
        for step in range(2, 6):
            model.set_gradients(step)
            for param, original in zip(params, model.parameters(), strict=True):
                param.grad = original.grad
            copied.step()
        for param, original in zip(params, model.parameters(), strict=True):
            assert torch.equal(param.to_local(), original.to_local()), name


def test_a_deep_copy_goes_on_alone() -> None:
    run_ranks(check_copies, 2)


# Where states rest, and what travels


def held_by_rank(state: Tensor) -> list[int]:
    """Elements of a state on each rank."""
    found = torch.zeros(dist.get_world_size(), dtype=torch.long)
    assert isinstance(state, DTensor)
    found[dist.get_rank()] = state.to_local().numel()
    dist.all_reduce(found)
    return found.tolist()


def check_where_states_rest() -> None:
    cut = random_cut(random.Random(0))
    twins = Twins(make_soap, [(6, 8), (4, 5, 3), (6, 8)], line(), on_line(cut))
    states = [twins.optimizer.state[param] for param in twins.params]
    for state, length, count in zip(states, (6, 5, 6), (1, 4, 1), strict=True):
        for name in ("left", "left_basis"):
            held = held_by_rank(state[name])
            assert sum(held) == count * length * length, "each element is on one rank"
            assert all(each % (length * length) == 0 for each in held), "and whole matrices are"
    owners = [held_by_rank(states[index]["left"]) for index in (0, 2)]
    assert owners[0] != owners[1], "two large matrices of the same cost go to two ranks"


def test_each_matrix_has_all_its_states_on_one_rank() -> None:
    run_ranks(check_where_states_rest, 2)


class Counted:
    """Counts the all-to-alls that start."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls = 0
        start = collectives.all_to_all_single

        def count(*args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            return start(*args, **kwargs)

        monkeypatch.setattr(collectives, "all_to_all_single", count)


def count_exchanges() -> dict[str, int]:
    whole = on_line(lambda shape: RaggedShard((0,), (1, 1)))  # two experts of four each
    rows = on_line(random_row_cut(random.Random(1), BLOCK))
    cases = {
        "whole experts": Twins(make_soap, [(4, 5, 3)], line(), whole),
        "cut matrix": Twins(make_soap, [(6, 5)], line(), whole),
        "local": Twins(make_local, SHAPES, line(), rows),
    }
    found = {}
    with pytest.MonkeyPatch.context() as monkeypatch:
        for name, twins in cases.items():
            counted = Counted(monkeypatch)
            twins.gradients(0)
            twins.optimizer.step()
            found[name] = counted.calls
    return found


def test_nothing_travels_for_what_is_whole_on_one_rank() -> None:
    for found in run_ranks(count_exchanges, 2):
        assert found == {"whole experts": 0, "cut matrix": 2, "local": 0}


# Gradients that are not finite


def check_nan() -> None:
    for make in (make_soap, make_owner):
        twins = Twins(make, [(6, 5), (4, 4)], line(), on_line(random_cut(random.Random(0))))
        for step in range(5):
            twins.gradients(step)
            if step == 1:
                for params in (twins.params, twins.plain):
                    grad = params[0].grad
                    assert grad is not None
                    local = grad.to_local() if isinstance(grad, DTensor) else grad
                    local.fill_(float("nan") if make is make_soap else float("inf"))
            twins.optimizer.step()
            twins.plain_optimizer.step()
        first, second = (param.full_tensor() for param in twins.params)
        assert first.isnan().all()
        assert torch.equal(second, twins.plain[1]), "the other matrix is as ever"


def test_a_gradient_that_is_not_finite_gives_nan_and_raises_nowhere() -> None:
    run_ranks(check_nan, 2)
