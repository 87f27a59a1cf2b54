"""``torch.compile`` traces ragged and replicated tensors: the numbers are those of Python."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.tensor import DTensor, Replicate

from vescale_fsdp import RaggedShard, RaggedTensor
from vescale_fsdp.ragged import wrap_replicated
from vescale_fsdp.testing import run_ranks

from .helpers import make_mesh, random

INSIDE: dict[str, Callable[[Any], Any]] = {  # of the compiled code
    "element-wise": lambda x: torch.where(x > 0, x * 2, x.bfloat16().float()),
    "in place": lambda x: torch.zeros_like(x).lerp_(x, 0.5).masked_fill_(x > 0, 1.0),
    "foreach": lambda x: torch._foreach_mul([x, x + 1], 2)[1],
    "norm": lambda x: x / x.norm(),
    "norms": lambda x: torch.nn.utils.get_total_norm([x, x]),
    "rows": lambda x: x.sum(1),
    "a part": lambda x: x[1:3] * 2,
    "a column": lambda x: x.new_zeros(len(x), 1) + x,
    "local": lambda x: x.to_local().sum(),
}
OUTSIDE: dict[str, Callable[[Any], Any]] = {  # Python calls it, between two compiled codes
    "extremes": lambda x: (x * 2).max() + 1,
    "all": lambda x: (x + 1).isfinite().all(),
    "full": lambda x: (x * 2).full_tensor() + 1,
    "product": lambda x: (x + 1) @ x.T,
    "a view": lambda x: x.T.contiguous() + 1,
    "a write to a view": lambda x: x.clone().T.div_(2),
    "a write": lambda x: x.clone().triu_(),
    "random": lambda x: torch.rand_like(x) * 0 + x,
}


def made(kind: str, shape: tuple[int, ...] = (5, 6)) -> DTensor:
    """Of (5, 6) on two ranks: 11 and 19 elements, or 30 and none."""
    mesh, whole = make_mesh(), random(shape)
    if kind == "replicated":
        plain = DTensor.from_local(whole, mesh, [Replicate()], run_check=False)
        return wrap_replicated(plain.to_local(), plain._spec)
    held = {"ragged": (11, 19), "owner": (1, 0)}[kind]
    dims = {"ragged": (0, 1), "owner": ()}[kind]
    return RaggedTensor.distribute(whole, mesh, [RaggedShard(dims, held)])


def full(result: Any) -> Any:
    return result.full_tensor() if isinstance(result, DTensor) else result


def check_functions(kind: str) -> None:
    with torch.no_grad():
        for name, function in {**INSIDE, **OUTSIDE}.items():
            torch._dynamo.reset()
            compiled = torch.compile(function, backend="aot_eager", fullgraph=name in INSIDE)
            x = made(kind)
            expected, found = function(x), compiled(x)
            assert type(found) is type(expected), name
            expected, found = full(expected), full(found)
            assert torch.equal(torch.as_tensor(found), torch.as_tensor(expected)), name


@pytest.mark.parametrize("kind", ["ragged", "owner"])
def test_functions_give_what_they_give_in_python(kind: str) -> None:
    run_ranks(check_functions, 2, kind)


def check_replicated() -> None:
    compiled = torch.compile(lambda x: x.mul_(2) + x.norm(), backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        x, y = made("replicated"), made("replicated")
        found, expected = compiled(x), y.mul_(2) + y.norm()
        assert type(found) is type(expected)
        assert torch.equal(full(found), full(expected))
        assert torch.equal(full(x), full(y))


def test_replicated_tensors() -> None:
    run_ranks(check_replicated, 2)


def check_message() -> str:
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: x.max(), backend="aot_eager", fullgraph=True)
    with pytest.raises(Exception, match="a collective on a sharded tensor") as caught:
        compiled(made("ragged"))
    return str(caught.value)


def test_an_error_says_what_compiled_code_cannot_have() -> None:
    for message in run_ranks(check_message, 2):
        assert re.search("Do not pass fullgraph=True", message)


def check_shapes() -> None:
    compiled = torch.compile(lambda x, y: y.add_(x) * 2, backend="aot_eager")
    with torch.no_grad():
        for shape in [(5, 6), (6, 5), (30,), (5, 6), (2, 3)]:
            x = made("owner", shape)
            found = compiled(x, torch.zeros_like(x))
            assert found.shape == shape
            assert torch.equal(full(found), 2 * full(x))


def test_each_shape_has_its_code_also_on_ranks_that_hold_nothing() -> None:
    run_ranks(check_shapes, 2)


class Halved(Tensor):
    """A stand-in for quantized states: half of the precision, of any operator's results."""

    half: Tensor

    @staticmethod
    def __new__(cls, half: Tensor) -> Halved:
        made = Tensor._make_wrapper_subclass(cls, half.shape, dtype=torch.float32)
        made.half = half
        return made

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["half"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], *_: Any) -> Halved:
        return Halved(inner["half"])

    def dequantize(self) -> Tensor:
        return self.half.float()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.copy_.default and isinstance(args[0], cls):
            args[0].half.copy_(args[1].half if isinstance(args[1], cls) else args[1])
            return args[0]
        if func in (torch.ops.aten.detach.default, torch.ops.aten.view.default):
            return cls(func(args[0].half, *args[1:]))
        known = (torch.ops.aten._to_copy.default, torch.ops.aten.lerp.Scalar)
        if func not in known:  # as torchao's, it knows few operators
            raise NotImplementedError(func)
        if func is torch.ops.aten._to_copy.default and (kwargs or {}).get("dtype") in (
            None,
            torch.float32,
        ):
            return cls(args[0].half.clone())
        args = [each.dequantize() if isinstance(each, cls) else each for each in args]
        return func(*args, **(kwargs or {}))


def step(x: Tensor, gradient: Tensor, state: Tensor) -> None:
    """As torchao's: ``single_param_adam``."""
    average = state.float().lerp(gradient, 0.25)
    state.copy_(average)
    x.copy_(x - 0.5 * average / (average.square().sqrt() + 1e-3))


def check_states(kind: str) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True, dynamic=False)
    pairs = []
    with torch.no_grad():
        for function in (step, compiled):
            x = made(kind)
            local = Halved(torch.zeros_like(x._local_tensor, dtype=torch.bfloat16))
            state = DTensor.from_local(
                local, x.device_mesh, x.placements, run_check=False,
                shape=x.shape, stride=x.stride(),
            )  # fmt: skip
            for number in range(3):
                function(x.detach(), x * (number + 1), state)
            assert isinstance(state._local_tensor, Halved)
            pairs.append((full(x), state._local_tensor.half))
    (x, half), (other, other_half) = pairs
    assert torch.equal(x, other)
    assert torch.equal(half, other_half)


@pytest.mark.parametrize("kind", ["ragged", "owner", "replicated"])
def test_steps_with_states_of_another_class(kind: str) -> None:
    run_ranks(check_states, 2, kind)


def check_gather(kind: str) -> None:
    x = made(kind)
    local = Halved(x._local_tensor.bfloat16())
    state = DTensor.from_local(
        local, x.device_mesh, x.placements, run_check=False, shape=x.shape, stride=x.stride()
    )
    assert torch.equal(full(state), full(x).bfloat16().float())


@pytest.mark.parametrize("kind", ["ragged", "owner"])
def test_the_whole_of_such_states_is_a_plain_tensor(kind: str) -> None:
    run_ranks(check_gather, 2, kind)


def check_boxes() -> None:
    x = made("ragged")
    local = Halved(x._local_tensor.bfloat16())
    state: Any = DTensor.from_local(
        local, x.device_mesh, x.placements, run_check=False, shape=x.shape, stride=x.stride()
    )
    index = MetadataIndex("exp_avg", state.__create_chunk_list__()[-1].offsets)
    with pytest.raises(NotImplementedError, match="'exp_avg' has a local part of the class Halved"):
        state.__get_tensor_shard__(index)


def test_boxes_of_such_states_raise_if_the_class_cannot_make_them() -> None:
    run_ranks(check_boxes, 2)


def check_keys() -> list[str]:
    x = made("ragged")
    other = RaggedTensor.from_local(
        x.to_local().clone().bfloat16().float(), x.device_mesh, x.placements, shape=x.shape
    )
    assert x._stable_hash_for_caching() == other._stable_hash_for_caching()
    return [x._stable_hash_for_caching(), made("replicated")._stable_hash_for_caching()]


def test_ranks_have_their_own_code_on_disk() -> None:
    ragged, _ = zip(*run_ranks(check_keys, 2), strict=True)
    assert len(set(ragged)) == 2
