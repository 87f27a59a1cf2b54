"""BatchNorm under mixed precision: parameters have the dtype of its statistics, as in autocast."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.nn.parallel import DistributedDataParallel

from vescale_fsdp import MixedPrecisionPolicy, RankMismatchError, fully_shard, unsharded
from vescale_fsdp.engine import remesh
from vescale_fsdp.testing import run_ranks

from .helpers import full_parameters

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)


def make() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(),
        nn.Sequential(nn.Conv2d(4, 5, 3), nn.InstanceNorm2d(5, affine=True), nn.Flatten()),
        nn.LazyLinear(6), nn.BatchNorm1d(6, track_running_stats=False), nn.Linear(6, 2),
    )  # fmt: skip


def images(step: int) -> torch.Tensor:
    seed = 10 * step + dist.get_rank()
    return torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(seed))


def train(model: nn.Module, *, autocast: bool = False) -> nn.Module:
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    for step in range(3):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(images(step)).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def with_units(kind: str) -> dict[str, Any]:
    model = make()
    model(images(0))  # for the lazy layer
    model[1].reset_running_stats()
    plain = train(DistributedDataParallel(model), autocast=True).module
    model = make()
    model(images(0))
    model[1].reset_running_stats()
    if kind == "norms":
        fully_shard(model[1], mp_policy=BF16)
        fully_shard(model[3][1], mp_policy=BF16)
    if kind != "root":
        fully_shard(model[3], mp_policy=BF16)
    fully_shard(model, mp_policy=BF16)
    seen = []
    model[1].register_forward_pre_hook(lambda m, _: seen.append((m.weight.dtype, m.bias.dtype)))
    model[5].register_forward_pre_hook(lambda m, _: seen.append((m.weight.dtype, m.bias.dtype)))
    train(model)
    assert {*seen[::2]} == {(torch.float32,) * 2}, "it has statistics"
    assert {*seen[1::2]} == {(torch.bfloat16,) * 2}, "it has none"
    model.eval()
    assert model(images(9)).dtype == torch.bfloat16
    return {
        "ours": full_parameters(model),
        "plain": {name: each.detach() for name, each in plain.named_parameters()},
        "mean": (model[1].running_mean, plain[1].running_mean),
    }


@pytest.mark.parametrize("kind", ["root", "blocks", "norms"])
def test_norms_with_statistics_train_in_16_bits(kind: str) -> None:
    found = run_ranks(with_units, 2, kind)[0]
    for name, expected in found["plain"].items():
        torch.testing.assert_close(found["ours"][name], expected, rtol=0.1, atol=0.02, msg=name)
    torch.testing.assert_close(*found["mean"], rtol=0.05, atol=0.02)


def cast_statistics(model: nn.Module, dtype: torch.dtype = torch.bfloat16) -> None:
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean = module.running_mean.to(dtype)  # type: ignore[union-attr]
            module.running_var = module.running_var.to(dtype)  # type: ignore[union-attr]


def norms() -> nn.Sequential:
    """Two norms in one unit, whose parameters lie in several shards."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5), nn.ReLU(), nn.Conv2d(5, 7, 3), nn.BatchNorm2d(7),
        nn.Flatten(), nn.Linear(7 * 16, 2),
    )  # fmt: skip


def check_cast_after(kind: str, which: int | None, sharding: str) -> None:
    """Train with the statistics of all norms, or of one, cast between the call and a forward."""
    policy, theirs = BF16, norms()
    torch_fully_shard(theirs, mp_policy=policy)
    cast_statistics(theirs)
    model = norms()
    if kind == "meta":
        with torch.device("meta"):
            empty = norms()
        fully_shard(empty, mp_policy=policy, sharding=sharding)
        empty.to_empty(device="cpu")
        empty.load_state_dict(model.state_dict())
        model = empty
    else:
        fully_shard(model, mp_policy=policy, sharding=sharding)  # type: ignore[call-overload]
    if kind == "copy":
        model = copy.deepcopy(model)
    before = {name: (id(p), p.placements) for name, p in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    if kind == "unshard":  # and it stays so
        model.unshard()
        assert model[1].weight.dtype == torch.float32
    cast_statistics(model if which is None else model[which])
    if kind == "state":
        model.load_state_dict(model.state_dict())
    if kind == "unsharded":
        with unsharded(model):
            assert model[1].weight.dtype == torch.bfloat16
    seen = []
    for index in (1, 4):
        model[index].register_forward_pre_hook(lambda m, _: seen.append(m.weight.dtype))
    others = torch.optim.SGD(theirs.parameters(), 0.05, momentum=0.9)
    for step in range(3):
        for each, its in ((model, optimizer), (theirs, others)):
            each(images(step)).float().square().mean().backward()
            its.step()
            its.zero_grad()
    low, full = torch.bfloat16, torch.float32
    copy.deepcopy(model)(images(3))
    assert seen == 4 * [low if which in (None, index) else full for index in (1, 4)]
    after = {name: (id(p), p.placements) for name, p in model.named_parameters()}
    assert after == before, "an optimizer may hold them, with states for their layout"
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    expected = full_parameters(theirs)
    for name, value in full_parameters(model).items():
        torch.testing.assert_close(value, expected[name], rtol=0.05, atol=0.02, msg=name)


@pytest.mark.parametrize(
    ("kind", "which", "sharding"),
    [
        ("", None, "zero3"),
        ("", 1, "zero3"),
        ("", 4, "zero1"),
        ("unshard", None, "zero3"),
        ("unsharded", None, "zero3"),
        ("state", None, "ddp"),
        ("meta", 4, "zero3"),
        ("copy", None, "zero3"),
    ],
)
def test_the_first_forward_decides_whether_norms_are_cast(
    kind: str, which: int | None, sharding: str
) -> None:
    run_ranks(check_cast_after, 2, kind, which, sharding)


def check_after_a_context() -> None:
    model = fully_shard(norms(), mp_policy=BF16)
    model.eval()
    with torch.no_grad(), unsharded(model):
        for _ in range(2):
            if dist.get_rank() == 0 or not _:  # after the first one each rank may run alone
                model(images(0))
    cast_statistics(model[1])
    model.train()
    seen = []
    for index in (1, 4):
        model[index].register_forward_pre_hook(lambda m, _: seen.append(m.weight.dtype))
    train(model)
    assert seen == 3 * [torch.bfloat16, torch.float32]
    cast_statistics(model[4])  # too late: it is decided
    with pytest.raises(RuntimeError, match="mixed dtype"):
        model(images(3))


def test_a_forward_in_a_context_does_not_decide() -> None:
    run_ranks(check_after_a_context, 2)


def check_remesh_of_parts() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.BatchNorm1d(5))
    fully_shard(model, mp_policy=BF16)
    model[1].running_mean = model[1].running_mean.bfloat16()
    model[1].running_var = model[1].running_var.bfloat16()
    x = torch.randn(6, 4)
    expected = model(x)
    expected.sum().backward()
    values = full_parameters(model)
    remesh(model)
    with unsharded(model, writeback=True), torch.no_grad():
        for name, param in model.named_parameters():
            param.copy_(values[name])
    for name, value in full_parameters(model).items():
        assert torch.equal(value.bfloat16(), values[name].bfloat16()), name
    assert torch.equal(model(x), expected)
    model(x).sum().backward()


def test_a_model_with_one_norm_that_is_cast_moves_to_other_ranks() -> None:
    run_ranks(check_remesh_of_parts, 2)


def check_disagreement() -> None:
    model = fully_shard(norms(), mp_policy=BF16)
    cast_statistics(model, torch.bfloat16 if dist.get_rank() else torch.float32)
    with pytest.raises(RankMismatchError, match=r"'1\.weight' .* computed in torch\.bfloat16"):
        model(images(0))


def test_ranks_that_cast_other_statistics_are_told() -> None:
    run_ranks(check_disagreement, 2)
