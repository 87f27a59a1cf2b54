"""What published training code does with FSDP2's objects, run with both: each project is named."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable import replicate
from torch.distributed.tensor import DTensor

from .libraries import LIBRARIES, Library, Observe, Outcomes, layers, linear, observe_all, sees

WORLD_SIZE = 2
SEEN: dict[Observe, Any] = {}  # what each function says, with either library


def gradients_of(model: nn.Module) -> list[float]:
    found = []
    for param in model.parameters():
        gradient = param.grad
        assert gradient is not None
        whole = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
        found.append(round(float(whole.abs().sum()), 4))
    return found


@sees(SEEN, 8.0)
def no_offload_policy_is_none(library: Library) -> float:
    """verl: ``apply_fsdp2`` passes None."""
    model = library.fully_shard(nn.Linear(2, 2, bias=False), offload_policy=None)
    model(torch.ones(2, 2)).sum().backward()
    return float(model.weight.grad.full_tensor().sum())


@sees(SEEN, [2, 2, True])
def the_size_of_the_mesh_is_read_from_the_state(library: Library) -> list[Any]:
    """minFM, and copies of its clipping."""
    model = library.fully_shard(linear())
    info = model._get_fsdp_state()._fsdp_param_group.mesh_info
    return [
        info.shard_mesh_size,
        dist.get_world_size(info.shard_process_group),
        info.mesh.ndim == 1,
    ]


@sees(SEEN, [True, True, True])
def resharding_after_forward_is_read_and_set_again(library: Library) -> list[bool]:
    """dinov3: a root must not become one that stays unsharded. verl sets both attributes."""
    model = layers(2)
    library.shard(model, *model)
    head = library.fully_shard(nn.Sequential(linear()))
    for module in (*model, head):
        state = module._get_fsdp_state()
        info = state._fsdp_param_group.post_forward_mesh_info
        state._auto_reshard_after_forward = False
        if module is head:
            state._lazy_init()
        state._fsdp_param_group.post_forward_mesh_info = info
    head(model(torch.ones(2, 4))).sum()
    return [isinstance(part.weight, DTensor) for part in (*model, *head)]


@sees(SEEN, [True, "torch.bfloat16"])
def the_policy_of_a_state_is_read(library: Library) -> list[Any]:
    """fairseq2, before it gathers parameters for generation."""
    policy = torch.distributed.fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    model = library.fully_shard(linear(), mp_policy=policy)
    state = library.fully_shard.state(model)
    assert {state, state._fsdp_param_group}  # both can be kept in sets
    return [state._mp_policy == policy, str(state._mp_policy.param_dtype)]


@sees(SEEN, True)
def replicate_leaves_a_sharded_child_out(library: Library) -> bool:
    """PyTorch's own tests: composable DDP around it."""
    models = [layers(2), layers(2)]
    models[1].load_state_dict(models[0].state_dict())
    library.fully_shard(models[0][0])
    replicate(models[0])
    for rank in range(WORLD_SIZE):
        models[1](torch.ones(2, 4) * (rank + 1)).sum().mul(1 / WORLD_SIZE).backward()
    models[0](torch.ones(2, 4) * (dist.get_rank() + 1)).sum().backward()
    return gradients_of(models[0]) == gradients_of(models[1])


@pytest.fixture(scope="module")
def outcomes() -> Outcomes:
    return observe_all(list(SEEN), WORLD_SIZE)


@pytest.mark.parametrize("observe", SEEN, ids=lambda each: each.__name__)
@pytest.mark.parametrize("library", LIBRARIES)
def test_both_do_the_same(outcomes: Outcomes, library: str, observe: Observe) -> None:
    assert outcomes[library, observe.__name__] == [("returned", SEEN[observe])] * WORLD_SIZE
