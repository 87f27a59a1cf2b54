"""What does not run on ragged tensors raises, on every rank, and names the ways out."""

from __future__ import annotations

import copy
import importlib
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import forward_ad
from torch.distributed.tensor import DTensor, Shard
from torch.func import functional_call

from vescale_fsdp import RaggedShard, RaggedTensor, fully_shard, unsharded
from vescale_fsdp.testing import run_ranks

from .helpers import SHAPE, assert_holds, cuts, distributed, make_mesh, random
from .layouts import counted_collectives

UNSUPPORTED: dict[str, Callable[[RaggedTensor], object]] = {
    "matmul": lambda x: x @ torch.ones(16, 3),
    "linear": lambda x: torch.nn.functional.linear(torch.ones(2, 16), x),
    "embedding": lambda x: torch.nn.functional.embedding(torch.tensor([1]), x),
    "gather": lambda x: x.gather(0, torch.zeros(1, 16, dtype=torch.int64)),
    "random activations": lambda x: torch.nn.functional.rrelu(x, training=True),
    "multinomial": lambda x: torch.multinomial(x.abs(), 1),
    "resized": lambda x: x.resize_(2, 2),
}


def check_unsupported() -> None:
    for (x,) in distributed(random()):
        for name, operator in UNSUPPORTED.items():
            with counted_collectives() as seen, pytest.raises(NotImplementedError) as caught:
                operator(x)
            assert seen == [], name
            for way_out in ("full_tensor()", "redistribute(", "to_local()"):
                assert way_out in str(caught.value), name


def test_unsupported_operators_name_the_ways_out_on_every_rank() -> None:
    """Also on ranks that hold nothing, where the local operator might go through."""
    run_ranks(check_unsupported, 2)


# Views that no tensor of this shape has: the error, and how its words end.
IMPOSSIBLE: dict[str, tuple[Callable[[RaggedTensor], object], type[Exception], str]] = {
    "shape": (
        lambda x: x.view(5, -1),
        RuntimeError,
        "view.default: shape [5, -1] is invalid for a RaggedTensor of shape (6, 16), which has 96 "
        "elements",
    ),
    "dimension": (
        lambda x: x.transpose(0, 2),
        IndexError,
        "dimension 2 of a RaggedTensor of 2 dimensions does not exist; expected one in [-2, 1]",
    ),
    "new dimension": (
        lambda x: x.unsqueeze(-4),
        IndexError,
        "dimension -4 of a RaggedTensor of 3 dimensions does not exist; expected one in [-3, 2]",
    ),
    "index": (
        lambda x: x.select(0, 6),
        IndexError,
        "index 6 is out of range for dimension 0 with size 6",
    ),
    "sizes": (
        lambda x: x.split([3, 4]),
        RuntimeError,
        "split_with_sizes.default: sizes [3, 4] do not sum to dimension 0 of a RaggedTensor of "
        "shape (6, 16)",
    ),
}


def check_impossible() -> None:
    for (x,) in distributed(random()):
        for name, (operator, kind, words) in IMPOSSIBLE.items():
            with counted_collectives() as seen, pytest.raises(kind) as caught:
                operator(x)
            assert str(caught.value).endswith(words), name
            assert seen == [], name
    one = fully_shard(nn.Linear(1, 1, bias=False)).weight
    with pytest.raises(IndexError, match="tensor without dimensions cannot be indexed by 0"):
        one.view(()).select(0, 0)


def test_views_that_do_not_exist_say_what_was_asked_and_what_is_there() -> None:
    run_ranks(check_impossible, 2)


def check_operator_is_named() -> None:
    (x,) = next(distributed(random()))
    with pytest.raises(NotImplementedError, match=r"aten\.mm\.default does not run"):
        x @ torch.ones(16, 3)


def test_error_names_the_operator() -> None:
    run_ranks(check_operator_is_named, 2)


def check_different_shapes() -> None:
    mesh = make_mesh()
    matrix = RaggedTensor.distribute(random((4, 2)), mesh, [RaggedShard((0,), (1, 1))])
    vector = RaggedTensor.distribute(random((2,)), mesh, [RaggedShard((0,), (1, 1))])
    with pytest.raises(ValueError, match=r"sharded differently: shape \(4, 2\).*shape \(2,\)"):
        torch._foreach_add([matrix], [vector])


def test_lists_of_different_shapes_are_refused() -> None:
    run_ranks(check_different_shapes, 2)


def check_plain_partners() -> None:
    whole = random()
    for (x,) in distributed(whole):
        attempts: list[tuple[str, Callable[[RaggedTensor], object]]] = [
            ("a plain tensor", lambda x: x + whole),
            ("a plain tensor", lambda x: torch.where(x > 0, x, whole)),
            ("a plain tensor", lambda x: whole.clone().mul_(x)),
            ("a plain tensor", lambda x: torch._foreach_add([x], [whole])),
        ]
        for found, attempt in attempts:
            with pytest.raises(ValueError, match="full_tensor") as caught:
                attempt(x)
            assert found in str(caught.value)
            assert str(SHAPE) in str(caught.value)
        assert_holds(x, whole, like=x)  # nothing was written


def test_plain_tensors_beside_ragged_ones_are_refused() -> None:
    run_ranks(check_plain_partners, 2)


def check_sharded_one_element() -> None:
    """One element in all, but not on every rank."""
    mesh = make_mesh()
    local = torch.ones(1 if dist.get_rank() == 0 else 0)
    one = DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=(1,), stride=(1,))
    x = RaggedTensor.distribute(random(), mesh, [cuts()[0]])
    with pytest.raises(ValueError, match="Shard"):
        x * one


def test_sharded_one_element_tensor_is_refused() -> None:
    run_ranks(check_sharded_one_element, 2)


def check_forward_mode() -> None:
    with warnings.catch_warnings():  # torch loads formulas by torch.jit.script
        warnings.simplefilter("ignore")
        importlib.import_module("torch._decomp.decompositions_for_jvp")
    sharded, whole = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
    for model, sharding in ((sharded, None), (whole, "ddp")):
        fully_shard(model, sharding=sharding)
        weight = model.weight
        assert weight.is_same_size(weight.detach())
        with counted_collectives() as seen:
            for tangent in (torch.ones_like(weight), torch.ones(4, 4)):
                with forward_ad.dual_level():
                    for primal in (weight, weight.detach()):
                        with pytest.raises(NotImplementedError, match="forward-mode diff"):
                            forward_ad.make_dual(primal, tangent)
                given = ({"weight": weight.detach()},), ({"weight": tangent},)
                with pytest.raises(NotImplementedError, match="forward-mode diff"):
                    torch.func.jvp(lambda x, m=model: functional_call(m, x, ones()), *given)
        assert seen == []
        with unsharded(model):
            plain = copy.deepcopy(model)
        given = (dict(plain.named_parameters()),), ({"weight": torch.ones(4, 4)},)
        _, tangent = torch.func.jvp(lambda x, m=plain: functional_call(m, x, ones()), *given)
        assert torch.equal(tangent, torch.full((2, 4), 4.0))


def ones() -> torch.Tensor:
    return torch.ones(2, 4)


def test_forward_mode_by_parameters_is_refused_before_communication() -> None:
    run_ranks(check_forward_mode, 2)
