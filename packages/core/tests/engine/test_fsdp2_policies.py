"""Policies of FSDP2, and what other tools ask of its modules, do the same with ours."""

from __future__ import annotations

import inspect
from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp
from torch import Tensor, nn
from torch.distributed._composable import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import vescale_fsdp
from vescale_fsdp import compat
from vescale_fsdp.testing import run_ranks

from .helpers import full_gradients
from .libraries import (
    LIBRARIES,
    Library,
    Observe,
    Outcomes,
    layers,
    linear,
    observe_all,
    ones,
    sees,
)
from .models import make

WORLD_SIZE = 2
SEEN: dict[Observe, Any] = {}  # what each function says, with either library
ALIKE: dict[Observe, float] = {}  # by how much the numbers of the two may differ
# Mixed precision

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
Pair = namedtuple("Pair", ["first", "second"])


@dataclass
class Record:
    tensor: Tensor
    number: int


class Takes(nn.Module):
    """Notes the dtypes of what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.seen: list[torch.dtype] = []

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        def note(value: Any) -> None:
            if isinstance(value, Tensor):
                self.seen.append(value.dtype)
            elif isinstance(value, dict):
                note([*value.values()])
            elif isinstance(value, list | tuple | set):
                for item in value:
                    note(item)
            elif isinstance(value, Record):
                note(value.tensor)

        note([args, kwargs])
        return {"out": [args[0] * self.scale, torch.ones(1, dtype=torch.int32)]}


@sees(SEEN, [[torch.bfloat16] * 6 + [torch.int64], torch.float32, torch.bfloat16])
def floating_inputs_are_cast_wherever_they_are(library: Library) -> Any:
    model = library.fully_shard(Takes(), mp_policy=BF16)
    nested = {"a": [ones()]}
    out = model(
        ones(),
        nested,
        (ones(),),
        pair=Pair(ones(), "text"),
        record=Record(ones(), 3),
        keyword=ones(),
        number=torch.ones(1, dtype=torch.int64),
    )
    return [model.seen, nested["a"][0].dtype, out["out"][0].dtype]


@sees(SEEN, [torch.bfloat16])
def floating_inputs_in_a_set_are_cast(library: Library) -> Any:
    model = library.fully_shard(Takes(), mp_policy=BF16)
    model(torch.ones(1, dtype=torch.int64), {ones()})
    return model.seen[1:]


@sees(SEEN, [[torch.float32], torch.float32])
def inputs_stay_if_they_are_not_to_be_cast(library: Library) -> Any:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, cast_forward_inputs=False)
    model = library.fully_shard(Takes(), mp_policy=policy)
    out = model(ones())
    return [model.seen, out["out"][0].dtype]


@sees(SEEN, [torch.float64, torch.int32])
def floating_outputs_are_cast_wherever_they_are(library: Library) -> Any:
    policy = MixedPrecisionPolicy(output_dtype=torch.float64)
    out = library.fully_shard(Takes(), mp_policy=policy)(ones())
    return [each.dtype for each in out["out"]]


class OnlyTheFirst(nn.Module):
    """The second module of the pair is called by the user, after the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = linear(), linear()

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x)


@sees(SEEN, [torch.bfloat16, torch.float64, torch.bfloat16, torch.float64])
def each_module_of_a_list_casts_for_itself(library: Library) -> Any:
    model, seen = OnlyTheFirst(), []
    pair = [model.first, model.second]
    for module in pair:
        module.register_forward_pre_hook(lambda _, args: seen.append(args[0].dtype))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float64)
    library.fully_shard(pair, mp_policy=policy)
    library.fully_shard(model)
    seen.append(model(ones()).dtype)
    seen.append(model.second(ones()).dtype)
    return seen


class Recomputed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.last = linear(), linear()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(checkpoint(self.inner, x, use_reentrant=False))


@sees(SEEN, [torch.bfloat16, torch.bfloat16])
def inputs_are_cast_again_in_recomputation(library: Library) -> Any:
    model, seen = Recomputed(), []
    model.inner.register_forward_pre_hook(lambda _, args: seen.append(args[0].dtype))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)
    library.fully_shard(model.inner, mp_policy=policy)
    library.shard(model, model.last)
    model(ones()).sum().backward()
    return seen


class WithMethod(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = linear()
        self.seen: list[torch.dtype] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(x.dtype)
        return self.inner(x)

    def training_step(self, batch: Tensor, index: int = 0) -> Tensor:
        out = self(batch.float())  # whole numbers until here
        self.seen.append(out.dtype)
        return out.sum()


@sees(SEEN, [torch.bfloat16, torch.float64])
def a_forward_inside_of_a_registered_method_casts_too(library: Library) -> Any:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float64)
    model = library.fully_shard(WithMethod(), mp_policy=policy)
    library.register_fsdp_forward_method(model, "training_step")
    model.training_step(torch.ones(2, 4, dtype=torch.int64))
    return model.seen


@sees(SEEN, [False, "(batch, index=0)"])
def a_method_of_a_plain_module_is_left_alone(library: Library) -> Any:
    model = WithMethod()
    library.register_fsdp_forward_method(model, "training_step")
    library.register_fsdp_forward_method(model, "missing")
    signature = inspect.signature(model.training_step).replace(return_annotation=None)
    names = [str(each).split(":")[0] for each in signature.parameters.values()]
    return ["training_step" in vars(model), f"({names[0]}, {names[1]}=0)"]


# What others look for


@sees(SEEN, [True, True, 1, True])
def the_state_of_a_module_is_found(library: Library) -> Any:
    model = library.fully_shard(linear())
    plain = library.fully_shard.state(nn.Linear(1, 1))
    states = [library.fully_shard.state(model), torch_fully_shard.state(model)]
    found = [state is not None and plain is None for state in states]
    groups = model._get_fsdp_state()._fsdp_param_groups
    return [*found, len(groups), hasattr(states[0], "_root_post_backward_final_callback")]


# What published training code does with these objects: each project is named


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


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = linear(), linear()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


# What both compute


def accumulates(library: Library, **dtypes: torch.dtype) -> list[float]:
    """The sums of the gradients of three backwards, of which the last one synchronizes."""
    model = layers(2)
    library.shard(model, *model, mp_policy=MixedPrecisionPolicy(**dtypes))
    for step in range(3):
        model.set_requires_gradient_sync(step == 2)
        model((step + 1 + 0.3 * dist.get_rank()) * ones()).square().sum().backward()
    return [parameter.grad.full_tensor().sum().item() for parameter in model.parameters()]


@sees(ALIKE, 0.0)
def gradients_summed_in_fp32(library: Library) -> Any:
    return accumulates(library, param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


@sees(ALIKE, 2.0**-7)  # one unit of bf16's 8 digits, for sums that are rounded at another time
def gradients_summed_in_the_dtype_of_compute(library: Library) -> Any:
    return accumulates(library, param_dtype=torch.bfloat16)


@sees(ALIKE, 2.0**-6)  # torch 2.15 rounds each gradient before it is added, and the sum again
def gradients_summed_in_a_smaller_dtype(library: Library) -> Any:
    return accumulates(library, reduce_dtype=torch.bfloat16)


@sees(ALIKE, 2.0**-10)
def gradients_in_fp16(library: Library) -> Any:
    return accumulates(library, param_dtype=torch.float16)


# The tests


@pytest.fixture(scope="module")
def outcomes() -> Outcomes:
    return observe_all([*SEEN, *ALIKE], WORLD_SIZE)


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("observe", SEEN, ids=lambda observe: observe.__name__)
def test_both_do_the_same(outcomes: Outcomes, observe: Observe, library: str) -> None:
    for outcome in outcomes[library, observe.__name__]:
        assert outcome == ("returned", SEEN[observe])


@pytest.mark.parametrize("observe", ALIKE, ids=lambda observe: observe.__name__)
def test_both_compute_the_same(outcomes: Outcomes, observe: Observe) -> None:
    expected, found = (outcomes[name, observe.__name__] for name in ("fsdp2", "ours"))
    for (kind, numbers), (our_kind, ours) in zip(expected, found, strict=True):
        assert (kind, our_kind) == ("returned", "returned"), (numbers, ours)
        assert ours == pytest.approx(numbers, rel=ALIKE[observe])


def check_smaller_sums() -> None:
    """Gradients are rounded before they are sent, in one backward and in several."""
    policy = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)
    for num_backwards in (1, 3):
        found = []
        for shard in (vescale_fsdp.fully_shard, torch.distributed.fsdp.fully_shard):
            torch.manual_seed(0)
            model: Any = torch.nn.Linear(8, 8, bias=False)
            shard(model, mp_policy=policy)
            random = torch.Generator().manual_seed(dist.get_rank())
            for number in range(1, num_backwards + 1):
                model.set_requires_gradient_sync(number == num_backwards)
                model(torch.randn(4, 8, generator=random)).square().sum().backward()
            found.append(model.weight.grad.full_tensor())
        if num_backwards == 1 or not compat.REDUCES_IN_OWN_DTYPE:
            assert torch.equal(*found)
        else:  # torch 2.15 rounds each gradient before it is added, and the sum again
            unit = 2.0**-7 * found[1].abs().max().item()
            torch.testing.assert_close(*found, rtol=0.0, atol=unit)


def test_gradients_in_a_smaller_dtype_are_rounded_as_by_fsdp2() -> None:
    run_ranks(check_smaller_sums, 2)


@pytest.mark.parametrize(
    "name",
    ["CPUOffloadPolicy", "DataParallelMeshDims", "MixedPrecisionPolicy", "OffloadPolicy"],
)
def test_policies_are_those_of_torch(name: str) -> None:
    assert getattr(vescale_fsdp, name) is getattr(torch.distributed.fsdp, name)


def check_signature() -> None:
    model = vescale_fsdp.fully_shard(WithMethod())
    expected = inspect.signature(model.training_step)
    vescale_fsdp.register_fsdp_forward_method(model, "training_step")
    assert inspect.signature(model.training_step) == expected


def test_a_registered_method_keeps_its_signature() -> None:
    # FSDP2 leaves none: no argument at all.
    run_ranks(check_signature, WORLD_SIZE)


def trains_a_pipeline(library: Library) -> None:
    """Four stages on two ranks, each sharded over two: they are gathered and freed as a whole."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "data"))
    number, data_rank = (mesh.get_local_rank(name) for name in ("stage", "data"))
    stages = [make(Block, seed=seed) for seed in range(4)]
    mine = {}
    for index in (number, number + 2):
        model = make(Block, seed=index)
        library.shard(model, model.up, mesh=mesh["data"], reshard_after_forward=False)
        mine[index] = model
    group = mesh.get_group("stage")
    device = torch.device("cpu")
    schedule = ScheduleInterleaved1F1B(
        [PipelineStage(model, index, 4, device, group=group) for index, model in mine.items()],
        n_microbatches=2,
        loss_fn=lambda out, target: (out - target).square().mean(),
    )
    for step in range(2):
        generator = torch.Generator().manual_seed(step)
        batches = torch.randn(2, 4, 4, generator=generator)
        batch = batches[data_rank]
        schedule.step(*([batch] if number == 0 else []), target=batch)
        for each in batches:
            for half in each.chunk(2):
                out = half
                for stage in stages:
                    out = stage(out)
                ((out - half).square().mean() / 4).backward()
        for index, model in mine.items():
            for key, gradient in full_gradients(model).items():
                wanted = stages[index].get_parameter(key).grad
                torch.testing.assert_close(gradient, wanted, rtol=1e-5, atol=1e-6, msg=key)
            model.zero_grad()
        for stage in stages:
            stage.zero_grad()


def test_an_interleaved_pipeline_trains_sharded_stages() -> None:
    for outcomes in observe_all([trains_a_pipeline], 4).values():
        assert outcomes == [("returned", None)] * 4
