"""``fully_shard(model, budget=...)``."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

import vescale_fsdp
from vescale_fsdp import (
    Granularity,
    PlanError,
    QuantizedGather,
    QuantizedReduce,
    RankMismatchError,
)
from vescale_fsdp.engine.unit import units_in
from vescale_fsdp.testing import RankError, run_ranks
from vescale_fsdp_tune import Budget, fully_shard, tuning_of
from vescale_fsdp_tune.budget import rates
from vescale_fsdp_tune.budget.apply import apply
from vescale_fsdp_tune.budget.blocks import Bench
from vescale_fsdp_tune.costs import Candidate, Link, Machine, Prediction

from .budget_models import LM, VOCAB, batch

SLOW = Machine(  # collectives take long, so that units are joined and stay unsharded
    "slow", "gloo", 1 << 30, 2, Link(1e8, 1e-3), Link(1e8, 1e-3), 1e10, 1e9, 1e-4, 1e-4, 1e-5, 1e-9
)
FAST = 1e-4, 2e-4  # of a block, far less than a collective takes


def train(model: nn.Module, num_steps: int = 3) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    torch.manual_seed(dist.get_rank())
    losses = []
    for step in range(num_steps):
        loss = model(**batch(step))["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def made(seed: int = 0) -> LM:
    torch.manual_seed(seed)
    return LM()


def budget(memory: str | int = "1GiB", **more: Any) -> Budget:
    return Budget(memory=memory, **{"inputs": batch(), "machine": SLOW, **more})


# Settings


def by_hand(candidate: Candidate) -> nn.Module:
    """The calls that a user would write for the candidates below."""
    model = made()
    keys: dict[str, Any] = {"sharding": candidate.sharding, "in_flight": candidate.in_flight}
    if candidate.int8:
        keys |= {"gather_codec": QuantizedGather(), "reduce_codec": QuantizedReduce()}
    if candidate.offload:
        keys["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    names = [[int(name.split(".")[1]) for name in unit] for unit in candidate.units]
    for place, numbers in enumerate(names):
        blocks = [model.blocks[number] for number in numbers]
        more: dict[str, Any] = {}
        if candidate.sharding == "zero3":
            stays = place >= len(names) - candidate.num_unsharded
            more["reshard_after_forward"] = not stays
        if place < candidate.num_changed:
            more["activations"] = candidate.activations
        vescale_fsdp.fully_shard(blocks if len(blocks) > 1 else blocks[0], **keys, **more)
    return vescale_fsdp.fully_shard(model, **keys)


ONE_EACH = tuple((f"blocks.{i}",) for i in range(4))
PAIRS = (("blocks.0", "blocks.1"), ("blocks.2", "blocks.3"))
CANDIDATES = [
    Candidate("ddp", ONE_EACH),
    Candidate("zero1", PAIRS),
    Candidate("zero2", ONE_EACH, activations="recompute", num_changed=2),
    Candidate("zero3", ONE_EACH, num_unsharded=2, in_flight=3),
    Candidate("zero3", PAIRS, num_unsharded=1, activations="recompute", num_changed=1),
    Candidate("zero3", ONE_EACH, int8=True),
    Candidate("zero3", ONE_EACH, offload=True, in_flight=1),
]


def losses_of(candidate: Candidate) -> tuple[list[float], list[float]]:
    model = made()
    apply(
        model,
        candidate,
        vescale_fsdp.fully_shard,
        init_device_mesh("cpu", (2,)),
        MixedPrecisionPolicy(),
    )
    return train(model), train(by_hand(candidate))


def losses_of_all() -> list[tuple[list[float], list[float]]]:
    return [losses_of(candidate) for candidate in CANDIDATES]


def test_losses_are_those_of_the_settings_written_by_hand() -> None:
    for of_both in run_ranks(losses_of_all, 2):
        for candidate, (ours, by_hand_) in zip(CANDIDATES, of_both, strict=True):
            assert ours == by_hand_, candidate


class Parts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.hidden = nn.Embedding(100, 64), nn.Linear(64, 64)
        self.lm_head = nn.Linear(64, 96)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.lm_head(self.hidden(self.embed(ids)))  # type: ignore[no-any-return]


def codecs_of_units() -> list[bool]:
    model, names = Parts(), ("embed", "hidden", "lm_head")
    candidate = Candidate("zero3", tuple((name,) for name in names), int8=True)
    apply(
        model,
        candidate,
        vescale_fsdp.fully_shard,
        init_device_mesh("cpu", (2,)),
        MixedPrecisionPolicy(),
    )
    units = units_in(model)
    return [any(gather for gather, _ in units[name].groups[0].codings) for name in names]


def test_a_head_alone_is_gathered_whole() -> None:
    assert run_ranks(codecs_of_units, 2) == [[False, True, False]] * 2


def replicated() -> int:
    model = made()
    candidate = Candidate("hsdp", ONE_EACH, num_replicas=2)
    apply(
        model,
        candidate,
        vescale_fsdp.fully_shard,
        init_device_mesh("cpu", (4,)),
        MixedPrecisionPolicy(),
    )
    train(model)
    return units_in(model)[""].groups[0].axes.num_replicas


def test_replicas_make_a_mesh() -> None:
    assert run_ranks(replicated, 4) == [2] * 4


def dtypes_of_units() -> list[tuple[Any, Any]]:
    model = made()
    policy = MixedPrecisionPolicy(torch.float64, output_dtype=torch.float32)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    apply(model, Candidate("zero3", PAIRS), vescale_fsdp.fully_shard, mesh, policy)
    policies = [unit.mp_policy for unit in units_in(model).values()]
    return [(each.param_dtype, each.output_dtype) for each in policies]


def test_the_output_dtype_is_that_of_the_model() -> None:
    (policies,) = run_ranks(dtypes_of_units, 1)
    assert policies == [(torch.float64, torch.float32)] + [(torch.float64, None)] * 2


# Choice


def chosen_and_trained(
    memory: str | int, more: dict[str, Any], times: tuple[float, float] | None = FAST
) -> Prediction:
    """Choose and train. The times of the blocks are these, or measured."""
    model = made()
    with contextlib.ExitStack() as stack:
        if times is not None:
            stack.enter_context(mock.patch.object(Bench, "_time", return_value=times))
        fully_shard(model, budget=budget(memory, **more))
    tuning = tuning_of(model)
    assert tuning is not None
    assert train(model) == train(by_hand(tuning.chosen.candidate))
    return tuning.chosen


def test_all_ranks_choose_the_same_and_train_as_by_hand() -> None:
    one, other = run_ranks(chosen_and_trained, 2, "1GiB", {})
    assert one == other
    assert len(one.candidate.units) == 1  # the latency is long, so all blocks are joined


def test_less_memory_is_slower() -> None:
    most, _ = run_ranks(chosen_and_trained, 2, "1GiB", {})
    least, _ = run_ranks(chosen_and_trained, 2, "0.6MB", {})
    assert least.peak_bytes <= 600_000 < most.peak_bytes
    assert least.step_s > most.step_s


@pytest.mark.nightly  # 20 s; others measure too
def test_the_machine_is_measured() -> None:
    one, other = run_ranks(chosen_and_trained, 2, "1GiB", {"machine": None}, None)
    assert one == other
    assert {"compute", "optimizer"} <= set(one.seconds)


def on_meta() -> str:
    with torch.device("meta"):
        model = LM()
    fully_shard(model, budget=budget())
    assert all(param.is_meta for param in model.parameters())
    model.to_empty(device="cpu")
    for param in model.parameters():
        nn.init.normal_(param.data, std=0.02)
    model.scale = torch.ones(1)
    for block in model.blocks:
        block.norm.reset_running_stats()
    train(model)
    return type(model).__name__


def test_models_on_meta() -> None:
    assert run_ranks(on_meta, 2) == ["LM"] * 2


def what_changes() -> list[str]:
    model = made()
    before = copy.deepcopy(model.state_dict())
    state = torch.get_rng_state()
    # What sending takes is measured with messages of its own, for seconds: test_budget_machine.
    times = rates.SendingTimes(0.0, 0.0)
    with mock.patch.object(rates, "sending_times", return_value=times):
        fully_shard(model, budget=budget(machine=None))
    changed = [] if torch.equal(torch.get_rng_state(), state) else ["generator"]
    for name, tensor in model.state_dict().items():
        whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        changed += [] if torch.equal(whole, before[name]) else [name]
    return changed + [name for name, param in model.named_parameters() if param.grad is not None]


def test_values_buffers_and_generators_do_not_change() -> None:
    assert run_ranks(what_changes, 2) == [[], []]


def partly_frozen() -> list[float]:
    model = made()
    for block in model.blocks[:2]:
        block.requires_grad_(False)
    fully_shard(model, budget=budget("0.7MB"))
    return train(model)


def test_frozen_parts() -> None:
    first, second = run_ranks(partly_frozen, 2)
    assert all(loss < 2 * torch.log(torch.tensor(VOCAB)) for loss in first + second)


def without_inputs() -> tuple[int, float]:
    model = made()
    fully_shard(model, budget=budget(inputs=None))
    tuning = tuning_of(model)
    assert tuning is not None
    return tuning.chosen.memory.get("activations", 0), tuning.chosen.seconds.get("compute", 0.0)


def test_without_inputs_only_parameters_count() -> None:
    assert run_ranks(without_inputs, 2) == [(0, 0.0)] * 2


def passed_through() -> list[Any]:
    model = made()
    fully_shard(
        model,
        budget=budget(),
        mesh=init_device_mesh("cpu", (2,)),
        granularity=Granularity.rows(4),
        ignored_params={model.blocks[0].up.bias},
        unused="zeros",
        broadcast_buffers=True,
    )
    units = units_in(model)
    rows = {
        spec.block % 32
        for unit in units.values()
        for g in unit.groups
        for spec in g.layout.specs
        if len(spec.shape) == 2
    }
    return [
        rows,
        hasattr(model.blocks[0].up.bias, "full_tensor"),
        units[""].unused,
        units[""].broadcasts_buffers,
        train(model) != [],
    ]


def test_other_arguments_are_passed_on() -> None:
    assert run_ranks(passed_through, 2)[0] == [{0}, False, "zeros", True, True]


def replicas_of(sizes: tuple[int, ...] | None) -> set[int]:
    names = ("replicate", "shard")[-len(sizes or ()) :]
    mesh = None if sizes is None else init_device_mesh("cpu", sizes, mesh_dim_names=names)
    model = made()
    fully_shard(
        model, mesh=mesh, budget=budget(machine=dataclasses.replace(SLOW, ranks_per_node=2))
    )
    train(model)
    tuning = tuning_of(model)
    assert tuning is not None
    return {each.candidate.num_replicas for each in tuning.predictions}


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("sizes", "possible"), [((4,), {1}), ((2, 2), {2}), (None, {1, 2})], ids=str
)  # fmt: skip
def test_replicas_are_those_of_the_mesh(sizes: tuple[int, ...] | None, possible: set[int]) -> None:
    assert run_ranks(replicas_of, 4, sizes) == [possible] * 4


def with_a_network(bytes_per_s: float) -> float:
    model = made()
    link = Link(bytes_per_s)
    fully_shard(model, budget=budget(machine=None, network=link))
    tuning = tuning_of(model)
    assert tuning is not None
    return tuning.chosen.step_s


@pytest.mark.nightly
def test_a_given_network() -> None:
    slow, _ = run_ranks(with_a_network, 2, 1e4)
    assert slow > 10  # hundreds of kilobytes at 10 kB/s


def own_memory() -> tuple[int, str]:
    memory = 10**9 if dist.get_rank() == 0 else 600_000
    printed = io.StringIO()
    model = made()
    with contextlib.redirect_stdout(printed):
        fully_shard(model, budget=budget(memory))
    tuning = tuning_of(model)
    assert tuning is not None
    return tuning.chosen.peak_bytes, printed.getvalue()


def test_the_smallest_memory_counts_and_the_first_rank_prints() -> None:
    (one, first), (other, second) = run_ranks(own_memory, 2)
    assert one == other <= 600_000
    assert "  chosen\n" in first
    assert second == ""


def others() -> int:
    model = made()
    model.register_buffer("mask", torch.zeros(1000))
    fully_shard(model, budget=budget(), ignored_params={model.embed.weight})
    tuning = tuning_of(model)
    assert tuning is not None
    return tuning.chosen.memory["other tensors"]


def test_buffers_and_ignored_parameters_count() -> None:
    # The mask; four times the embedding: with its gradient and AdamW's states; the scale; of each
    # of four norms two vectors and a counter.
    embedding, norms = 4 * VOCAB * 32 * 4, 4 * (2 * 32 * 4 + 8)
    assert run_ranks(others, 2) == [4000 + embedding + 4 + norms] * 2


# Written choices


def written(path: str) -> tuple[list[float], list[float]]:
    model = made()
    fully_shard(model, budget=budget("0.6MB", save_to=path))
    first = train(model)
    dist.barrier()
    again = fully_shard(made(), budget=path)
    return first, train(again)


def test_a_written_choice_needs_no_measurement(tmp_path: Path) -> None:
    path = tmp_path / "choice.yaml"
    for first, again in run_ranks(written, 2, str(path)):
        assert first == again
    assert "zero3" in path.read_text()


def read_by_the_first(path: str) -> int:
    own = path if dist.get_rank() == 0 else "/no/folder/choice.yaml"
    model = fully_shard(made(), budget=own)
    return len(list(units_in(model)))


def test_the_first_rank_reads_for_all(tmp_path: Path) -> None:
    path = tmp_path / "choice.yaml"
    run_ranks(written, 2, str(path))
    first, second = run_ranks(read_by_the_first, 2, str(path))
    assert first == second


def chosen_on_one_rank() -> None:
    fully_shard(made(), budget="choice.yaml" if dist.get_rank() else "1GiB")


def test_a_choice_on_one_rank_only() -> None:
    with pytest.raises(RankError, match="ranks disagree about the budget"):
        run_ranks(chosen_on_one_rank, 2)


def absent() -> str:
    return attempt(lambda: fully_shard(made(), budget="/no/folder/choice.yaml"))


def test_a_choice_that_is_not_there() -> None:
    for text in run_ranks(absent, 2):
        assert text.startswith("PlanError: cannot read the choice /no/folder/choice.yaml")


def unwritable() -> str:
    return attempt(lambda: fully_shard(made(), budget=budget(save_to="/no/folder/choice.yaml")))


def test_a_choice_that_cannot_be_written() -> None:
    for text in run_ranks(unwritable, 2):
        assert text.startswith("PlanError: FileNotFoundError")


# Errors


def attempt(make: Callable[[], Any]) -> str:
    try:
        make()
    except (ValueError, AssertionError, NotImplementedError, PlanError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def test_settings_beside_a_budget() -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"sharding": "zero1"}, "budget= chooses sharding, and sharding='zero1' was passed too"),
        ({"reshard_after_forward": False}, "chooses reshard_after_forward"),
        ({"in_flight": 3}, "chooses in_flight"),
        ({"activations": "recompute"}, "chooses activations"),
        ({"gather_codec": QuantizedGather()}, "chooses gather_codec"),
        ({"reduce_codec": QuantizedReduce()}, "chooses reduce_codec"),
        ({"offload_policy": CPUOffloadPolicy(pin_memory=False)}, "chooses offload_policy"),
        ({"accumulate": "sharded"}, "chooses accumulate"),
        ({"shard_placement_fn": lambda _: None}, "chooses shard_placement_fn"),
    ]
    for arguments, text in cases:  # before there is a process group
        assert text in attempt(lambda a=arguments: fully_shard(LM(), budget="auto", **a))


@pytest.mark.parametrize(
    "value", ["10 apples", "0GiB", "120%", "-1", "", 0, True, 1.5, "choice.txt"]
)
def test_no_budgets(value: Any) -> None:
    text = attempt(lambda: fully_shard(LM(), budget=value))
    assert text.startswith(f"ValueError: budget {value!r} does not work; accepted: a size as")


def test_no_options_of_a_budget() -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"optimizer": "lion"}, "Budget(optimizer='lion'): expected one of adamw, adamw_fused"),
        ({"micro_batches": 0}, "Budget(micro_batches=0): expected an int of at least 1"),
        ({"allow": ["fp4"]}, "Budget(allow=['fp4']): expected a list of int8, offload"),
        ({"allow": "int8"}, "Budget(allow='int8'): expected a list of int8, offload"),
        ({"network": Link(1.0), "machine": SLOW}, "a machine has a network; use one"),
        ({"save_to": "choice.txt"}, "Budget(save_to='choice.txt'): expected a path that ends with"),
        ({"inputs": 3}, "Budget(inputs=...) got a int, expected the arguments of forward"),
    ]
    for arguments, text in cases:
        assert text in attempt(lambda a=arguments: Budget(**a))


def test_lists_of_modules() -> None:
    text = attempt(lambda: fully_shard([LM(), LM()], budget="auto"))
    assert "budget= is for a whole model, got a list" in text


def test_lazy_parameters() -> None:
    text = attempt(lambda: fully_shard(nn.LazyLinear(4), budget="auto"))
    assert "budget= needs the shapes of all parameters, and weight is lazy" in text


def already_sharded() -> str:
    model = made()
    vescale_fsdp.fully_shard(model.blocks[1])
    return attempt(lambda: fully_shard(model, budget="auto"))


def test_a_model_with_units() -> None:
    (text,) = run_ranks(already_sharded, 1)
    assert "budget= finds the units itself, and blocks.1 is one already" in text


def too_small() -> str:
    return attempt(lambda: fully_shard(made(), budget=budget("100KB")))


def test_nothing_fits() -> None:
    one, other = run_ranks(too_small, 2)
    assert one == other
    assert one.startswith("PlanError: nothing fits in")


def fails_on_one_rank() -> str:
    inputs = batch() if dist.get_rank() == 0 else {"tokens": torch.zeros(1)}
    return attempt(lambda: fully_shard(made(), budget=budget(inputs=inputs)))


def test_a_failure_is_raised_on_all_ranks() -> None:
    first, second = run_ranks(fails_on_one_rank, 2)
    assert first.startswith("PlanError: rank 1: a step of a copy of LM on cpu")
    assert second.startswith("PlanError: a step of a copy of LM on cpu")


def other_models() -> None:
    model = LM(4 + dist.get_rank())
    fully_shard(model, budget=budget())


def test_other_models_on_ranks() -> None:
    with pytest.raises(RankError, match="ranks disagree about the model and its budget") as raised:
        run_ranks(other_models, 2)
    assert raised.value.type_name == RankMismatchError.__name__


def larger_inputs_on_one_rank() -> int:
    inputs = batch()
    if dist.get_rank() == 1:
        inputs = {name: torch.cat([each, each]) for name, each in inputs.items()}
    model = made()
    fully_shard(model, budget=budget(inputs=inputs))
    tuning = tuning_of(model)
    assert tuning is not None
    return tuning.chosen.memory["activations"]


def test_the_rank_with_the_most_activations_counts() -> None:
    one, other = run_ranks(larger_inputs_on_one_rank, 2)
    assert one == other


def test_models_without_a_budget_have_no_tuning() -> None:
    assert tuning_of(LM()) is None


class Parted(nn.Module):
    """A large block with a parameter of its own, a list and a child."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(64))
        self.parts = nn.ModuleList(nn.Linear(64, 64) for _ in range(2))
        self.last = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in (*self.parts, self.last):
            x = part(x) * self.gain
        return x


def parted(has_inputs: bool) -> tuple[tuple[str, ...], ...]:
    model = nn.Sequential(*(Parted() for _ in range(3)))
    inputs = torch.randn(2, 64) if has_inputs else None
    fully_shard(model, budget=budget("0.5MB", inputs=inputs))
    model(torch.randn(2, 64)).sum().backward()
    tuning = tuning_of(model)
    assert tuning is not None
    numbers = {len(each.candidate.units) for each in tuning.predictions}
    assert (9 in numbers) is has_inputs
    return tuning.chosen.candidate.units


@pytest.mark.parametrize("has_inputs", [True, False])
def test_large_blocks_are_divided(has_inputs: bool) -> None:
    one, other = run_ranks(parted, 2, has_inputs)
    assert one == other


def check_statistics() -> None:
    """Norms with statistics compute in the dtype of their parameters."""
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    # The blocks are measured, the machine is not.
    budget = Budget(memory="1GiB", inputs=torch.randn(4, 4), machine=SLOW)
    fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16), budget=budget)
    model(torch.randn(4, 4)).float().sum().backward()


def test_parameters_of_statistics_are_tried_as_they_train() -> None:
    run_ranks(check_statistics, 2)
