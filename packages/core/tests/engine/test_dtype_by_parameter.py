"""``param_dtype_override_fn``: routers and norms compute in fp32, all else in bf16.

The argument is FSDP2's of torch 2.15. Ours follows it on any version, if a policy has it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from vescale_fsdp import MixedPrecisionPolicy, clip_grad_norm_, fully_shard, unsharded
from vescale_fsdp.engine.group import Group
from vescale_fsdp.engine.unit import Unit, unit_of
from vescale_fsdp.testing import run_ranks

from .helpers import full_gradients
from .recorders import Recorder
from .subclasses import Narrow

Choose = Callable[[nn.Parameter], torch.dtype | None]
WIDTH, EXPERTS = 16, 8
HAS_OVERRIDE = hasattr(MixedPrecisionPolicy(), "param_dtype_override_fn")


def policy_with(choose: Choose | None, **dtypes: Any) -> MixedPrecisionPolicy:
    policy = MixedPrecisionPolicy(**{"param_dtype": torch.bfloat16} | dtypes)
    object.__setattr__(policy, "param_dtype_override_fn", choose)
    return policy


class Block(nn.Module):
    """A mixture of experts: with ``wide``, norm and router are computed in fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) / WIDTH**0.5)
        self.seen: set[tuple[torch.dtype, ...]] = set()

    def forward(self, x: Tensor) -> Tensor:
        norm, router = self.norm.weight, self.router.weight
        self.seen.add((x.dtype, norm.dtype, router.dtype, self.experts.dtype))
        normed = F.layer_norm(x.to(norm.dtype), (WIDTH,), norm, self.norm.bias)
        scores = F.linear(normed.to(router.dtype), router).softmax(-1).to(x.dtype)
        return x + torch.einsum("be,bi,eio->bo", scores, normed.to(x.dtype), self.experts)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(x))


def choice_for(model: nn.Module, calls: list[tuple[int, ...]]) -> Choose:
    wide = {  # not the parameters: they would live on
        id(param)
        for name, param in model.named_parameters()
        if any(part in name for part in ("norm", "router"))
    }

    def choose(param: nn.Parameter) -> torch.dtype | None:
        calls.append(tuple(param.shape))
        return torch.float32 if id(param) in wide else None

    return choose


def sharded(by: Any, **dtypes: Any) -> tuple[Model, list[tuple[int, ...]]]:
    torch.manual_seed(0)
    model, calls = Model(), list[tuple[int, ...]]()
    policy = policy_with(choice_for(model, calls), **dtypes)
    for block in model.blocks:
        by(block, mp_policy=policy)
    by(model, mp_policy=policy)
    return model, calls


def batch(step: int) -> Tensor:
    seed = 10 * step + dist.get_rank()
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(seed))


def trained(by: Any, clip: Any, **dtypes: Any) -> Any:
    model, calls = sharded(by, **dtypes)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    found: list[Any] = []
    for step in range(3):
        optimizer.zero_grad()
        for micro in range(2):
            model.set_requires_gradient_sync(micro == 1)  # type: ignore[operator]
            loss = model(batch(2 * step + micro)).float().square().mean()
            loss.backward()
        norm = clip(model.parameters(), 0.1)
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        found += [loss.item(), norm.item(), full_gradients(model)]
        optimizer.step()
    return found, sorted(calls), model.blocks[0].seen, {p.dtype for p in model.parameters()}


def check_training(dtypes: dict[str, Any]) -> None:
    found, calls, seen, at_rest = trained(fully_shard, clip_grad_norm_, **dtypes)
    shapes = sorted(tuple(param.shape) for param in Model().parameters())
    assert calls == shapes, "asked once for each parameter"
    assert seen == {(torch.bfloat16, torch.float32, torch.float32, torch.bfloat16)}
    assert at_rest == {torch.float32}
    if HAS_OVERRIDE:
        expected, *others = trained(torch_fully_shard, nn.utils.clip_grad_norm_, **dtypes)
        assert others == [calls, seen, at_rest]
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)


def check_with_other_settings() -> None:
    """Replicas, no reshard after forward, offload and one rank compute the same dtypes."""
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 1), mesh_dim_names=("r", "s"))
    for options in ({"sharding": "zero1"}, {"mesh": mesh}, {"reshard_after_forward": False}):
        torch.manual_seed(0)
        model, calls = Model(), list[tuple[int, ...]]()
        policy = policy_with(choice_for(model, calls), reduce_dtype=torch.float32)
        for block in model.blocks:
            fully_shard(block, mp_policy=policy, **options)
        fully_shard(model, mp_policy=policy, **options)
        for step in range(2):
            model(batch(step)).float().square().mean().backward()
        assert {each[1:] for each in model.blocks[0].seen} == {
            (torch.float32, torch.float32, torch.bfloat16)
        }
        with unsharded(model):
            dtypes = {name: param.dtype for name, param in model.blocks[0].named_parameters()}
        assert dtypes.pop("experts") == torch.bfloat16
        assert set(dtypes.values()) == {torch.float32}
    with torch.no_grad():
        model(batch(0))


class Known(Narrow):
    """Keeps the policy that it was given."""

    given: Any = None

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> Any:
        Known.given = mp_policy
        return super().fsdp_pre_all_gather(mesh, outer_size, outer_stride, module, mp_policy)


def check_policies() -> None:
    """Who reads a policy finds that of the parameter, or of the inputs, and no function."""
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4))
    model[0].weight = nn.Parameter(Known(model[0].weight.detach()))
    own = id(model[0].weight)
    fully_shard(model, mp_policy=policy_with(lambda p: torch.float32 if id(p) == own else None))
    with torch.no_grad(), unsharded(model):
        assert model[1].weight.dtype == torch.bfloat16
    assert Known.given.param_dtype == torch.float32
    assert getattr(Known.given, "param_dtype_override_fn", None) is None
    kept = fully_shard.state(model)._mp_policy  # type: ignore[attr-defined]
    assert kept == MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    # What follows the dtype of running statistics does so in spite of the function.
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    norm = id(model[1].weight)
    fully_shard(model, mp_policy=policy_with(lambda p: torch.float32 if id(p) == norm else None))
    model[1].running_mean = model[1].running_mean.bfloat16()
    model[1].running_var = model[1].running_var.bfloat16()
    unit = unit_of(model)
    assert unit is not None
    unit.follow_statistics(is_final=True)
    found = {each.fqn: group.compute_dtype for group in unit.groups for each in group.fsdp_params}
    assert found["1.weight"] == torch.float32
    assert found["1.bias"] == found["0.weight"] == torch.bfloat16


def check_mistakes() -> None:
    begin = "param_dtype_override_fn must return"
    for answer, words in (
        ("float32", f"{begin} a torch.dtype or None but got <class 'str'>"),
        (
            torch.float16,
            f"{begin} None, param_dtype, or the parameter's original dtype but got torch.float16 "
            "for a parameter with dtype torch.float32 and param_dtype torch.bfloat16",
        ),
    ):
        for by in (fully_shard, torch_fully_shard) if HAS_OVERRIDE else (fully_shard,):
            model, policy = nn.Linear(2, 2), policy_with(lambda _, a=answer: a)  # type: ignore[misc]
            with pytest.raises(ValueError, match=f"^{re.escape(words)}") as caught:
                by(model, mp_policy=policy)
            if by is fully_shard:
                assert "'weight'" in str(caught.value)
                fully_shard(model)  # nothing was done to it


def check_all() -> None:
    for dtypes in ({"reduce_dtype": torch.float32}, {}):
        check_training(dtypes)
    check_with_other_settings()
    check_policies()
    check_mistakes()


def test_dtypes_by_parameter_are_those_of_fsdp2() -> None:
    run_ranks(check_all, 2, timeout_s=60)


# What it costs


def units_of(model: Model) -> list[Unit]:
    units = [unit_of(module) for module in (*model.blocks, model)]
    return [unit for unit in units if unit is not None]


def padding(groups: list[Group]) -> int:
    """Bytes of padding in the shards of all ranks."""
    return sum(
        (group.layout.total_size - sum(group.sizes)) * group.buffer.shard.itemsize
        for group in groups
    )


def cost(kind: str) -> tuple[dict[str, int], int]:
    torch.manual_seed(0)
    model = Model()
    choose = choice_for(model, []) if kind == "override" else None
    for block in model.blocks:
        if kind == "units":
            for part in (block.norm, block.router):
                fully_shard(part, mp_policy=MixedPrecisionPolicy())
        fully_shard(block, mp_policy=policy_with(choose))
    fully_shard(model, mp_policy=policy_with(choose))
    padded = padding([group for unit in units_of(model) for group in unit.groups])
    if kind == "units":  # their forwards are not called
        return {}, padded
    for step in range(3):
        with Recorder() as recorder:
            model(batch(step)).float().square().mean().backward()
    return {each: recorder.count(each) for each in ("gathers", "reductions")}, padded


def costs() -> list[tuple[dict[str, int], int]]:
    return [cost(kind) for kind in ("one dtype", "override", "units")]


@pytest.mark.usefixtures("each_alone")
def test_a_second_dtype_of_a_unit_costs_a_gather_and_a_reduction_and_no_padding() -> None:
    for plain, override, units in run_ranks(costs, 2):
        # Blocks are gathered twice, the root once. Each is reduced once.
        assert plain[0] == {"gathers": 2 * 2 + 1, "reductions": 2 + 1}
        # The blocks have two dtypes.
        assert override[0] == {"gathers": 2 * (2 * 2) + 1, "reductions": 2 * 2 + 1}
        assert override[1] <= plain[1]
        assert override[1] <= units[1]
