"""A user's mistake is told at once, on every rank, with the words that FSDP2 has for it."""

from __future__ import annotations

import copy
import re
import time
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule as TorchFSDPModule
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor

from vescale_fsdp import FSDPModule, fully_shard
from vescale_fsdp.testing import RankError, run_ranks

from .helpers import assert_bit_equal, full_gradients, full_parameters, shard_units
from .models import MLP, inputs_of, make


def check_refused(call: Callable[[], object], error: type[Exception], pattern: str) -> None:
    with pytest.raises(error, match=pattern):
        call()


def shard_on_3d_mesh() -> None:
    mesh = init_device_mesh("cpu", (1, 1, 1), mesh_dim_names=("a", "b", "c"))
    fully_shard(MLP(), mesh=mesh)


def shard_module_list() -> None:
    fully_shard(nn.ModuleList([nn.Linear(2, 2)]))


def shard_traced() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch 2.15 calls it deprecated
        traced = torch.jit.trace(nn.Linear(2, 2), torch.ones(1, 2))
    fully_shard(nn.Sequential(traced))


def shard_twice() -> None:
    fully_shard(fully_shard(nn.Linear(2, 2)))


def shard_with_odd_reshard() -> None:
    fully_shard(nn.Linear(2, 2), reshard_after_forward="x")  # type: ignore[arg-type]


def shard_with_int_granularity() -> None:
    fully_shard(nn.Linear(2, 2), granularity=128)  # type: ignore[arg-type]


def shard_with_odd_unused() -> None:
    fully_shard(nn.Linear(2, 2), unused="never")  # type: ignore[arg-type]


def set_int_reshard() -> None:
    fully_shard(nn.Linear(2, 2)).set_reshard_after_forward(2)  # type: ignore[arg-type]


def run_part_in_a_pass() -> None:
    first = make(MLP)
    shard_units(first, first.layers)
    other = fully_shard(nn.Sequential(first.layers[0]))
    first.layers[1].register_forward_hook(lambda *_: other(inputs_of(0, 0)))
    first(inputs_of(0, 0))


def run_on_meta() -> None:
    with torch.device("meta"):
        model = MLP()
    shard_units(model, model.layers)
    model(inputs_of(0, 0))


@pytest.mark.filterwarnings("ignore:.torch.jit.trace:DeprecationWarning")
@pytest.mark.parametrize(
    ("call", "error", "pattern"),
    [
        (
            shard_on_3d_mesh,
            ValueError,
            r"^fully_shard expects a 1D or 2D DeviceMesh but got DeviceMesh\(",
        ),
        (
            shard_module_list,
            ValueError,
            "^fully_shard does not support containers that do not implement forward: ModuleList",
        ),
        (
            shard_traced,
            ValueError,
            "^the parameter '0.weight' belongs to a module of torch.jit",
        ),
        (
            shard_twice,
            AssertionError,
            "^Each distinct composable distributed API can only be applied to a module once. "
            "fully_shard has already been applied",
        ),
        (
            shard_with_odd_reshard,
            ValueError,
            "^reshard_after_forward should be a bool or an int representing the group size to "
            "reshard to, not x",
        ),
        (shard_with_int_granularity, TypeError, "granularity.*128|128.*[Gg]ranularity"),
        (shard_with_odd_unused, ValueError, "unused.*never"),
        (
            set_int_reshard,
            ValueError,
            "^reshard_after_forward should be a bool, got <class 'int'>",
        ),
        (
            run_part_in_a_pass,
            RuntimeError,
            "^FSDP state has already been lazily initialized for 0\nFSDP requires running "
            "forward through the root module first.*has not ended",
        ),
        (
            run_on_meta,
            RuntimeError,
            "^FSDP parameters should be materialized from meta device before training, but the "
            "following were still on meta device: .*layers.0.weight",
        ),
    ],
)
def test_mistake_is_refused_in_the_words_of_fsdp2(
    call: Callable[[], object], error: type[Exception], pattern: str
) -> None:
    run_ranks(check_refused, 1, call, error, pattern)


def shard_with(**options: Any) -> None:
    fully_shard(MLP(), **options)


class NoParameters(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x)


class AroundNothing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.nothing = NoParameters()
        self.linear = nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.nothing(x))


def check_module_without_parameters() -> None:
    model = AroundNothing()
    refusal = ""
    try:
        fully_shard(model.nothing)
    except ValueError as error:
        refusal = str(error)
    assert not refusal or ("NoParameters" in refusal and "parameter" in refusal)
    fully_shard(model)
    for _ in range(2):
        model(inputs_of(0, 0)).sum().backward()
    assert model.linear.weight.grad is not None


def test_module_without_parameters_is_refused_clearly_or_works() -> None:
    run_ranks(check_module_without_parameters, 2)


def check_module_of_nothing_but_frozen_parameters() -> None:
    model = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5)).requires_grad_(False)
    shard_units(model, model)
    x = inputs_of(0, 0).requires_grad_()
    model(x).sum().backward()
    assert x.grad is not None
    assert x.grad.abs().sum() > 0


def test_module_without_trainable_parameters_passes_gradients_on() -> None:
    run_ranks(check_module_of_nothing_but_frozen_parameters, 2)


def check_classes() -> None:
    linear = nn.Linear(2, 2)
    assert fully_shard(linear) is linear
    assert isinstance(linear, nn.Linear)
    assert isinstance(linear, FSDPModule)
    assert issubclass(FSDPModule, TorchFSDPModule)


def test_sharded_module_has_a_class_of_both_kinds() -> None:
    run_ranks(check_classes, 1)


class Outer:
    class Inner(nn.Linear):
        """A class within another one."""


def check_names() -> None:
    for module in (nn.Linear(2, 2), Outer.Inner(2, 2)):
        before = type(module)
        text = repr(module)
        assert type(fully_shard(module)) is not before
        assert module._get_name() == type(module).__name__ == before.__name__
        assert type(module).__qualname__ == before.__qualname__
        assert type(module).__module__ == before.__module__
        assert type(module).__doc__ == before.__doc__
        assert repr(module) == f"FSDP{text}"


def test_sharded_class_has_the_names_of_the_class_that_it_wraps() -> None:
    run_ranks(check_names, 1)


class Failing(MLP):
    """Raises in the middle of its forward, once."""

    fails = True

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        if self.fails:
            self.fails = False
            raise KeyError("the user's own mistake")
        return self.layers[1](x)


def check_error_of_the_user() -> None:
    ours, plain = make(Failing), make(Failing)
    shard_units(ours, ours.layers)
    for model in (ours, plain):
        with pytest.raises(KeyError, match="the user's own mistake"):
            model(inputs_of(0, 0))
        model(inputs_of(0, 0)).sum().backward()
    assert_bit_equal(full_gradients(ours), full_gradients(plain))


def test_error_in_forward_reaches_the_user_and_the_next_step_is_right() -> None:
    run_ranks(check_error_of_the_user, 2, timeout_s=20)


def model_of_another_width() -> nn.Module:
    layers = [nn.Linear(5, 5), nn.Linear(5, 6 if dist.get_rank() else 7), nn.Linear(5, 5)]
    return nn.Sequential(*layers)


def model_of_another_length() -> nn.Module:
    return nn.Sequential(*(nn.Linear(5, 5) for _ in range(2 + dist.get_rank())))


def model_of_another_dtype() -> nn.Module:
    model = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5))
    return model if dist.get_rank() == 0 else model.bfloat16()


class Named(nn.Module):
    """Layers by name, run one after the other."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        for name in names:
            self.add_module(name, nn.Linear(5, 5))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.children():
            x = layer(x)
        return x


def model_with_another_layer_name() -> nn.Module:
    return Named("same", "left" if dist.get_rank() else "right")


def model_with_another_frozen_layer() -> nn.Module:
    model = Named("same", "other")
    model.other.requires_grad_(dist.get_rank() == 0)
    return model


def run_different_models(make_model: Callable[[], nn.Module]) -> None:
    model = make_model()
    shard_units(model, model.children())
    begin = time.monotonic()
    try:
        model(inputs_of(0, 0))
    finally:
        assert time.monotonic() - begin < 20


@pytest.mark.parametrize(
    ("make_model", "pattern"),
    [
        (model_of_another_width, r"1\.weight.*\b[67], 5\b.*\b[67], 5\b"),
        (model_of_another_length, r"\b2\.(weight|bias)|unit '2'"),
        (model_of_another_dtype, r"0\.weight.*(float32.*bfloat16|bfloat16.*float32)"),
        (model_with_another_layer_name, r"left\.weight.*right\.weight|right.*left"),
        (model_with_another_frozen_layer, r"other\.weight"),
    ],
)
def test_ranks_with_different_models_are_told_the_first_difference(
    make_model: Callable[[], nn.Module], pattern: str
) -> None:
    with pytest.raises(RankError) as caught:
        run_ranks(run_different_models, 2, make_model, timeout_s=20)
    failures = sorted(caught.value.failures, key=lambda failure: failure.rank)
    assert [failure.type_name for failure in failures] == ["RankMismatchError"] * 2
    for failure in failures:
        assert re.search(pattern, failure.message), failure.message


class TwoWays(nn.Module):
    """Rank 0 goes left first, the others go right first."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.right(self.left(x)) if dist.get_rank() == 0 else self.left(self.right(x))


def run_two_ways() -> None:
    model = TwoWays()
    shard_units(model, model.children())
    model(torch.ones(2, 4))


def test_ranks_that_run_units_in_another_order_are_told_so_instead_of_mixing_them() -> None:
    with pytest.raises(RankError) as caught:
        run_ranks(run_two_ways, 2, timeout_s=20)
    assert [failure.type_name for failure in caught.value.failures] == ["RankMismatchError"] * 2
    for failure in caught.value.failures:
        assert "rank 1 runs left after right in forward of the root of model" in failure.message


def check_unsupported_operator(operator: Callable[[Tensor], Any]) -> None:
    linear = fully_shard(nn.Linear(4, 4))
    with pytest.raises((RuntimeError, NotImplementedError, TypeError)) as caught:
        operator(linear.weight)
    message = str(caught.value)
    assert "full_tensor" in message, message
    assert "redistribute" in message, message


def multiply_matrices(weight: Tensor) -> Tensor:
    return torch.ones(2, 4) @ weight


def transpose(weight: Tensor) -> Tensor:
    return weight.t() + torch.ones(4, 4)


def sort(weight: Tensor) -> Tensor:
    out = torch.empty(4, 4), torch.empty(4, 4, dtype=torch.int64)
    return torch.sort(weight.detach(), out=out)[0]


@pytest.mark.parametrize("operator", [multiply_matrices, transpose, sort])
def test_operator_without_a_meaning_on_shards_names_the_way_out(
    operator: Callable[[Tensor], Any],
) -> None:
    run_ranks(check_unsupported_operator, 2, operator)


def outer_module_first() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    fully_shard(model)
    with pytest.raises(ValueError, match="inner modules first"):
        fully_shard(model[0])
    with pytest.raises(TypeError, match=r"MixedPrecisionPolicy\(param_dtype"):
        fully_shard(nn.Linear(2, 2), mp_policy=torch.bfloat16)


def test_wrong_order_and_wrong_policy_are_named() -> None:
    run_ranks(outer_module_first, 2)


def check_data_parallel() -> None:
    """Around the root, and around a module that contains units; the head alone may be wrapped."""
    for sharding in (None, "ddp"):
        for is_inside in (False, True):
            model = fully_shard(MLP(), sharding=sharding)
            wrapped = nn.Sequential(model) if is_inside else model
            around = nn.parallel.DistributedDataParallel(wrapped)
            message = "fully_shard averages their gradients already.*remove Dist"
            check_refused(lambda m=around: m(inputs_of(0, 0)), RuntimeError, message)  # type: ignore[misc]
    body = fully_shard(MLP())
    head = nn.parallel.DistributedDataParallel(nn.Linear(5, 2))
    head(body(inputs_of(0, 0))).sum().backward()


def test_data_parallel_around_a_sharded_model_is_refused() -> None:
    run_ranks(check_data_parallel, 2)


def check_data_parallel_around_a_part(sharding: Any) -> None:
    """In its constructor the mistake is named; with what the message says it trains."""
    torch.manual_seed(0)
    plain = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    sharded = copy.deepcopy(plain)
    fully_shard(sharded[1], sharding=sharding)
    message = "^aten.cat.*DistributedDataParallel around a model of which a part is sharded.*whole"
    with pytest.raises(NotImplementedError, match=message):
        nn.parallel.DistributedDataParallel(sharded)
    names = [name for name, param in sharded.named_parameters() if isinstance(param, DTensor)]
    assert names == ["1.weight", "1.bias"]
    nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(sharded, names)
    optimizers = [torch.optim.SGD(each.parameters(), 0.1) for each in (plain, sharded)]
    models = [nn.parallel.DistributedDataParallel(each) for each in (plain, sharded)]
    for step in range(3):
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            x = torch.full((2, 4), 1.0 + step + 2 * dist.get_rank())
            model(x).square().mean().backward()
            optimizer.step()
    assert_bit_equal(full_parameters(sharded), dict(plain.named_parameters()))


@pytest.mark.parametrize("sharding", [None, "ddp"])
def test_data_parallel_around_a_part_names_what_to_do(sharding: Any) -> None:
    run_ranks(check_data_parallel_around_a_part, 2, sharding)


def shard_with_two_engines() -> None:
    """FSDP2 on a part, on all, and on a module around; meshes without names and with."""
    for names in (None, ("data",)):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=names)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        torch_fully_shard(model[0], mesh=mesh)
        with pytest.raises(TypeError, match=r"^fully_shard: '0' has been sharded by torch"):
            fully_shard(model, mesh=mesh)
        with pytest.raises(TypeError, match=r"^fully_shard: 'FSDPLinear' has been sharded by tor"):
            fully_shard(model[0], mesh=mesh)
        torch_fully_shard(model, mesh=mesh)
        one = re.escape("'weight' is a DTensor on DeviceMesh(") + ".* ranks \\[0, 1\\]. If torch"
        with pytest.raises(ValueError, match=f"^fully_shard: parameter {one}"):
            fully_shard(torch_sharded_around(mesh), mesh=mesh)


def torch_sharded_around(mesh: DeviceMesh) -> nn.Module:
    around = torch_fully_shard(nn.Sequential(nn.Linear(4, 4)), mesh=mesh)
    return around[0]


def test_two_engines_on_one_model_are_named() -> None:
    run_ranks(shard_with_two_engines, 2)


def refuse_in_few_words() -> None:
    """Of a large model, an error has the class."""
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(50)))
    for module in (fully_shard(model), nn.ModuleList(model)):
        with pytest.raises(
            (AssertionError, ValueError), match=r"Sequential|ModuleList\(50"
        ) as found:
            fully_shard(module)
        assert len(str(found.value)) < 300
    with pytest.raises(ValueError, match=r"the mesh is of 'cuda' devices, and torch .* finds none"):
        fully_shard(nn.Linear(2, 2), mesh=init_device_mesh("cuda", (1,)))


@pytest.mark.skipif(torch.cuda.is_available(), reason="here is what the mesh asks for")
def test_errors_name_a_class_and_a_missing_device() -> None:
    run_ranks(refuse_in_few_words, 1)


def test_a_script_without_a_launcher_is_told_of_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr("sys.argv", ["/home/first.py"])
    with pytest.raises(ValueError, match=r"launcher.*: torchrun --nproc-per-node 2 first\.py; or"):
        fully_shard(nn.Linear(2, 2))
