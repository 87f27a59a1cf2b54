"""Each row of what Lightning's own strategy leaves open: numbers, meshes, refusals."""

from __future__ import annotations

import types
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.loops import utilities as loops
from lightning.pytorch.plugins import MixedPrecision
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from vescale_fsdp import (
    FSDPModule,
    QuantizedReduce,
    RaggedTensor,
)
from vescale_fsdp.testing import run_ranks
from vescale_fsdp_lightning import Throughput, VeScaleFSDPStrategy

from .gan import gan_loader, make_gan
from .lit import (
    WIDTH,
    LitModel,
    assert_equal,
    fit,
    full_parameters,
    loader,
    make_model,
    make_trainer,
)

# Numbers


def gan_beside_ddp(root: Path) -> None:
    runs = []
    for strategy in ("vescale_fsdp", "ddp_find_unused_parameters_true"):
        model = make_gan()
        make_trainer(strategy, root, max_steps=24).fit(model, gan_loader())
        runs.append((model.losses, full_parameters(model)))
    assert len(runs[0][0]) == 16
    assert runs[0][0] == runs[1][0]
    for name, param in runs[1][1].items():
        assert torch.equal(runs[0][1][name], param), name


def value_clipping_beside_ddp(root: Path) -> None:
    options = {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}
    expected = fit("ddp", root, **options)
    assert expected[0] != fit("ddp", root)[0]
    assert_equal(fit("vescale_fsdp", root, **options), expected)


class Grouped(LitModel):
    """Its groups are made by what was set on parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding.weight.no_decay = True  # tied
        self.blocks[0].up.weight.no_decay = True

    def configure_optimizers(self) -> torch.optim.Optimizer:
        params = list(self.parameters())
        kept = [param for param in params if getattr(param, "no_decay", False)]
        assert len(kept) == 2
        others = [param for param in params if not getattr(param, "no_decay", False)]
        groups = [{"params": kept, "weight_decay": 0.0}, {"params": others}]
        return torch.optim.AdamW(groups, lr=1e-2, weight_decay=5.0)


def groups_beside_ddp(root: Path) -> None:
    expected = fit("ddp", root, make_model(Grouped))
    assert_equal(fit("vescale_fsdp", root, make_model(Grouped)), expected)


def test_groups_by_attributes_of_parameters_equal_ddp(tmp_path: Path) -> None:
    run_ranks(groups_beside_ddp, 2, tmp_path)


class Looks(LitModel):
    """Remembers what it sees in its steps."""

    def __init__(self) -> None:
        super().__init__()
        self.has_gradients: list[bool] = []
        self.inference: list[bool] = []

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        self.has_gradients.append(any(p.grad is not None for p in self.parameters()))
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        self.inference.append(torch.is_inference_mode_enabled() or torch.is_grad_enabled())
        super().validation_step(batch, batch_idx)

    def test_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        self.inference.append(torch.is_inference_mode_enabled() or torch.is_grad_enabled())
        super().test_step(batch, batch_idx)

    def predict_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        self.inference.append(torch.is_inference_mode_enabled() or torch.is_grad_enabled())
        return super().predict_step(batch, batch_idx)


def accumulation_does_not_reduce(root: Path) -> None:
    model = make_model(Looks)
    fit("vescale_fsdp", root, model, accumulate_grad_batches=2, limit_train_batches=4, max_steps=2)
    # Gradients are zeroed after the first forward of a step. The second micro-batch would find
    # those of the first, had they been reduced; the third one finds those of the step before.
    assert model.has_gradients == [False, False, True, False]


def evaluation_leaves_inference_mode(root: Path) -> None:
    """As on CUDA: Lightning leaves inference mode by itself only where the backend is gloo."""
    stand_in = types.SimpleNamespace(get_backend=lambda: "nccl")
    real, loops.dist = loops.dist, stand_in
    try:
        model = make_model(Looks)
        trainer = make_trainer("vescale_fsdp", root, max_steps=2)
        trainer.validate(model, loader(), verbose=False)
        trainer.fit(model, loader(), loader())
        trainer.test(model, loader(), verbose=False)
        trainer.predict(model, loader())
        assert len(model.losses) == 2
        assert len(model.inference) > 6
        assert not any(model.inference)
        plain = make_model(Looks)
        make_trainer("ddp", root, max_steps=2).validate(plain, loader(), verbose=False)
        assert all(plain.inference)  # what happens without us
    finally:
        loops.dist = real


class Normed(LitModel):
    """Has running statistics, which are those of a process's own batches."""

    def __init__(self) -> None:
        super().__init__()
        self.statistics = nn.BatchNorm1d(WIDTH)
        self.found: list[torch.Tensor] = []

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = self.statistics(block(x).transpose(1, 2)).transpose(1, 2)
        return self.head(self.norm(x))

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        self.found += [self.loss(batch).detach(), self.statistics.running_var.clone()]


def buffers_beside_ddp(root: Path) -> None:
    options = {"accumulate_grad_batches": 2, "val_check_interval": 4, "num_sanity_val_steps": 1}
    found = []
    off = VeScaleFSDPStrategy(broadcast_buffers=False)
    for strategy in ("ddp", "vescale_fsdp", off):
        model = make_model(Normed)
        losses = fit(strategy, root, model, **options)[0]
        found.append(
            (losses, [each.tolist() for each in model.found], str(model.statistics.running_mean))
        )
    assert found[1] == found[0]
    assert (found[2] == found[0]) == (dist.get_rank() == 0)


class NormedByHand(Normed):
    """With manual optimization, for which Lightning's DDP sends no buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()


def buffers_by_hand_beside_ddp(root: Path) -> None:
    """The statistics of the first process on all, from the second forward on; DDP: each its own."""
    found = []
    for strategy in ("ddp", "vescale_fsdp"):
        model = make_model(NormedByHand)
        trainer = make_trainer(strategy, root, max_steps=3)
        trainer.fit(model, loader(), loader())
        own = model.statistics.running_mean.detach().clone()
        first = own.clone()
        dist.broadcast(first, 0)
        found.append((own, first))
    (of_ddp, first_of_ddp), (ours, first_of_ours) = found
    assert torch.equal(first_of_ddp, first_of_ours)
    assert torch.equal(of_ddp, ours) == (dist.get_rank() == 0)


class Overflows(LitModel):
    """Its second step has gradients that are not finite, in the last process only."""

    def on_after_backward(self) -> None:
        super().on_after_backward()
        if len(self.losses) == 2 and dist.get_rank() == dist.get_world_size() - 1:
            grad = next(p.grad for p in self.parameters() if p.grad is not None)
            local = grad.to_local() if isinstance(grad, RaggedTensor) else grad
            local.fill_(float("inf"))


def a_scaler_skips_as_one(root: Path) -> None:
    """``16-mixed`` as on CUDA; the plug-in says that it is there while it is checked."""
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    plugin = MixedPrecision("16-mixed", "cuda", scaler)
    trainer = make_trainer("vescale_fsdp", root, plugins=[plugin], max_steps=6, gradient_clip_val=1)
    plugin.device = "cpu"
    model = make_model(Overflows)
    trainer.fit(model, loader(), loader())
    assert scaler.get_scale() == 128.0
    assert trainer.optimizers[0].state[next(model.parameters())]["step"] == 5
    assert {param.dtype for param in model.parameters()} == {torch.float32}
    plain = fit("vescale_fsdp", root)[0]
    assert model.losses[:2] == pytest.approx(plain[:2], abs=0.02)
    assert model.losses != plain


def numbers(root: Path) -> None:
    a_scaler_skips_as_one(root)
    gan_beside_ddp(root)
    value_clipping_beside_ddp(root)
    accumulation_does_not_reduce(root)
    evaluation_leaves_inference_mode(root)
    buffers_beside_ddp(root)
    buffers_by_hand_beside_ddp(root)


def test_manual_optimization_clipping_accumulation_and_evaluation(tmp_path: Path) -> None:
    run_ranks(numbers, 2, tmp_path, timeout_s=100)


# Meshes


class Cut(LitModel):
    def configure_model(self) -> None:
        assert self.device_mesh is not None
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        for block in self.blocks:
            if not isinstance(block, FSDPModule):
                parallelize_module(block, self.device_mesh["tensor_parallel"], plan)


class Ticks(Throughput):
    """Its clock goes on by a second whenever it is read."""

    seconds = 0.0

    def _now(self, trainer: Any) -> float:
        self.seconds += 1
        return self.seconds


def meshes(root: Path) -> None:
    expected = fit("ddp", root)
    model = make_model()
    assert_equal(fit(VeScaleFSDPStrategy(device_mesh=(2, 2)), root, model), expected, atol=2e-5)
    assert next(model.parameters()).device_mesh.mesh_dim_names == ("replicate", "shard")

    # Two groups of two processes: those of a group get the same data.
    model = make_model(Cut)
    strategy = VeScaleFSDPStrategy(tensor_parallel_size=2)
    ticking = Ticks(tokens_of=lambda batch: 1, every_n_steps=1, skip_steps=0)
    trainer = make_trainer(
        strategy, root, max_steps=6, limit_val_batches=0, log_every_n_steps=1, callbacks=[ticking]
    )
    trainer.fit(model, loader(), loader())
    assert trainer.strategy.distributed_sampler_kwargs == {
        "num_replicas": 2,
        "rank": dist.get_rank() // 2,
    }
    assert trainer.progress_bar_metrics["tokens_per_s"] == 2  # one of each group
    losses: list[list[float]] = [[] for _ in range(4)]
    dist.all_gather_object(losses, model.losses)
    assert losses[0] == losses[1] != losses[2] == losses[3]
    sizes = {1: (4,), 2: (2, 2), 4: (1, 4)}
    for size, shape in sizes.items():
        options = VeScaleFSDPStrategy(tensor_parallel_size=size).options
        mesh = options.make_mesh("cpu", 4)
        names = ("data_parallel", "tensor_parallel")[: len(shape)]
        assert (mesh.shape, mesh.mesh_dim_names) == (shape, names)
    with pytest.raises(ValueError, match="is for 3 processes, and there are 4"):
        fit(VeScaleFSDPStrategy(device_mesh=(3, 1)), root)
    return losses


def two_processes(root: Path) -> list[list[float]]:
    losses: list[list[float]] = [[], []]
    dist.all_gather_object(losses, fit("ddp", root)[0])
    return losses


def test_replicas_of_shards_and_tensor_parallelism(tmp_path: Path) -> None:
    of_four = run_ranks(meshes, 4, tmp_path, timeout_s=100)[0]
    of_two = run_ranks(two_processes, 2, tmp_path)[0]
    assert of_four[0] == pytest.approx(of_two[0], abs=1e-5)
    assert of_four[2] == pytest.approx(of_two[1], abs=1e-5)


# Without processes


def test_the_mesh_is_there_when_processes_are() -> None:
    with pytest.raises(
        RuntimeError, match=r"exists only after torch\.distributed has been started"
    ):
        _ = VeScaleFSDPStrategy().device_mesh


def test_the_timeout_is_that_of_the_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def init(*_: Any, **options: Any) -> None:
        asked.update(options)
        raise InterruptedError

    monkeypatch.setattr(dist, "init_process_group", init)
    strategy = VeScaleFSDPStrategy(timeout=timedelta(seconds=30))
    options: dict[str, Any] = {"accelerator": "cpu", "devices": 1, "logger": False}
    options |= {"enable_checkpointing": False, "max_epochs": 1, "strategy": strategy}
    with pytest.raises(InterruptedError):
        pl.Trainer(**options).fit(make_model(), loader(), loader())
    assert asked["timeout"] == timedelta(seconds=30)


# Refusals


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"state_dict_type": "local"}, '"sharded", "full", "dcp"'),
        ({"unused": "find"}, '"auto", "zeros"'),
        ({"wrap": "layers"}, '"blocks", "none", a list of classes'),
        ({"granularity": "row:3"}, "elements:256, rows:128, tile:32x32 or whole"),
        ({"granularity": 32}, "a Granularity, a policy"),
        ({"device_mesh": (2, 2, 2)}, r"\(replicas, shards\) as two ints"),
        ({"cpu_offload": "yes"}, "True or False"),
        ({"broadcast_buffers": "yes"}, "True or False"),
        ({"timeout": 0}, "a number of seconds"),
        ({"timeout": True}, "a number of seconds"),
        ({"activation_checkpointing": "blocks"}, "a list of classes or names"),
        ({"tensor_parallel_size": 0}, "an int of at least 1"),
        ({"expert_parallel_size": 0}, "an int of at least 1"),
        (
            {"expert_parallel_size": 3, "tensor_parallel_size": 2},
            "must be a multiple of tensor_parallel_size=2",
        ),
        ({"mp_policy": "bf16"}, "a MixedPrecisionPolicy"),
        ({"reshard_after_forward": "yes"}, "True, False, None"),
        ({"async_save": True, "state_dict_type": "full"}, 'only "sharded"'),
        (
            {"gather_codec": "int4"},
            r"dtype must be 'int8' or 'e4m3'.*\"int8\", \"e4m3\", a mapping",
        ),
        ({"gather_codec": {"blocks": 32}}, "a mapping of dtype and block"),
        ({"gather_codec": {"block": [0, 1]}}, r"block must be a positive int.*accepted are"),
        ({"gather_codec": QuantizedReduce()}, "a QuantizedGather"),
        ({"reduce_codec": "e4m3"}, '"int8", a mapping of block and error_feedback'),
        ({"reduce_codec": {"error_feedback": "yes"}}, '"error_feedback": True'),
    ],
)
def test_a_wrong_value_is_refused_with_the_accepted_ones(
    option: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message) as error:
        VeScaleFSDPStrategy(**option)
    assert next(iter(option)) in str(error.value)


def test_half_precision_with_a_scaler_on_cpu() -> None:
    """Lightning replaces the string before the strategy sees it; a plug-in it hands on."""
    options: dict[str, Any] = {"accelerator": "cpu", "devices": 1, "logger": False}
    with pytest.warns(UserWarning, match="AMP with fp16 is not supported on CPU"):
        replaced = pl.Trainer(strategy="vescale_fsdp", precision="16-mixed", **options)
    assert replaced.precision == "bf16-mixed"
    plugin = MixedPrecision("16-mixed", "cpu")
    with pytest.raises(ValueError, match=r"16-mixed.*accelerator=\"cpu\".*bf16-mixed"):
        pl.Trainer(strategy="vescale_fsdp", plugins=[plugin], **options)
