"""The same losses and gradient norms as Accelerate's own DDP, to fp32 accuracy."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import nn

from vescale_fsdp import FSDPModule, RaggedTensor, fully_shard, unsharded
from vescale_fsdp.optim import AdamW8bit, Muon, OptimizerGroup, split_named_params
from vescale_fsdp.testing import run_ranks
from vescale_fsdp_accelerate import VeScaleAccelerator, VeScaleFSDPPlugin

from .helpers import accelerator, full, loss_of, make_loader, make_model

Run = tuple[list[float], list[float], dict[str, torch.Tensor]]


def train(cls: type[Accelerator], seed: int = 0, **options: Any) -> Run:
    with accelerator(cls, **options) as acc:
        model: Any = make_model(seed)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        model, optimizer, loader, scheduler = acc.prepare(
            model, optimizer, make_loader(), scheduler
        )
        losses, norms = [], []
        for (tokens,) in loader:
            with acc.accumulate(model):
                loss = loss_of(model, tokens)
                acc.backward(loss)
                if acc.sync_gradients:
                    norms.append(acc.clip_grad_norm_(model.parameters(), 0.5).item())
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            losses.append(loss.item())
        bare = acc.unwrap_model(model)
        return losses, norms, {name: full(p) for name, p in bare.named_parameters()}


def train_both(options: dict[str, Any], ours: dict[str, Any]) -> tuple[Run, Run]:
    plugin = VeScaleFSDPPlugin(**ours)
    return train(VeScaleAccelerator, fsdp_plugin=plugin, **options), train(Accelerator, **options)


def assert_equal_runs(runs: tuple[Run, Run]) -> None:
    (losses, norms, params), (expected_losses, expected_norms, expected) = runs
    assert losses == pytest.approx(expected_losses, rel=1e-6)
    assert norms == pytest.approx(expected_norms, rel=1e-5)
    assert params.keys() == expected.keys()
    for name, param in expected.items():
        torch.testing.assert_close(params[name], param, rtol=0, atol=1e-5, msg=name)


@pytest.mark.parametrize(
    ("options", "ours"),
    [
        ({}, {}),
        ({"gradient_accumulation_steps": 2}, {"granularity": "rows:2"}),
        ({}, {"activation_checkpointing": True, "cpu_offload": True}),
        ({}, {"auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "reshard_after_forward": False,
              "transformer_cls_names_to_wrap": ["Linear"]}),
        ({}, {"sharding": "zero2"}),
        ({}, {"activation_checkpointing": True, "activation_checkpointing_offload": True}),
        ({}, {"offload": "all"}),
    ],
    ids=["plain", "accumulation", "offload", "wrapped", "zero2", "recompute+offload", "all"],
)  # fmt: skip
def test_training_equals_ddp(options: dict[str, Any], ours: dict[str, Any]) -> None:
    for runs in run_ranks(train_both, 2, options, ours):
        assert_equal_runs(runs)


def test_hybrid_sharding_of_2_by_2_equals_ddp() -> None:
    for runs in run_ranks(train_both, 4, {"gradient_accumulation_steps": 2}, {"replicas": 2}):
        assert_equal_runs(runs)


def start_from_own_seeds() -> tuple[dict[str, torch.Tensor], float]:
    _, _, params = train(VeScaleAccelerator, seed=dist.get_rank())
    losses, _, _ = train(VeScaleAccelerator, seed=0)
    again, _, _ = train(VeScaleAccelerator, seed=dist.get_rank())
    return params, abs(losses[0] - again[0])


def test_all_processes_start_with_the_first_ones_values() -> None:
    (first, difference), (second, _) = run_ranks(start_from_own_seeds, 2)
    assert difference == 0
    for name in first:
        assert torch.equal(first[name], second[name])


def prepare_in_any_order() -> dict[str, Any]:
    found: dict[str, Any] = {}
    with accelerator() as acc:
        model, frozen, late = make_model(), make_model(1).requires_grad_(False), make_model(2)
        both = torch.optim.SGD([*model.parameters(), *late.parameters()], lr=0.1, momentum=0.9)
        model, frozen = acc.prepare(model, frozen)
        both = acc.prepare(both)
        found["model before optimizer"] = isinstance(
            both.param_groups[0]["params"][0], RaggedTensor
        )
        late = acc.prepare_model(late)
        params = [p for group in both.param_groups for p in group["params"]]
        own = {id(p) for each in (model, late) for p in each.parameters()}
        found["all are the models'"] = {id(p) for p in params} == own
        found["tied"] = model.head.weight is model.embed.weight
        found["classes"] = [type(model).__name__, type(acc.unwrap_model(model)).__name__]
        found["sharded"] = [isinstance(each, FSDPModule) for each in (model, frozen, late)]
        before = full(late.scale)
        (tokens,) = next(iter(make_loader(1)))
        acc.backward(loss_of(late, tokens) + loss_of(frozen, tokens))
        both.step()
        found["trains"] = not torch.equal(before, full(late.scale))
        found["again"] = acc.prepare(model) is model
    return found


def test_models_and_optimizers_are_prepared_in_any_order() -> None:
    found = run_ranks(prepare_in_any_order, 2)[0]
    assert found.pop("classes") == ["Model", "Model"]
    assert found.pop("sharded") == [True] * 3
    assert all(found.values()), found


def step_before_sharding() -> list[torch.Tensor]:
    (tokens,) = next(iter(make_loader(1)))
    results = []
    for shards in (False, True):
        with accelerator() as acc:
            model: Any = make_model()
            optimizer: Any = torch.optim.Adagrad(model.parameters(), lr=0.1)
            loss_of(model, tokens).backward()
            optimizer.step()
            optimizer.zero_grad()
            if shards:
                model, optimizer = acc.prepare(model, optimizer)
            loss_of(model, tokens).backward()
            optimizer.step()
            results.append(full(model.embed.weight))
    return results


def test_states_that_an_optimizer_had_before_go_on() -> None:
    expected, found = run_ranks(step_before_sharding, 2)[0]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


def train_with_own_optimizers() -> tuple[list[float], bool, str]:
    with accelerator() as acc:
        model: Any = make_model()
        hidden, rest = split_named_params(model)
        group: Any = OptimizerGroup(
            muon=Muon(hidden, lr=0.02),
            adamw=AdamW8bit(rest, lr=1e-2, block_size=8, min_8bit_size=8),
        )
        model, optimizer = acc.prepare(model, group)
        (tokens,) = next(iter(make_loader(1)))
        losses = []
        for _ in range(4):
            loss = loss_of(model, tokens)
            acc.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        moment = group.state[model.embed.weight]["exp_avg"]
        return losses, isinstance(moment, RaggedTensor), str(moment.dtype)


def test_our_optimizers_made_before_prepare_are_cut_as_they_need_it() -> None:
    losses, is_sharded, dtype = run_ranks(train_with_own_optimizers, 2)[0]
    assert losses[-1] < losses[0]
    assert (is_sharded, dtype) == (True, "torch.uint8")


def train_mixed() -> dict[str, Any]:
    found: dict[str, Any] = {}
    seen: list[torch.dtype] = []
    with accelerator(mixed_precision="bf16") as acc:
        model: Any = make_model().to(torch.bfloat16)
        model.blocks[0].register_forward_hook(lambda m, args, out: seen.append(m.weight.dtype))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = acc.prepare(model, optimizer)
        (tokens,) = next(iter(make_loader(1)))
        found["output"] = model(tokens).dtype
        acc.backward(loss_of(model, tokens))
        found["computes"] = seen[0]
        found["trains"] = {p.dtype for p in model.parameters()}
        found["gradient"] = model.embed.weight.grad.dtype
        policy = acc.state.fsdp_plugin.mixed_precision_policy
        found["reduces"] = policy.reduce_dtype
    return found


def test_bf16_gathers_in_bf16_and_reduces_and_optimizes_in_fp32() -> None:
    assert run_ranks(train_mixed, 2)[0] == {
        "output": torch.float32,
        "computes": torch.bfloat16,
        "trains": {torch.float32},
        "gradient": torch.float32,
        "reduces": torch.float32,
    }


def refuse() -> list[str]:
    messages = []
    for options in ({"mixed_precision": "fp8"}, {"fsdp_plugin": VeScaleFSDPPlugin(replicas=3)}):
        try:
            with accelerator(**options) as acc:  # type: ignore[arg-type]
                acc.prepare(nn.Linear(2, 2))
        except (ValueError, ImportError, RuntimeError) as error:
            messages.append(str(error))
    with accelerator() as acc:
        model = torch.distributed.fsdp.fully_shard(nn.Linear(2, 2))
        try:
            acc.prepare(model)
        except TypeError as error:
            messages.append(str(error))
    return messages


def test_what_does_not_work_is_refused_by_name() -> None:
    fp8, replicas, engine = run_ranks(refuse, 2)[0]
    assert "fp8" in fp8.lower()
    assert "fsdp_vescale_replicas: 3 does not divide the 2 processes" in replicas
    assert "sharded by torch.distributed.fsdp" in engine


def trigger() -> tuple[torch.Tensor, torch.Tensor]:
    grads = []
    for inside in (True, False):
        with accelerator() as acc:
            model: Any = acc.prepare(make_model())
            (one,), (two,) = list(make_loader(2))[:2]
            one, two = one + dist.get_rank(), two + dist.get_rank()
            one, two = one % 16, two % 16
            if inside:
                with acc.no_sync(model):
                    acc.backward(loss_of(model, one))
                    with acc.trigger_sync_in_backward(model):
                        acc.backward(loss_of(model, two))
            else:
                acc.backward(loss_of(model, one) + loss_of(model, two))
            grads.append(full(model.embed.weight.grad))
    return grads[0], grads[1]


def test_sync_can_be_triggered_within_no_sync() -> None:
    found, expected = run_ranks(trigger, 2)[0]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


def gather_what_is_sharded() -> tuple[str, list[float], list[float]]:
    with accelerator() as acc, torch.no_grad():
        model = acc.prepare(make_model())
        (tokens,) = next(iter(acc.prepare(make_loader(1))))
        loss = loss_of(model, tokens)
        with pytest.raises(TypeError) as error:
            acc.gather_for_metrics({"loss": loss + model.embed.weight.pow(2).mean()})
        with unsharded(model, recurse=False):
            found = acc.gather(loss + model.embed.weight.pow(2).mean())
        expected = acc.gather(loss) + full(model.embed.weight).pow(2).mean()
        return str(error.value), found.tolist(), expected.tolist()


def test_gather_says_what_to_do_with_what_was_computed_of_sharded_weights() -> None:
    for message, found, expected in run_ranks(gather_what_is_sharded, 2):
        assert "gather got a sharded tensor (ReplicatedTensor of shape ())" in message
        assert "unsharded(model, recurse=False)" in message
        assert found == pytest.approx(expected)
        assert found[0] != found[1]


def train_twice(cls: type[Accelerator], **options: Any) -> Run:
    """The second time with a block more and a new head, which each process draws for itself."""
    model: Any = make_model()
    losses, norms = [], []
    for stage in range(2):
        if stage:
            torch.manual_seed(10 + dist.get_rank())
            model.blocks.append(nn.Linear(8, 8))
            model.head = nn.Linear(8, 16)
        with accelerator(cls, **options) as acc:
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            prepared, optimizer, loader = acc.prepare(model, optimizer, make_loader())
            for (tokens,) in loader:
                loss = loss_of(prepared, tokens)
                acc.backward(loss)
                norms.append(acc.clip_grad_norm_(prepared.parameters(), 0.5).item())
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
            model = acc.unwrap_model(prepared)
    return losses, norms, {name: full(p) for name, p in model.named_parameters()}


def train_twice_with_both(ours: dict[str, Any]) -> tuple[Run, Run]:
    plugin = VeScaleFSDPPlugin(**ours)
    return train_twice(VeScaleAccelerator, fsdp_plugin=plugin), train_twice(Accelerator)


@pytest.mark.parametrize("ours", [{}, {"sharding": "ddp"}], ids=["zero3", "ddp"])
def test_modules_added_between_trainings_equal_ddp(ours: dict[str, Any]) -> None:
    for runs in run_ranks(train_twice_with_both, 2, ours):
        assert_equal_runs(runs)


def prepare_what_is_not_whole() -> None:
    model: Any = make_model()
    with accelerator() as acc:
        acc.prepare(model)
        model.blocks[0].gain = nn.Parameter(torch.ones(()))
        with pytest.raises(ValueError, match=r"\['blocks.0.gain'\] were added to modules"):
            acc.prepare(model)
    around = nn.Sequential(make_model())
    with accelerator() as acc:
        acc.prepare(around)
        with pytest.raises(ValueError, match=r"'scale' is sharded already.*shard a copy"):
            acc.prepare(around[0])  # as merge_and_unload returns it
        tokens = torch.zeros(2, 4, dtype=torch.long)
        part = nn.Sequential(around[0].embed, nn.Linear(8, 2))
        for each in (copy.deepcopy(around[0]), part):
            prepared = acc.prepare(each)
            acc.backward(prepared(tokens).square().mean())
            assert all(param.grad is not None for param in prepared.parameters())


class Around(nn.Module):
    """As a model of peft: it passes on attributes of the model in it, also Accelerate's mark."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.last = model, nn.Linear(16, 16)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("model"), name)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.last(self.model(tokens))  # type: ignore[no-any-return]


def plain_copy(teacher: nn.Module) -> Any:
    with unsharded(teacher):
        return copy.deepcopy(teacher)


def around_the_model(teacher: Any) -> Any:
    teacher.blocks[0].adapter = nn.Linear(8, 8)  # not used, and sharded nevertheless
    return Around(teacher)


def a_copied_part(teacher: nn.Module) -> Any:
    student: Any = make_model(3)
    student.blocks = plain_copy(teacher).blocks
    return student


def sharded_copy(teacher: nn.Module) -> Any:
    return copy.deepcopy(teacher)


def compiled(teacher: nn.Module) -> Any:
    return torch.compile(teacher, backend="eager")


COPIES = [plain_copy, sharded_copy, a_copied_part]


def prepare_again(make: Callable[[nn.Module], Any], options: dict[str, Any]) -> None:
    warnings.filterwarnings("ignore", "The .grad attribute of a Tensor")  # of Dynamo
    tokens = torch.randint(16, (4, 5), generator=torch.Generator().manual_seed(dist.get_rank()))
    with accelerator(**options) as acc:
        teacher = acc.prepare(make_model())
        before = {name: full(param) for name, param in teacher.named_parameters()}
        student = make(teacher)
        optimizer = torch.optim.SGD(student.parameters(), lr=0.1)
        if make is a_copied_part:  # the optimizer comes later
            student = acc.prepare(student)
            optimizer = acc.prepare(optimizer)
        else:
            student, optimizer = acc.prepare(student, optimizer)
        assert any(isinstance(each, FSDPModule) for each in student.modules())
        assert all(isinstance(param, RaggedTensor) for param in student.parameters())
        held = {id(param) for group in optimizer.param_groups for param in group["params"]}
        assert held == {id(param) for param in student.parameters()}
        first = {name: full(param) for name, param in student.named_parameters()}
        acc.backward(loss_of(student, tokens))
        optimizer.step()
        moved = {
            n for n, param in student.named_parameters() if not torch.equal(full(param), first[n])
        }
        assert moved >= {name for name in first if "blocks" in name and "adapter" not in name}
        if make in COPIES:
            for name, param in teacher.named_parameters():
                assert torch.equal(full(param), before[name])


@pytest.mark.parametrize("make", [*COPIES, around_the_model, compiled])
def test_what_is_made_of_a_prepared_model_is_sharded_and_trained(make: Any) -> None:
    run_ranks(prepare_again, 2, make, {})


def test_a_copy_of_a_compiled_model_that_recomputes_is_sharded_and_trained() -> None:
    plugin = VeScaleFSDPPlugin(activation_checkpointing=True)
    options = {"dynamo_backend": "eager", "fsdp_plugin": plugin}
    run_ranks(prepare_again, 2, plain_copy, options)


def prepare_with_attributes() -> None:
    model = make_model()
    model.blocks[0].bias.no_decay = True
    model.embed.weight.no_decay = True
    with accelerator() as acc:
        model = acc.prepare(model)
        groups: dict[bool, list[str]] = {True: [], False: []}
        for name, param in model.named_parameters():
            groups[not getattr(param, "no_decay", False)].append(name)
    assert groups[False] == ["embed.weight", "blocks.0.bias"]
    assert groups[True] == ["scale", "blocks.0.weight", "blocks.1.weight", "blocks.1.bias"]


def test_attributes_of_parameters_are_there_after_prepare() -> None:
    run_ranks(prepare_with_attributes, 2)


def test_strays_and_parts_of_a_prepared_model_are_refused() -> None:
    run_ranks(prepare_what_is_not_whole, 2)


def prepare_what_is_sharded_in_part() -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with accelerator() as acc:
        fully_shard(model.blocks[0])
        num_replaced = len(list(model.blocks[0].parameters()))
        expected = f"SGD was made before fully_shard: {num_replaced} of its "
        with pytest.warns(UserWarning, match=expected):
            prepared, optimizer = acc.prepare(model, optimizer)
        assert all(isinstance(param, RaggedTensor) for param in prepared.parameters())
        params = optimizer.param_groups[0]["params"]
        assert sum(not isinstance(param, RaggedTensor) for param in params) == num_replaced
        prepared.added = torch.nn.Linear(2, 2)  # and not prepared
        with pytest.raises(ValueError, match=r"^save_state: 'added.weight', 'added.bias' of "):
            acc.save_state("unused")


def test_a_model_that_is_sharded_in_part_becomes_a_unit_and_its_optimizer_is_warned_of() -> None:
    run_ranks(prepare_what_is_sharded_in_part, 2)


def train_two_critics() -> None:
    with accelerator() as acc, warnings.catch_warnings():
        warnings.filterwarnings("error", "one backward has reached")
        first, second = acc.prepare(make_model(), make_model())
        tokens = torch.zeros(2, 4, dtype=torch.long)
        acc.backward((first(tokens) + second(tokens)).square().mean())


def test_two_critics_in_one_backward_are_not_warned_of() -> None:
    """`prepare` has seen that nothing is around them that is trained alone."""
    run_ranks(train_two_critics, 2)
