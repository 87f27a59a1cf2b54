"""The numbers in ``.grad``: what they are divided by and in which dtype they are summed.

Gradients are looked at themselves: Adam hides a wrong scale. They are small whole numbers, so that
every dtype holds them exactly, and are compared with one process that has all batches, and with
FSDP2.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from vescale_fsdp import MixedPrecisionPolicy, compat, fully_shard
from vescale_fsdp.testing import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore:.* has no effect here")  # test_without_effect

Shard = Callable[..., Any]
Batches = Sequence[Sequence[float]]  # factors of the input, for each rank and micro-batch

INPUT = torch.tensor([[1.0, 2.0, 3.0, -5.0]])
# What the sum is divided by (None: the number of ranks), and whether the collective only sums.
DIVISIONS = ((None, False), (None, True), (0.5, False), (2.0, False), (3.0, True))


@dataclass(frozen=True)
class Precision:
    """Dtypes: of the shards, of compute, and of the sums over micro-batches and ranks."""

    shard: torch.dtype = torch.float32
    compute: torch.dtype | None = None
    sum: torch.dtype | None = None

    @property
    def policy(self) -> MixedPrecisionPolicy:
        return MixedPrecisionPolicy(param_dtype=self.compute, reduce_dtype=self.sum)

    @property
    def reduced_in(self) -> torch.dtype:
        """The dtype of reductions, as the installed torch documents ``reduce_dtype=None``."""
        default = self.shard if compat.REDUCES_IN_OWN_DTYPE else self.compute or self.shard
        return self.sum or default


FP16, BF16, FP32, FP64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
PRECISIONS = {
    "fp32": Precision(),
    "fp64": Precision(FP64),
    "bf16_shards": Precision(BF16),
    "bf16_shards_summed_in_fp32": Precision(BF16, None, FP32),
    "fp16_shards": Precision(FP16),
    "bf16": Precision(FP32, BF16),
    "bf16_named_twice": Precision(FP32, BF16, BF16),
    "bf16_summed_in_fp32": Precision(FP32, BF16, FP32),
    "fp16": Precision(FP32, FP16),
    "fp16_summed_in_fp32": Precision(FP32, FP16, FP32),
    "summed_in_bf16": Precision(FP32, None, BF16),
    "summed_in_fp16": Precision(FP32, None, FP16),
}


@dataclass(frozen=True)
class Case:
    """How one layer is sharded, and what divides its gradients."""

    precision: str
    factor: float | None = None
    only_sums: bool = False

    @property
    def is_refused_by_fsdp2(self) -> bool:
        """Whether FSDP2 wants a reduction that gloo does not have."""
        dtype = PRECISIONS[self.precision].reduced_in
        scales_by_hand = self.only_sums or dtype in (FP16, FP64)
        return not scales_by_hand and self.factor not in (None, 2.0)


CASES = [Case(name, *division) for name in PRECISIONS for division in DIVISIONS]


class Layers(nn.Module):
    """A layer, and so a unit, for each case: all go through one step."""

    def __init__(self, cases: Sequence[Case]) -> None:
        super().__init__()
        self.cases = cases
        dtypes = [PRECISIONS[case.precision].shard for case in cases]
        self.layers = nn.ModuleList(nn.Linear(4, 4, bias=False, dtype=dtype) for dtype in dtypes)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack(
            [layer(x.to(layer.weight.dtype)).double().sum() for layer in self.layers]
        )


def gradients(
    shard: Shard,
    cases: Sequence[Case],
    batches: Batches,
    mesh: DeviceMesh | None = None,
    set_last: str = "set_requires_gradient_sync",
) -> list[Tensor]:
    """The first row of each weight's gradient; all of its rows are the sum of the inputs."""
    model = Layers(cases)
    for case, layer in zip(cases, model.layers, strict=True):
        shard(layer, mp_policy=PRECISIONS[case.precision].policy, mesh=mesh)
        if case.factor is not None:
            layer.set_gradient_divide_factor(case.factor)
        layer.set_force_sum_reduction_for_comms(case.only_sums)
    shard(model, mesh=mesh)
    mine = batches[dist.get_rank()]
    for index, scale in enumerate(mine):
        getattr(model, set_last)(index == len(mine) - 1)
        model(scale * INPUT).sum().backward()
    return [layer.weight.grad.full_tensor()[0] for layer in model.layers]


def gradient_of_one_process(case: Case, batches: Batches) -> Tensor:
    precision = PRECISIONS[case.precision]
    dtype = precision.compute or precision.shard
    model = nn.Linear(4, 4, bias=False, dtype=dtype)
    for scale in itertools.chain(*batches):
        model((scale * INPUT).to(dtype)).sum().backward()
    assert model.weight.grad is not None
    divisor = case.factor or len(batches)
    return model.weight.grad[0].to(precision.reduced_in).div(divisor).to(precision.shard)


def differences(
    cases: Sequence[Case], found: Sequence[Tensor], expected: Sequence[Tensor]
) -> list[str]:
    wrong = []
    for case, gradient, reference in zip(cases, found, expected, strict=True):
        # A third is not exact: we multiply by it, FSDP2 divides by 3.
        ulp = torch.finfo(reference.dtype).eps if case.factor == 3.0 else 0.0
        same_dtype = gradient.dtype == reference.dtype
        if not same_dtype or not torch.allclose(gradient, reference, rtol=ulp, atol=0):
            wrong.append(f"{case}: {gradient} instead of {reference}")
    return wrong


def two_by_two() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))


def differences_from_one_process(batches: Batches) -> list[str]:
    expected = [gradient_of_one_process(case, batches) for case in CASES]
    return differences(CASES, gradients(fully_shard, CASES, batches), expected)


def differences_of_both(batches: Batches, has_replicas: bool) -> list[str]:
    """Of ours and of FSDP2 from one process."""
    mesh = two_by_two() if has_replicas else None
    factors = (None, 2.0) if has_replicas else (None, 2.0, 3.0)
    cases = [c for c in CASES if c.factor in factors and not c.is_refused_by_fsdp2]
    expected = [gradient_of_one_process(case, batches) for case in cases]
    both = [gradients(shard, cases, batches, mesh) for shard in (fully_shard, torch_fully_shard)]
    return [text for found in both for text in differences(cases, found, expected)]


def test_gradients_are_sums_over_ranks_and_micro_batches_by_the_factor() -> None:
    batches = [[1.0, 2.0], [3.0, 10.0]]
    assert run_ranks(differences_from_one_process, 2, batches) == [[], []]


def test_gradients_are_those_of_fsdp2_by_the_same_reduction(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VESCALE_FSDP_REDUCE", "native")
    batches = [[1.0, 2.0], [3.0, 10.0]]
    assert run_ranks(differences_of_both, 2, batches, False) == [[], []]


def test_one_rank_divides_by_the_factor_alone() -> None:
    # Once: FSDP2 divides twice where it does not leave the average to the collective.
    assert run_ranks(differences_from_one_process, 1, [[1.0, 2.0]]) == [[]]


def test_replicas_are_part_of_the_average_and_not_of_a_factor() -> None:
    batches = [[1.0], [3.0], [10.0], [2.0]]
    assert run_ranks(differences_of_both, 4, batches, True) == [[]] * 4


def differences_of_partial_sums() -> list[str]:
    cases = [Case(name) for name in PRECISIONS]
    batches = [[1.0, 2.0, 1.0], [3.0, 1.0, 2.0], [10.0, 1.0, 1.0], [2.0, 4.0, 4.0]]  # 32
    arguments = (cases, batches, two_by_two(), "set_requires_all_reduce")
    expected = [gradient_of_one_process(case, batches) for case in cases]
    both = [gradients(shard, *arguments) for shard in (fully_shard, torch_fully_shard)]
    return [text for found in both for text in differences(cases, found, expected)]


def test_sums_within_replicas_may_wait_for_the_last_micro_batch_in_any_dtype() -> None:
    assert run_ranks(differences_of_partial_sums, 4) == [[]] * 4


def first_elements(shard: Shard, names: Sequence[str], batches: Batches) -> list[float]:
    found = gradients(shard, [Case(name) for name in names], batches)
    return [gradient[0].item() for gradient in found]


def gradients_of_small_additions() -> list[list[float]]:
    """Both ranks add two ones to 256: bf16 has no 257."""
    names = ["bf16", "bf16_shards", "bf16_summed_in_fp32", "fp32"]
    batches = [[256.0, 1.0, 1.0]] * 2
    return [first_elements(shard, names, batches) for shard in (fully_shard, torch_fully_shard)]


def test_gradients_that_wait_are_summed_in_the_reduce_dtype_as_in_fsdp2() -> None:
    of_bf16 = 258.0 if compat.REDUCES_IN_OWN_DTYPE else 256.0  # shards are in fp32
    expected = [of_bf16, 256.0, 258.0, 258.0]
    assert run_ranks(gradients_of_small_additions, 2) == [[expected, expected]] * 2


def gradient_after_a_frozen_forward() -> float:
    model = fully_shard(nn.Linear(4, 4), mp_policy=PRECISIONS["bf16_summed_in_fp32"].policy)
    model.requires_grad_(False)
    model(INPUT)
    model.requires_grad_(True)
    model([256.0, 1.0][dist.get_rank()] * INPUT).sum().backward()
    return model.weight.grad.full_tensor()[0, 0].item()


def test_a_first_forward_of_frozen_parameters_settles_no_dtype() -> None:
    # In bf16 the sum would be 256, and the average 128.
    assert run_ranks(gradient_after_a_frozen_forward, 2) == [128.5, 128.5]


def large_gradients() -> list[list[float]]:
    """Both ranks have gradients of which fp16 can hold the average, and not the sum."""
    names = ["fp16", "fp16_shards", "summed_in_fp16"]
    found = gradients(fully_shard, [Case(name) for name in names], [[12000.0]] * 2)
    return [gradient.tolist() for gradient in found]


@pytest.mark.parametrize("reduction", ["native", "all_to_all"])
def test_an_average_that_fp16_can_hold_does_not_overflow(
    reduction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VESCALE_FSDP_REDUCE", reduction)
    expected = [12000.0, 24000.0, 36000.0, -60000.0]  # 65504 is the largest number
    assert run_ranks(large_gradients, 2) == [[expected] * 3] * 2
