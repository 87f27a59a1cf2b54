"""Every write to a ragged tensor raises the version of the local tensor that it wrote to."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import nn

from vescale_fsdp import RaggedShard, RaggedTensor
from vescale_fsdp.ragged import redistribute
from vescale_fsdp.ragged.dispatch import _TABLE
from vescale_fsdp.ragged.pointwise import run_pointwise
from vescale_fsdp.testing import run_ranks

from .helpers import make_mesh

WRITES: dict[str, Callable[[RaggedTensor], object]] = {
    "mul_": lambda x: x.mul_(2),
    "add_ of a tensor": lambda x: x.add_(x.clone()),
    "copy_": lambda x: x.copy_(x.clone()),
    "copy_ of another cut": lambda x: x.copy_(_other(x)),
    "fill_": lambda x: x.fill_(1),
    "fill_ of a tensor": lambda x: x.fill_(torch.tensor(1.0)),
    "zero_": lambda x: x.zero_(),
    "lerp_": lambda x: x.lerp_(x.clone(), 0.5),
    "masked_fill_": lambda x: x.masked_fill_(x > 0, 1.0),
    "operator": lambda x: x.__imul__(2),
    "out": lambda x: torch.mul(x.clone(), 2, out=x),
    "set by an index": lambda x: x.__setitem__(0, 2.0),
    "set by a slice": lambda x: x.__setitem__(slice(0, 2), x[2:4].clone()),
    "set all": lambda x: x.__setitem__(..., 2.0),
    "a view": lambda x: x.view(-1).mul_(2),
    "a view of a part": lambda x: x[1:5][0].mul_(2),
    "a part": lambda x: x.split(3)[0].mul_(2),
    "a row": lambda x: x.unbind(0)[0].mul_(2),
    "squeeze": lambda x: x.unsqueeze(0).squeeze().mul_(2),
    "detach": lambda x: x.detach().mul_(2),
    "a part of detach": lambda x: x.detach()[0].mul_(2),
    "data": lambda x: x.data.mul_(2),
    "a part of data": lambda x: x.data[0].mul_(2),
    "data, twice": lambda x: x.data.detach().data.mul_(2),
    "assignment to data": lambda x: setattr(x, "data", x * 2),
    "assignment of another cut": lambda x: setattr(x, "data", _other(x)),
    "local": lambda x: x.to_local().mul_(2),
    "random": lambda x: nn.init.normal_(x),
    "uniform_": lambda x: x.uniform_(),
    "bernoulli_": lambda x: x.bernoulli_(x.sigmoid()),
    "foreach mul_": lambda x: torch._foreach_mul_([x], 2),
    "foreach add_": lambda x: torch._foreach_add_([x], [x.clone()]),
    "foreach lerp_": lambda x: torch._foreach_lerp_([x], [x.clone()], 0.5),
    "foreach copy_": lambda x: torch._foreach_copy_([x], [x.clone()]),
    "foreach zero_": lambda x: torch._foreach_zero_([x]),
    "foreach of data": lambda x: torch._foreach_mul_([x.data], 2),
    "foreach with a plain one": lambda x: torch._foreach_mul_([torch.ones(2), x], 2),
    "mask": lambda x: x.__setitem__(x > 0, 3.0),
    "unscale": lambda x: torch._amp_foreach_non_finite_check_and_unscale_(
        [x], torch.zeros(1), torch.ones(1)
    ),
    "clip": lambda x: _clipped(x),
}
OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, foreach=False),
    "sgd foreach": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, foreach=True),
    "sgd fused": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, fused=True),
    "adamw": lambda p: torch.optim.AdamW(p, foreach=False),
    "adamw foreach": lambda p: torch.optim.AdamW(p, foreach=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, fused=True),
    "rmsprop foreach": lambda p: torch.optim.RMSprop(p, foreach=True),
    "adagrad foreach": lambda p: torch.optim.Adagrad(p, foreach=True),
}
READS: dict[str, Callable[[RaggedTensor], object]] = {
    "norm": lambda x: x.norm().full_tensor(),
    "full": lambda x: x.full_tensor(),
    "a part": lambda x: x[0] * 2,
    "arithmetic": lambda x: (x + 1).mul_(2),
    "data": lambda x: x.data,
    "deepcopy": lambda x: copy.deepcopy(x).detach().zero_(),
    "foreach": lambda x: torch._foreach_add([x], 1)[0].mul_(2),
    "assignment of itself": lambda x: setattr(x, "data", x.data),
}


def _other(x: RaggedTensor) -> RaggedTensor:
    return redistribute(x.detach(), placements=[RaggedShard((0,), (2, 4))])


def _clipped(x: RaggedTensor) -> None:
    holder = nn.Parameter(torch.zeros(()))
    ragged = nn.Parameter(x.clone())
    ragged.grad = x
    nn.utils.clip_grad_norm_([holder, ragged], 1e-3)


def _ragged() -> RaggedTensor:
    numbers = torch.arange(96.0).view(6, 16) - 40
    return RaggedTensor.distribute(numbers, make_mesh(), [RaggedShard((0,), (3, 3))])


def check_writes() -> None:
    for grown in (False, True):  # a parameter, under no_grad
        for name, write in WRITES.items():
            x = nn.Parameter(_ragged()) if grown else _ragged()
            if name in ("clip", "local") and grown:
                continue
            place, before = x._local_tensor.data_ptr(), x._local_tensor._version
            with torch.no_grad():
                write(x)
            assert x._local_tensor.data_ptr() == place, name
            assert x._local_tensor._version > before, name
    for name, read in READS.items():
        x = nn.Parameter(_ragged())
        before = x._local_tensor._version
        read(x)
        assert x._local_tensor._version == before, name


def test_writes_are_counted_where_the_memory_is_and_reads_are_not() -> None:
    run_ranks(check_writes, 2)


def check_former() -> None:
    x = nn.Parameter(_ragged())
    former = x.data
    x.data = x.data * 2
    before = x._local_tensor._version
    former.mul_(2)
    assert x._local_tensor._version == before


def test_writes_to_former_data_are_not_counted() -> None:
    run_ranks(check_former, 2)


def check_optimizers() -> None:
    for name, make in OPTIMIZERS.items():
        params = [nn.Parameter(_ragged()), nn.Parameter(_ragged()[0:4])]
        params.append(
            nn.Parameter(
                RaggedTensor.distribute(torch.ones(5), make_mesh(), [RaggedShard.owner(1, 2)])
            )
        )
        optimizer = make(params)
        for _ in range(2):
            before = [p._local_tensor._version for p in params]
            for p in params:
                p.grad = torch.ones_like(p)
            optimizer.step()
            after = [p._local_tensor._version for p in params]
            assert all(map(int.__gt__, after, before)), name


def test_each_step_of_an_optimizer_is_counted() -> None:
    run_ranks(check_optimizers, 2)


def test_a_new_handler_that_writes_must_count() -> None:
    """Element-wise operators count by their schema; these do it by themselves, and are above."""
    runs = {func: run for operators in _TABLE.values() for func, run in operators.items()}
    special = [func for func, run in runs.items() if run is not run_pointwise]
    writing = {func._schema.name for func in special if func._schema.is_mutable}
    drawn = ("bernoulli", "cauchy", "exponential", "geometric", "log_normal", "normal")
    drawn = (*drawn, "random", "uniform")
    others = {"aten::_amp_foreach_non_finite_check_and_unscale_", "aten::index_put_"}
    others.add("aten::masked_fill_")  # element-wise
    others.add("aten::copy_")  # element-wise, unless it writes to a plain tensor
    assert writing == {f"aten::{name}_" for name in drawn} | others
