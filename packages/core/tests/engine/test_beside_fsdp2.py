"""The faults that sharded data parallelism is known for, with FSDP2 and with ours, side by side.

Each test runs one scenario and says what comes out on every rank: with ours at every change, with
FSDP2 nightly. docs/beside-fsdp2.md is the table of it. Where FSDP2 hangs, its process group gives
up after `HANG_S`.
"""

from __future__ import annotations

import copy
import functools
import gc
import math
import re
import warnings
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from vescale_fsdp import check_gradients, fully_shard
from vescale_fsdp.testing import RankError, run_ranks

from . import beside_models as models
from . import boundary_models as boundary
from .helpers import Tensors, averaged_gradients, full_gradients, full_parameters
from .models import inputs_of, make

Shard = Callable[..., nn.Module]
Scenario = Callable[..., str]

HANG_S = 1.5  # after which FSDP2 gives up where it is known to hang
PATIENCE_S = 30.0  # elsewhere
ENGINES: dict[str, Shard] = {"FSDP2": torch_fully_shard, "ours": fully_shard}
RIGHT = "right$"
HANGS = "hangs$"
MISMATCH = "RankMismatchError: ranks disagree about the "


def outcome(engine: str, scenario: Scenario, args: tuple[object, ...], patience_s: float) -> str:
    """What the scenario says on this rank, or its error."""
    everyone = list(range(dist.get_world_size()))
    group = dist.new_group(everyone, timeout=timedelta(seconds=patience_s))
    shard = functools.partial(ENGINES[engine], mesh=DeviceMesh.from_group(group, "cpu"))
    try:
        with warnings.catch_warnings():
            if engine == "FSDP2":
                warnings.simplefilter("ignore")
            return scenario(shard, *args)
    except Exception as error:  # noqa: BLE001  # whatever it is, it is the outcome
        if re.search("Timed out waiting|pair closure|closed by peer", str(error)):
            return "hangs"
        return f"{type(error).__name__}: {error}"


_tested = {"engine": "ours"}


@pytest.fixture(autouse=True, params=["ours", pytest.param("FSDP2", marks=pytest.mark.nightly)])
def engine(request: pytest.FixtureRequest) -> None:
    """Which of the two the test runs."""
    _tested["engine"] = request.param


def assert_outcomes(scenario: Scenario, *args: object, fsdp2: str, ours: str = RIGHT) -> None:
    """The outcome begins with the pattern of the engine, on both ranks."""
    engine, patience_s = _tested["engine"], HANG_S if fsdp2 == HANGS else PATIENCE_S
    for found in run_ranks(outcome, 2, engine, scenario, args, patience_s):
        assert re.match(ours if engine == "ours" else fsdp2, found), f"{engine}: {found}"


def assert_fsdp2_aborts(scenario: Scenario, *args: object, ours: str = RIGHT) -> None:
    """With FSDP2 a rank's process ends by SIGABRT."""
    if _tested["engine"] == "ours":
        for found in run_ranks(outcome, 2, "ours", scenario, args, PATIENCE_S):
            assert re.match(ours, found), f"ours: {found}"
        return
    with pytest.raises(RankError) as caught:
        run_ranks(outcome, 2, "FSDP2", scenario, args, PATIENCE_S)
    assert any("exit code -6" in failure.message for failure in caught.value.failures)


def shard_units(shard: Shard, model: nn.Module) -> nn.Module:
    """Shard ``model.units``, then the root."""
    for unit in model.units:
        shard(unit)
    return shard(model)


def square_loss(model: nn.Module, step: int) -> Tensor:
    return read_hidden(model(inputs_of(step, dist.get_rank()))).square().sum()


def read_hidden(output: Any) -> Tensor:
    """The main tensor of an output, by attribute where it has one."""
    if isinstance(output, Tensor):
        return output
    return output.hidden if hasattr(output, "hidden") else output["hidden"]


def verdict(found: Tensors, expected: Tensors) -> str:
    for name, tensor in expected.items():
        other = found[name]
        if tensor is None or other is None:
            if tensor is not other:
                return f"wrong gradients: of {name}"
        elif not torch.allclose(other, tensor, rtol=1e-5, atol=1e-6):
            return f"wrong gradients: of {name}"
    return "right"


def step_beside(model: nn.Module, plain: nn.Module, step: int) -> str:
    """One forward and backward of both: whether loss and gradients agree."""
    model.zero_grad()
    plain.zero_grad()
    expected_loss = square_loss(plain, step)
    expected_loss.backward()
    expected = averaged_gradients(plain)
    loss = square_loss(model, step)
    loss.backward()
    if not torch.allclose(loss, expected_loss):
        return f"wrong loss: {loss.item():g} instead of {expected_loss.item():g}"
    return verdict(full_gradients(model), expected)


def trains(shard: Shard, model_class: type[nn.Module], *args: object) -> str:
    """Two steps beside a plain model, whose gradients are averaged."""
    model, plain = make(model_class, *args), make(model_class, *args)
    shard_units(shard, model)
    found = [step_beside(model, plain, step) for step in range(2)]
    return next((each for each in found if each != "right"), "right")


# Units that are called twice, skipped, or used on some ranks only


@pytest.mark.parametrize(
    "model_class", [boundary.CalledTwice, boundary.CalledAgainAtTheEnd, boundary.NoGradientInside]
)
def test_a_unit_called_twice_is_right_in_both(model_class: type[nn.Module]) -> None:
    assert_outcomes(trains, model_class, fsdp2=RIGHT)


def test_a_unit_skipped_on_all_ranks_is_right_in_both() -> None:
    assert_outcomes(trains, boundary.Skipping, fsdp2=RIGHT)


def test_a_unit_skipped_on_one_rank_hangs_in_fsdp2_and_is_right_here() -> None:
    assert_outcomes(trains, models.SkippedOnOneRank, fsdp2=HANGS)


def test_another_unit_on_each_rank_is_silently_wrong_in_fsdp2_and_right_here() -> None:
    assert_outcomes(trains, models.AnotherOnEachRank, fsdp2="wrong loss")


def test_a_unit_without_gradient_on_one_rank_hangs_in_fsdp2_and_is_right_here() -> None:
    assert_outcomes(trains, models.NoGradientOnOneRank, fsdp2=HANGS)


def test_another_order_of_units_is_silently_wrong_in_fsdp2_and_an_error_here() -> None:
    assert_outcomes(trains, models.AnotherOrderOnEachRank, fsdp2="wrong loss", ours=MISMATCH)


# Parameters that are used on some ranks only


def with_the_switch(shard: Shard, names_by_rank: list[list[str]]) -> str:
    """FSDP2's ``set_reduce_scatter_unused_params``, with parameters that all have a user."""
    model, plain = make(models.Parameters, names_by_rank), make(models.Parameters, names_by_rank)
    for each in (model, plain):
        del each.branches["c"]
    shard_units(shard, model)
    model.set_reduce_scatter_unused_params(True)
    return step_beside(model, plain, 0)


def test_parameters_used_on_one_rank_abort_fsdp2_and_are_right_here() -> None:
    assert_fsdp2_aborts(trains, models.Parameters, [["a", "b"], ["a"]])


def test_other_parameters_on_each_rank_are_silently_wrong_in_fsdp2_and_right_here() -> None:
    assert_outcomes(trains, models.Parameters, [["a"], ["b"]], fsdp2="wrong gradients: of branches")


@pytest.mark.parametrize("names_by_rank", [[["a", "b"], ["a"]], [["a"], ["b"]]])
def test_parameters_used_on_some_ranks_are_right_in_fsdp2_with_its_switch(
    names_by_rank: list[list[str]],
) -> None:
    assert_outcomes(with_the_switch, names_by_rank, fsdp2=RIGHT)


# What the root returns


@pytest.mark.parametrize("has_units", [True, False])
@pytest.mark.parametrize("kind", ["dict", "dataclass", "model_output"])
def test_structured_outputs_of_the_root_are_right_in_both(kind: str, has_units: bool) -> None:
    assert_outcomes(trains, models.Root, kind, has_units, fsdp2=RIGHT)


def test_a_dataclass_that_is_a_dictionary_too_is_right_in_both() -> None:
    assert_outcomes(trains, models.ReadsAttributes, fsdp2=RIGHT)


def test_an_opaque_output_is_silently_wrong_in_fsdp2_and_right_here() -> None:
    assert_outcomes(trains, models.Root, "opaque", False, fsdp2="wrong gradients")


def test_an_output_view_changed_in_place_fails_in_fsdp2_and_is_right_here() -> None:
    freed = "RuntimeError: setStorage: .* out of bounds for storage of size 0"
    assert_outcomes(trains, boundary.InPlaceOnView, fsdp2=freed)


# Which parameters a unit may have


def test_convolutions_of_any_rank_are_right_in_both() -> None:
    assert_outcomes(trains, models.Convolutions, fsdp2=RIGHT)


@pytest.mark.parametrize(
    ("model_class", "refusal"),
    [
        (
            models.Tied,
            "ValueError: Parameter '.*' is shared with a parameter already managed by another",
        ),
        (models.TwoDtypes, "AssertionError: FSDP expects uniform original parameter dtype"),
        (models.Scalar, "ValueError: fully_shard doesn't support scalar parameters"),
        (
            models.ChannelsLast,
            "NotImplementedError: FSDP does not support non-contiguous parameters",
        ),
        (models.Odd, "ValueError: fully_shard doesn't support scalar parameters"),
    ],
)
def test_ties_dtypes_scalars_and_strides_are_refused_by_fsdp2_and_right_here(
    model_class: type[nn.Module], refusal: str
) -> None:
    assert_outcomes(trains, model_class, fsdp2=refusal)


# Copies, evaluation, exceptions, several roots, deletion


def copies(shard: Shard) -> str:
    """The copy keeps its values while the model trains: an average of weights could use it."""
    model = shard_units(shard, make(models.Chain))
    before = full_parameters(model)
    average = copy.deepcopy(model)
    square_loss(model, 0).backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert verdict(full_parameters(model), before) != "right"
    return verdict(full_parameters(average), before)


def test_deepcopy_is_refused_by_fsdp2_and_right_here() -> None:
    assert_outcomes(copies, fsdp2="AssertionError: FSDP does not support deepcopy")


def evaluates_then_trains(shard: Shard, trains_before: bool) -> str:
    model, plain = make(models.Chain), make(models.Chain)
    shard_units(shard, model)
    if trains_before and (found := step_beside(model, plain, 0)) != "right":
        return found
    model.eval()
    with torch.inference_mode():
        if not torch.equal(square_loss(model, 1), square_loss(plain, 1)):
            return "wrong evaluation"
    model.train()
    return step_beside(model, plain, 2)


def test_training_after_inference_mode_fails_in_fsdp2_and_is_right_here() -> None:
    error = "RuntimeError: Inplace update to inference tensor outside InferenceMode"
    assert_outcomes(evaluates_then_trains, False, fsdp2=error)


def test_inference_mode_between_steps_is_right_in_both() -> None:
    assert_outcomes(evaluates_then_trains, True, fsdp2=RIGHT)


class Breaks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise ArithmeticError("in backward")


def break_forward(*_: object) -> None:
    raise ArithmeticError("in forward")


def break_backward(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return Breaks.apply(output)


def breaks_off(shard: Shard, where: Callable[..., Any], resets: bool) -> str:
    """The second step raises in the middle, on every rank; then two more."""
    model, plain = make(models.Chain), make(models.Chain)
    shard_units(shard, model)
    square_loss(model, 0).backward()
    handle = model.layers[1].register_forward_hook(where)
    with pytest.raises(ArithmeticError):
        square_loss(model, 1).backward()
    handle.remove()
    if resets:
        model.reset_iter_state()
    found = [step_beside(model, plain, step) for step in (2, 3)]
    return next((each for each in found if each != "right"), "right")


def test_the_step_after_an_exception_in_forward_is_right_in_both() -> None:
    assert_outcomes(breaks_off, break_forward, False, fsdp2=RIGHT)


def test_steps_after_an_exception_in_backward_are_wrong_in_fsdp2_and_right_here() -> None:
    assert_outcomes(breaks_off, break_backward, False, fsdp2="wrong gradients")


def test_steps_after_an_exception_are_right_in_fsdp2_after_reset_iter_state() -> None:
    assert_outcomes(breaks_off, break_backward, True, fsdp2=RIGHT)


def trains_two_roots(shard: Shard) -> str:
    """One loss of two sharded models, each of which feeds the other once."""
    pairs = [(make(models.Chain), make(models.Chain, 2)) for _ in range(2)]
    for model in pairs[0]:
        shard_units(shard, model)
    for step in range(2):
        x = inputs_of(step, dist.get_rank())
        for first, second in pairs:
            first.zero_grad()
            second.zero_grad()
            (first(second(x)).square().sum() + second(first(x)).square().sum()).backward()
        for ours, plain in zip(*pairs, strict=True):
            found = verdict(full_gradients(ours), averaged_gradients(plain))
            if found != "right":
                return found
    return "right"


@pytest.mark.filterwarnings("ignore:one backward has reached")  # they are two models
def test_two_roots_in_one_step_are_right_in_both() -> None:
    assert_outcomes(trains_two_roots, fsdp2=RIGHT)


def trains_on_slopes(shard: Shard) -> str:
    """The loss has the gradient by the inputs in it, as forces, and the penalty of a GAN."""
    model, plain = make(models.Chain), make(models.Chain)
    shard_units(shard, model)
    for step in range(2):
        for each in (model, plain):
            each.zero_grad()
            x = inputs_of(step, dist.get_rank()).requires_grad_()
            (slope,) = torch.autograd.grad(each(x).sum(), x, create_graph=True)
            slope.square().sum().backward()
        found = verdict(full_gradients(model), averaged_gradients(plain))
        if found != "right":
            return found
    return "right"


def test_the_gradient_of_a_gradient_fails_in_fsdp2_and_is_right_here() -> None:
    assert_outcomes(trains_on_slopes, fsdp2="RuntimeError: setStorage: .* storage of size 0")


def deletes(shard: Shard) -> str:
    """Whether parameters and modules go with the last reference to the model."""
    shard_units(shard, make(models.Chain))  # the first of a process imports, and keeps a frame
    gc.collect()
    gc.disable()
    try:
        model = shard_units(shard, make(models.Chain))
        for step in range(2):
            square_loss(model, step).backward()
        held = [weakref.ref(each) for each in (*model.parameters(), *model.modules())]
        del model
        at_once = [each() for each in held].count(None)
        gc.collect()
        assert all(each() is None for each in held)
    finally:
        gc.enable()
    return "right" if at_once == len(held) else f"kept: {len(held) - at_once} of {len(held)}"


def test_a_deleted_model_waits_for_the_collector_in_fsdp2_and_goes_at_once_here() -> None:
    # 6 parameters, 3 layers, their list and the root
    assert_outcomes(deletes, fsdp2="kept: 11 of 11")


# Ranks that differ


def runs(shard: Shard, model_class: type[nn.Module]) -> str:
    square_loss(shard_units(shard, make(model_class)), 0).backward()
    return "right"


def test_models_of_another_width_abort_fsdp2_and_are_named_here() -> None:
    named = MISMATCH + r"model: .*'units\.0\.weight' \(shape \(6, 5\).*\(shape \(7, 5\)"
    assert_fsdp2_aborts(runs, models.AnotherWidthOnEachRank, ours=named)


def test_models_of_another_depth_hang_in_fsdp2_and_are_named_here() -> None:
    named = MISMATCH + r"model: .*nothing more and rank 1 has unit 'layers\.2'"
    assert_outcomes(runs, models.AnotherDepthOnEachRank, fsdp2=HANGS, ours=named)


def meets_nan(shard: Shard, checks: bool) -> str:
    """NaN in one rank's batch, then clipping and a step."""
    model = shard_units(shard, make(models.Chain))
    before = full_parameters(model)
    x = inputs_of(0, dist.get_rank())
    if dist.get_rank() == 0:
        x[0, 0] = math.nan
    model(x).sum().backward()
    if not checks or check_gradients(model, "skip"):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    after = full_parameters(model)
    num_nan = sum(int(p.isnan().sum()) for p in after.values() if p is not None)
    return verdict(after, before) if not num_nan else f"NaN in {num_nan} weights"


def test_nan_on_one_rank_takes_all_weights_in_both() -> None:
    all_of_them = "NaN in 90 weights"  # 3 x (5 x 5 + 5)
    assert_outcomes(meets_nan, False, fsdp2=all_of_them, ours=all_of_them)


def test_nan_on_one_rank_changes_no_weight_of_either_after_check_gradients() -> None:
    assert_outcomes(meets_nan, True, fsdp2=RIGHT)
