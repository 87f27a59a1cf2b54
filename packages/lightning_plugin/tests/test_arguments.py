"""The arguments of the strategy, beside DDP, and what a model may bring along."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import (
    EarlyStopping,
    GradientAccumulationScheduler,
    LearningRateMonitor,
    ModelSummary,
    StochasticWeightAveraging,
)
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointWrapper,
    checkpoint_wrapper,
)
from torch.distributed.fsdp import CPUOffload, FullyShardedDataParallel
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from vescale_fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    QuantizedGather,
    QuantizedReduce,
    RaggedTensor,
    fully_shard,
)
from vescale_fsdp.testing import run_ranks
from vescale_fsdp_lightning import VeScaleFabricStrategy, VeScaleFSDPStrategy

from .lit import (
    Block,
    LitModel,
    Run,
    assert_equal,
    fit,
    full_parameters,
    loader,
    make_model,
    make_trainer,
)


def units_of(model: nn.Module) -> list[str]:
    return [name for name, child in model.named_modules() if isinstance(child, FSDPModule)]


def wrapping(root: Path, expected: Run) -> None:
    wanted = {
        "blocks": ["", "blocks.0", "blocks.1"],
        "none": [""],
        ("Block",): ["", "blocks.0", "blocks.1"],
        (nn.Linear,): ["", *(f"blocks.{i}.{name}" for i in (0, 1) for name in ("up", "down"))],
    }
    for wrap, units in wanted.items():
        model = make_model()
        chosen = list(wrap) if isinstance(wrap, tuple) else wrap
        if wrap == (nn.Linear,):  # its head is tied to the embedding, which the root has
            chosen = lambda model: [m for b in model.blocks for m in (b.up, b.down)]  # noqa: E731
        assert_equal(fit(VeScaleFSDPStrategy(wrap=chosen), root, model), expected)
        assert units_of(model) == units
    attention = nn.Sequential(nn.MultiheadAttention(8, 2))  # it reads its `out_proj`
    for of_read in (["NonDynamicallyQuantizableLinear"], lambda model: [model[0].out_proj]):
        options = VeScaleFSDPStrategy(wrap=of_read).options
        assert options.modules_to_wrap(attention) == [attention[0]]
    with pytest.raises(ValueError, match=r"wrap=\['Stage'\].*no such module; accepted are Block,"):
        fit(VeScaleFSDPStrategy(wrap=["Stage"]), root)


def granularity(root: Path, expected: Run) -> None:
    model = make_model()
    strategy = VeScaleFSDPStrategy(granularity="whole", reshard_after_forward=False)
    assert_equal(fit(strategy, root, model), expected)
    for param in model.parameters():
        assert isinstance(param, RaggedTensor)
        assert param.to_local().numel() in (0, param.numel())


class Untied(LitModel):
    """Its head has weights of its own. Remembers what it is trained on."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(12, 23, bias=False)
        self.batches: list[list[torch.Tensor]] = []

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        self.batches.append(batch)
        return super().training_step(batch, batch_idx)


def by_hand(batches: list[list[torch.Tensor]], **options: Any) -> list[float]:
    """The losses of this process with ``fully_shard`` alone."""
    model = make_model(Untied)
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for batch in batches:
        loss = model.loss(batch)
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return losses


def quantized(root: Path, expected: Run) -> None:
    gather, reduce = QuantizedGather("e4m3", block=(4, 4)), QuantizedReduce(block=16)
    model = make_model(Untied)
    plain, _ = fit("vescale_fsdp", root, model)
    batches = model.batches
    assert by_hand(batches) == plain
    for words, objects in (
        ({"gather_codec": {"dtype": "e4m3", "block": [4, 4]}}, {"gather_codec": gather}),
        ({"reduce_codec": {"block": 16}}, {"reduce_codec": reduce}),
        (
            {"gather_codec": gather, "reduce_codec": reduce},
            {"gather_codec": gather, "reduce_codec": reduce},
        ),
    ):
        losses, _ = fit(VeScaleFSDPStrategy(**words), root, make_model(Untied))
        assert losses == by_hand(batches, **objects)
        assert losses != plain
        assert losses == pytest.approx(plain, rel=0.05)
    # A head is none of the layers that are rounded, also where it is a unit alone.
    strategy = VeScaleFSDPStrategy(
        gather_codec=gather, wrap=lambda model: [*model.blocks, model.head]
    )
    model = make_model(Untied)
    losses, _ = fit(strategy, root, model)
    assert units_of(model) == ["", "blocks.0", "blocks.1", "head"]
    assert losses == by_hand(batches, gather_codec=gather)


def dtypes_by_policy(root: Path, expected: Run) -> None:
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    seen: set[torch.dtype] = set()

    class Sees(LitModel):
        def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
            seen.add(self.norm.weight.dtype)
            return super().training_step(batch, batch_idx)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return super().forward(tokens)

    losses, _ = fit(VeScaleFSDPStrategy(mp_policy=policy), root, make_model(Sees))
    assert seen == {torch.bfloat16}
    assert losses == pytest.approx(expected[0], abs=0.05)


def offload(root: Path, expected: Run) -> None:
    trainer = make_trainer("vescale_fsdp_cpu_offload", root, max_steps=6)
    assert trainer.strategy.options.cpu_offload
    model = make_model()
    trainer.fit(model, loader(), loader())
    assert_equal((model.losses, full_parameters(model)), expected)


class Counts(LitModel):
    def __init__(self) -> None:
        super().__init__()
        self.num_forwards = 0
        self.blocks[0].norm.register_forward_pre_hook(self.count)

    def count(self, *_: Any) -> None:
        self.num_forwards += 1


def recomputation(root: Path, expected: Run) -> None:
    for wanted, per_step in ((False, 1), (True, 2), (["Block"], 2)):
        model = make_model(Counts)
        strategy = VeScaleFSDPStrategy(activation_checkpointing=wanted)
        run = fit(strategy, root, model, limit_val_batches=0)
        assert_equal(run, expected)
        assert model.num_forwards == 6 * per_step
    for kept, per_step in (("recompute+offload", 2), ("offload", 1)):
        model = make_model(Counts)
        run = fit(VeScaleFSDPStrategy(activations=kept), root, model, limit_val_batches=0)
        assert_equal(run, expected)
        assert model.num_forwards == 6 * per_step
    for where in ("optimizer", "parameters", "all"):
        run = fit(VeScaleFSDPStrategy(offload=where), root, make_model(), limit_val_batches=0)
        assert_equal(run, expected)
    with pytest.raises(ValueError, match="and with offload on the device; use one of them"):
        VeScaleFSDPStrategy(offload="all", cpu_offload=True)
    with pytest.raises(ValueError, match="both say what is recomputed"):
        VeScaleFSDPStrategy(activations="offload", activation_checkpointing=True)
    model = make_model(Counts)
    strategy = VeScaleFSDPStrategy(activation_checkpointing=True)
    trainer = make_trainer(strategy, root, max_steps=6, limit_val_batches=0)
    trainer.test(model, loader(), verbose=False)
    model.num_forwards = 0
    trainer.fit(model, loader(), loader())  # set up a second time
    assert model.num_forwards == 6 * 2
    assert_equal((model.losses, full_parameters(model)), expected)

    class Has(LitModel):
        def configure_model(self) -> None:
            for index, block in enumerate(self.blocks):
                if not isinstance(block, CheckpointWrapper):
                    self.blocks[index] = checkpoint_wrapper(block)

    strategy = VeScaleFSDPStrategy(activation_checkpointing=["Block"])
    with pytest.warns(UserWarning, match="checkpoint_wrapper already"):
        fit(strategy, root, make_model(Has), max_steps=1)


def compiled(root: Path, expected: Run) -> None:
    class Compiles(LitModel):
        def configure_model(self) -> None:
            for index, block in enumerate(self.blocks):
                if isinstance(block, Block):
                    self.blocks[index] = torch.compile(block, backend="eager")  # type: ignore

    model = make_model(Compiles)
    with warnings.catch_warnings():  # of Dynamo, which looks at gradients of what is no leaf
        warnings.simplefilter("ignore", UserWarning)
        losses, _ = fit("vescale_fsdp", root, model)
    assert losses == expected[0]
    assert "blocks.0._orig_mod" in units_of(model) or "blocks.0" in units_of(model)


class Late(LitModel):
    """Makes its layers in ``configure_model``, which is called before each stage."""

    def __init__(self) -> None:
        super().__init__()
        self.made, self.blocks = list(self.blocks), None

    def configure_model(self) -> None:
        if self.blocks is None:
            self.blocks = nn.ModuleList(self.made)


def made_late(root: Path, expected: Run) -> None:
    model = make_model(Late)
    assert_equal(fit("vescale_fsdp", root, model), expected)
    assert units_of(model) == ["", "blocks.0", "blocks.1"]


def states_of_the_strategy(root: Path, expected: Run) -> None:
    """What hooks see: the names of the module; whole ones in the first process only."""
    names = list(make_model().state_dict())
    for kind in ("sharded", "full"):
        model = make_model()
        trainer = make_trainer(VeScaleFSDPStrategy(state_dict_type=kind), root, max_steps=1)
        trainer.fit(model, loader(), loader())
        state = trainer.strategy.lightning_module_state_dict()
        of_optimizer = trainer.strategy.optimizer_state(model.optimizers())
        is_there = kind == "sharded" or dist.get_rank() == 0
        assert list(state) == (names if is_there else [])
        assert bool(of_optimizer) == is_there
        if kind == "full" and is_there:
            assert type(state["blocks.0.up.weight"]) is torch.Tensor


def within_inference_mode(root: Path, expected: Run) -> None:
    trainer = make_trainer("vescale_fsdp", root, max_steps=6)
    model = make_model()
    with torch.inference_mode():
        trainer.test(model, loader(), verbose=False)
        trainer.predict(model, loader())
    trainer.fit(model, loader(), loader())
    assert_equal((model.losses, full_parameters(model)), expected)


def materialization(root: Path) -> None:
    trainer = make_trainer("vescale_fsdp", root, max_steps=8)
    with trainer.init_module(empty_init=True):
        model = LitModel()
    assert all(param.is_meta for param in model.parameters())
    torch.manual_seed(7 + dist.get_rank())
    trainer.fit(model, loader(), loader())
    assert model.losses[-1] < model.losses[0] < 4.5  # ln 23 is 3.1: they have sensible values
    found = full_parameters(model)["blocks.0.up.weight"]
    copies = [torch.empty_like(found) for _ in range(dist.get_world_size())]
    dist.all_gather(copies, found)
    assert torch.equal(copies[0], copies[1])


def callbacks(root: Path) -> None:
    options = {
        "logger": CSVLogger(str(root)),
        "enable_model_summary": True,
        "log_every_n_steps": 1,
        "max_epochs": 3,
        "max_steps": -1,
        "limit_train_batches": 4,
    }
    watching: list[Any] = [
        EarlyStopping("val_loss", patience=0, min_delta=100.0),
        LearningRateMonitor(),
        GradientAccumulationScheduler({0: 2}),
        ModelSummary(),
    ]
    trainer = make_trainer("vescale_fsdp", root, callbacks=watching, **options)
    trainer.fit(make_model(), loader(), loader())
    assert trainer.current_epoch == 2  # stopped: no epoch is better by 100
    assert trainer.global_step == 4  # two of four micro-batches each
    swa = StochasticWeightAveraging(1e-2)
    trainer = make_trainer("vescale_fsdp", root, callbacks=[swa], max_steps=1)
    with pytest.raises(NotImplementedError, match=r"StochasticWeightAveraging.*ShardedEMA"):
        trainer.fit(make_model(), loader(), loader())


class Metric(nn.Module):
    """Has a state that is neither parameter nor buffer, as those of torchmetrics have."""

    moved_to: torch.device | None = None

    def _apply(self, fn: Any, recurse: bool = True) -> nn.Module:
        self.moved_to = fn(torch.empty(0)).device
        return super()._apply(fn, recurse)


def metrics(root: Path) -> None:
    model = make_model()
    model.metric = Metric()
    make_trainer("vescale_fsdp", root).validate(model, loader(), verbose=False)
    assert model.metric.moved_to == torch.device("cpu")


def synchronized_norms(root: Path) -> None:
    class Normed(LitModel):
        def __init__(self) -> None:
            super().__init__()
            self.batch_norm = nn.BatchNorm1d(4)

    model = make_model(Normed)
    trainer = make_trainer("vescale_fsdp", root, sync_batchnorm=True, max_steps=1)
    trainer.validate(model, loader(), verbose=False)
    assert isinstance(model.batch_norm, nn.SyncBatchNorm)


def torch_engine_is_refused(root: Path) -> None:
    class Shards(LitModel):
        def configure_model(self) -> None:
            torch_fully_shard(self.blocks[0])

    with pytest.raises(TypeError, match=r"'blocks\.0' has been sharded by torch"):
        fit("vescale_fsdp", root, make_model(Shards))
    model = make_model()
    model.blocks[1] = FullyShardedDataParallel(model.blocks[1], device_id=torch.device("cpu"))
    with pytest.raises(TypeError, match=r"'blocks\.1' has been sharded by torch"):
        fit("vescale_fsdp", root, model)


@pytest.mark.parametrize("strategy", [VeScaleFSDPStrategy, VeScaleFabricStrategy])
@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"sharding_strategy": "HYBRID_SHARD"}, TypeError, r"Here instead of sharding_strategy: "
         r"leave it out for FULL_SHARD.*device_mesh=\(replicas, shards\) for HYBRID_SHARD"),
        ({"auto_wrap_policy": {Block}}, TypeError, "has no auto_wrap_policy, .*: wrap=, a list"),
        ({"limit_all_gathers": True, "use_orig_params": True}, TypeError, "in_flight=.*; use_orig"),
        ({"state_dict_type": "SHARDED_STATE_DICT"}, ValueError, 'are "sharded", "full", "dcp"'),
        ({"cpu_offload": CPUOffload(True)}, ValueError, "cpu_offload=.*accepted are True or Fal"),
        ({"wraps": "none"}, TypeError, "got an unexpected keyword argument 'wraps'"),
    ],
)  # fmt: skip
def test_arguments_of_lightnings_strategies_are_translated_in_an_error(
    strategy: Any, arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        strategy(**arguments)


def arguments(root: Path) -> None:
    expected = fit("ddp", root)
    for check in (
        wrapping,
        granularity,
        quantized,
        dtypes_by_policy,
        offload,
        recomputation,
        compiled,
        made_late,
        states_of_the_strategy,
        within_inference_mode,
    ):
        check(root, expected)
    materialization(root)
    callbacks(root)
    metrics(root)
    synchronized_norms(root)
    torch_engine_is_refused(root)


def test_arguments_do_what_they_say(tmp_path: Path) -> None:
    run_ranks(arguments, 2, tmp_path, timeout_s=110)


def test_elastic_without_its_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vescale_fsdp_elastic", None)
    match = r"elastic=...\) needs .*: pip install 'vescale-fsdp-lightning\[elastic\]'"
    with pytest.raises(ImportError, match=match):
        VeScaleFSDPStrategy(elastic={"directory": "runs", "global_batch": 64})
