"""What can break silently in the computed and counted figures of the benchmarks."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from vescale_fsdp.planner import TensorSpec
from vescale_fsdp_tune.costs import Link, Machine

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(autouse=True)
def benchmarks_are_found() -> Iterator[None]:
    sys.path.insert(0, str(ROOT))
    yield
    sys.path.remove(str(ROOT))


def test_schedule_without_network_is_compute_and_copies() -> None:
    from benchmarks.cost_model.timing import UnitCost, run_step

    unit = UnitCost(1.0, 2.0, 0.0, 0.0, copy_out_s=0.25, copy_in_s=0.5)
    root = UnitCost(0.1, 0.2, 0.0, 0.0, copy_out_s=0.01, copy_in_s=0.02)
    step = run_step(root, [unit, unit], Link(1.0), optimizer_s=0.3)
    # 2 (1 + 2) + 0.1 + 0.2 + 0.3; copies out twice and in once of a unit, once each of the root.
    assert step.compute_s == pytest.approx(6.6)
    assert step.copy_s == pytest.approx(2.03)
    assert step.step_s == pytest.approx(8.63)
    assert step.exposed_s == pytest.approx(0.0)


def test_schedule_without_overlap_is_a_sum() -> None:
    from benchmarks.cost_model.timing import UnitCost, run_step

    unit, root = UnitCost(1.0, 2.0, 10.0, 20.0), UnitCost(0.5, 1.0, 5.0, 5.0)
    step = run_step(root, [unit, unit, unit], Link(10.0, latency_s=0.1), overlaps=False)
    # Root: 10 bytes in 2 collectives; each unit: 2 * 10 + 20 bytes in 3. So 13 s and 11 latencies.
    assert step.network_s == pytest.approx(13.0 + 1.1)
    assert step.step_s == pytest.approx(10.5 + 14.1)


@pytest.mark.parametrize(("takes_turns", "step_s"), [(False, 18.0), (True, 18.0)])
def test_schedule_with_overlap_by_hand(*, takes_turns: bool, step_s: float) -> None:
    from benchmarks.cost_model.timing import UnitCost, run_step

    unit, root = UnitCost(1.0, 2.0, 1.0, 2.0), UnitCost(1.0, 1.0, 1.0, 2.0)
    # Gathers of the root and of 1 end at 1 and 2; forward runs from 2 to 5, and to 6 with the root.
    # Gather 3 runs from 6 to 7, as the root's backward; gather 2 to 8. Backward 3 ends at 9.
    # Without turns: reduction 3 to 11, gather 1 to 12, backward 2 ends at 11, reduction 2 to 14.
    # Backward 1 runs from 12 to 14, its reduction to 16, and the root's to 18.
    # With turns: half of backward 2 ends at 10, and it goes on when reduction 3 has landed, at 11.
    # Gather 1 and backward 2 end at 12, reduction 2 and backward 1 at 14: nothing is left to
    # gather then. Its reduction ends at 16, and the root's at 18.
    step = run_step(root, [unit] * 3, Link(1.0), takes_turns=takes_turns)
    assert step.step_s == pytest.approx(step_s)


def test_bytes_by_plan_are_those_of_the_formulas() -> None:
    from benchmarks.cost_model.bytes_by_plan import of_fsdp2, of_ours

    specs = [TensorSpec("a", (6, 10), 1), TensorSpec("b", (4,), 1)]
    ours = of_ours(specs, 4, param_bytes=4, reduce_bytes=4)
    # 64 elements over 4 ranks: 16 each, to 3 others, 4 bytes.
    assert (ours.gather, ours.reduce) == (3 * 16 * 4, 3 * 16 * 4)
    assert (ours.copied_out, ours.copied_in) == (0, 64 * 4)
    theirs = of_fsdp2(specs, 4, param_bytes=2, reduce_bytes=4, over_gloo=True)
    # Two rows of 10 and one element on each rank, where 6 / 4 rows would do.
    assert (theirs.gather, theirs.reduce) == (3 * 21 * 2, 2 * 3 * 21 * 4)
    assert (theirs.copied_out, theirs.copied_in) == (4 * 21 * 2, 4 * 21 * 4)


def test_large_counts_what_a_token_uses() -> None:
    from benchmarks.cost_model.large import Assumptions, _used, predict, read_layers

    # Tables are looked up, a head is multiplied; of experts 8 of 256 are used, shared ones always.
    assert _used(TensorSpec("embed_tokens.weight", (8, 4), 1), 1 / 32) == 0
    assert _used(TensorSpec("unembedding.weight", (8, 4), 1), 1 / 32) == 32
    assert _used(TensorSpec("mlp.experts.3.up_proj.weight", (8, 4), 1), 1 / 32) == 1
    assert _used(TensorSpec("mlp.shared_experts.up_proj.weight", (8, 4), 1), 1 / 32) == 32
    layer = {"name": "layer", "count": 3, "tensors": [["w", [1000, 1000]]]}
    root = {"name": "root", "count": 1, "tensors": [["head", [1000, 1000]]]}
    fast = Link(1e18)
    machine = Machine("fast", "nccl", 1, 8, fast, fast, 1e18, 1e18, flops_per_s=0.5e12)
    assumed = Assumptions(machine, 0.5, tokens=100)
    step = predict([read_layers(layer, 1.0)], read_layers(root, 1.0), 8, "vescale", assumed)
    # 6 operations, 4 million parameters, 100 tokens at half of 1e12 a second.
    assert step.step_s == pytest.approx(6 * 4e6 * 100 / 0.5e12, rel=1e-3)


def test_replicas_add_an_all_reduce_of_the_shard() -> None:
    from benchmarks.cost_model.large import Assumptions

    # 4 nodes of 8, each with a replica: inside 80 bytes a second, 10 on a GPU's own card.
    machine = Machine("nodes", "nccl", 1, 8, Link(80.0), Link(10.0), 1.0, 1.0)
    assumed = Assumptions(machine, 1.0, tokens=1)
    assert assumed.replica_bytes(100, 8, 1) == 0
    # 2 * 3 / 4 of the shard take 15 s, in which a ring of a node sends 1,200 bytes.
    assert assumed.replica_bytes(100, 8, 4) == 1200


def test_padding_without_a_planner() -> None:
    from benchmarks.ablation import alone_shard_size, lcm_shard_size

    specs = [TensorSpec("a", (10, 6), 12), TensorSpec("b", (33,), 8)]
    # b starts at 64 and ends at 97; half of it is 48.5, and cuts fall at multiples of 24.
    assert lcm_shard_size(specs, 2) == 72
    # 5 blocks of 12 are 3 on a rank, and 5 of 8, of which the last is partial, are 3.
    assert alone_shard_size(specs, 2) == 3 * 12 + 3 * 8


def test_copies_are_told_apart_by_who_makes_them() -> None:
    from benchmarks.copies import REST, on_rank
    from benchmarks.models import PRESETS

    from vescale_fsdp.testing import run_ranks

    model = PRESETS["gpt-tiny"].make()
    total = sum(param.nbytes for param in model.parameters())
    gathered = total + sum(param.nbytes for param in model.blocks.parameters())  # the root once
    found = run_ranks(on_rank, 2, "gpt-tiny", "fp32", 1)[0]
    ours, theirs, alone = (found[name]["bytes"] for name in ("vescale", "fsdp2", "compute"))
    assert theirs["gather in"] == gathered / 2
    assert theirs["gather out"] == gathered
    assert theirs["reduce in"] == total
    assert ours["gather in"] == ours["gather out"] == ours["reduce in"] == 0
    # Gradients once, and a rank's own shard in each gather, whose padding is less than 16 bytes for
    # each of the 5 gathers: nothing of gloo's.
    assert total <= ours[REST] - alone[REST] <= total + gathered / 2 + 5 * 16


def test_rank_0_of_64_copies_gradients_once_and_what_the_fake_group_fills_is_not_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from benchmarks.scale import MODELS, measure

    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # for the process that is the rank
    found = measure("dlrm-3m", 64, is_fake=True, rounds=1, steps=1, limit=0)
    assert found["fsdp2"].left_out is not None
    assert found["fsdp2"].gathered_bytes > found["vescale"].gathered_bytes
    total = sum(param.nbytes for param in MODELS["dlrm-3m"].make().parameters())
    copied = found["vescale"].copied_bytes - found["compute"].copied_bytes
    assert copied == pytest.approx(total, abs=64)  # and a scalar or two
