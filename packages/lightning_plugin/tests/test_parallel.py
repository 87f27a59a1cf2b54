"""Tensor and expert parallelism of ``transformers`` models, compared with one process."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM
from transformers.distributed.expert_parallel import apply_expert_parallelism

from vescale_fsdp import clip_grad_norm_
from vescale_fsdp.testing import run_ranks
from vescale_fsdp_lightning import VeScaleFabricStrategy, VeScaleFSDPStrategy, grad_norm

from .lit import full_parameters, make_trainer

SIZES = {
    "vocab_size": 33,  # not a multiple of two ranks
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16,
}
MAX_NORM = 0.5
ROWS = 4  # of one step, of all processes together
ATTENTION = {
    "self_attn.q_proj": ColwiseParallel(),
    "self_attn.k_proj": ColwiseParallel(),
    "self_attn.v_proj": ColwiseParallel(),
    "self_attn.o_proj": RowwiseParallel(),
}
MLP = {
    "mlp.gate_proj": ColwiseParallel(),
    "mlp.up_proj": ColwiseParallel(),
    "mlp.down_proj": RowwiseParallel(),
}
VOCABULARY = {
    "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
    "lm_head": ColwiseParallel(output_layouts=Replicate()),
}


def make_net(kind: str) -> Any:
    torch.manual_seed(0)
    if kind == "llama":
        return LlamaForCausalLM(LlamaConfig(**SIZES))
    return MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=4))


def rows() -> torch.Tensor:
    return torch.randint(32, (3 * ROWS, 8), generator=torch.Generator().manual_seed(1))


def loss_of(net: Any, tokens: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = net(input_ids=tokens, labels=tokens, use_cache=False).loss
    return loss


def spread_experts(net: Any, experts: Any, same_batch: Any) -> None:
    plan = {
        name.replace("*", str(layer)): style
        for layer in range(SIZES["num_hidden_layers"])
        for name, style in net.ep_plan.items()
    }
    apply_expert_parallelism(net, experts, same_batch, plan)


class Lit(pl.LightningModule):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.net = kind, make_net(kind)
        self.losses: list[float] = []
        self.norms: list[float] = []

    def configure_model(self) -> None:
        names = () if self.device_mesh is None else self.device_mesh.mesh_dim_names
        is_done = any(isinstance(param, DTensor) for param in self.parameters())
        if is_done or "tensor_parallel" not in (names or ()):
            return
        assert self.device_mesh is not None
        tensor = self.device_mesh["tensor_parallel"]
        if tensor.size() > 1:
            plan = ATTENTION | (MLP if self.kind == "llama" else {})
            for layer in self.net.model.layers:
                parallelize_module(layer, tensor, plan)
            if self.kind == "llama":
                parallelize_module(self.net, tensor, VOCABULARY)
        if self.kind == "mixtral":
            experts = self.trainer.strategy.expert_mesh["expert_parallel"]
            spread_experts(self.net, experts, tensor)

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss = loss_of(self.net, batch[0])
        losses = [torch.zeros(()) for _ in range(dist.get_world_size())]
        dist.all_gather(losses, loss.detach())
        self.losses.append(torch.stack(losses).mean().item())
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        norms = grad_norm(self, 2)
        self.norms.append(float(norms["grad_2.0_norm_total"]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


Trained = tuple[list[float], list[float], dict[str, torch.Tensor]]


def train_alone(kind: str, steps: int) -> Trained:
    net = make_net(kind)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    losses, norms = [], []
    for tokens in [*rows().split(ROWS), *rows().split(ROWS)][:steps]:
        loss = loss_of(net, tokens)
        loss.backward()
        norms.append(clip_grad_norm_(net.parameters(), MAX_NORM).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, norms, {f"net.{name}": param for name, param in full_parameters(net).items()}


def fit(strategy: Any, root: Path, kind: str, steps: int, resume: Any = None) -> Any:
    """Trains; ``steps`` counts those before a resume, too."""
    trainer = make_trainer(
        strategy, root, max_steps=steps, gradient_clip_val=MAX_NORM, limit_val_batches=0
    )
    lit = Lit(kind)
    options = getattr(trainer.strategy, "options", None)  # of DDP: none
    tensor = 1 if options is None else options.tensor_parallel_size
    num_batches = dist.get_world_size() // tensor
    part: dict[str, Any] = {"num_replicas": num_batches, "rank": dist.get_rank() // tensor}
    dataset = TensorDataset(rows())
    sampler = DistributedSampler(dataset, shuffle=False, **part)
    trainer.fit(lit, DataLoader(dataset, ROWS // num_batches, sampler=sampler), ckpt_path=resume)
    if options is not None:  # the arguments of the sampler that it adds
        assert trainer.strategy.distributed_sampler_kwargs == part
    return trainer, lit


def assert_equal(lit: Any, expected: Trained, last: int) -> None:
    assert lit.losses == pytest.approx(expected[0][-last:], abs=1e-5)
    assert lit.norms == pytest.approx(expected[1][-last:], abs=1e-5)
    found = full_parameters(lit)
    assert found.keys() == expected[2].keys()
    for name, param in expected[2].items():
        torch.testing.assert_close(found[name], param, rtol=0, atol=3e-5, msg=name)


def assert_loaded(lit: Any, expected: Trained) -> None:
    """The first step after loading has the loss and the norm of one process at that step."""
    assert lit.losses == pytest.approx(expected[0][-1:], abs=1e-5)
    assert lit.norms == pytest.approx(expected[1][-1:], abs=1e-5)


CASES: dict[str, tuple[str, dict[str, Any], Any]] = {
    # kind, arguments of the strategy, mesh of a parameter that is parallelized
    "llama": ("llama", {"tensor_parallel_size": 2}, ("data_parallel", "tensor_parallel")),
    "experts": ("mixtral", {"expert_parallel_size": 2}, ("expert_data", "expert_parallel")),
    "both": (
        "mixtral",
        {"tensor_parallel_size": 2, "expert_parallel_size": 2},
        ("expert_data", "expert_parallel"),
    ),
    "replicas": (
        "mixtral",
        {"expert_parallel_size": 2, "device_mesh": (2, 2)},
        ("replicate", "expert_data", "expert_parallel"),
    ),
}
PARALLELIZED = {"llama": "mlp.up_proj.weight", "mixtral": "mlp.experts.down_proj"}


def train_and_save(root: Path) -> None:
    expected = {kind: train_alone(kind, 3) for kind in PARALLELIZED}
    expected_later = {kind: train_alone(kind, 4) for kind in PARALLELIZED}
    for name, (kind, arguments, axes) in CASES.items():
        trainer, lit = fit(VeScaleFSDPStrategy(**arguments), root, kind, 3)
        assert_equal(lit, expected[kind], 3)
        param = lit.net.get_parameter(f"model.layers.0.{PARALLELIZED[kind]}")
        assert param.device_mesh.mesh_dim_names == axes
        if name not in ("llama", "experts"):
            continue
        for state_dict_type in ("sharded", "full", "dcp"):
            place = root / f"{name}-{state_dict_type}"
            trainer.strategy._checkpoints.options.__dict__["state_dict_type"] = state_dict_type
            trainer.save_checkpoint(place)
        resumed = fit(VeScaleFSDPStrategy(**arguments), root, kind, 4, root / f"{name}-sharded")[1]
        assert_loaded(resumed, expected_later[kind])


def resume_on_two(root: Path) -> None:
    for name in ("llama", "experts"):
        kind = CASES[name][0]
        fit("ddp", root, kind, 3)[0].save_checkpoint(root / f"{name}-ddp")
        expected = fit("ddp", root, kind, 5, root / f"{name}-ddp")[1]  # Lightning's own resume
        for state_dict_type in ("sharded", "full", "dcp"):
            lit = fit(VeScaleFSDPStrategy(), root, kind, 5, root / f"{name}-{state_dict_type}")[1]
            assert lit.losses == pytest.approx(expected.losses, abs=1e-5)  # also the states
            assert lit.norms == pytest.approx(expected.norms, abs=1e-5)


def test_it_trains_as_one_process_and_its_checkpoints_load_on_other_sizes(tmp_path: Path) -> None:
    run_ranks(train_and_save, 4, tmp_path, timeout_s=180)
    run_ranks(resume_on_two, 2, tmp_path, timeout_s=120)


class Mixed(Lit):
    """Has an expert's parameter beside another one."""

    def configure_model(self) -> None:
        super().configure_model()
        experts = self.trainer.strategy.expert_mesh["expert_parallel"]
        own = distribute_tensor(torch.ones(4), experts)
        self.net.model.layers[0].mlp.own = torch.nn.Parameter(own)


class Whole(Lit):
    def configure_model(self) -> None:
        """Shard nothing."""


def with_fabric_and_refused(root: Path) -> None:
    expected = train_alone("mixtral", 2)
    strategy = VeScaleFabricStrategy(expert_parallel_size=4)
    with pytest.raises(RuntimeError, match="expert_mesh exists only with expert_parallel_size"):
        _ = strategy.expert_mesh
    # Else Fabric would start processes of its own.
    os.environ.update(LOCAL_RANK=str(dist.get_rank()), NODE_RANK="0", WORLD_SIZE="4")
    fabric = Fabric(strategy=strategy, accelerator="cpu", devices=4)
    fabric.launch()
    net = make_net("mixtral")
    mesh = strategy.expert_mesh["expert_parallel"]
    spread_experts(net, mesh, strategy.device_mesh["tensor_parallel"])
    net = fabric.setup_module(net)
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(net.parameters(), lr=1e-2))
    for step, tokens in enumerate(rows().split(ROWS)[:2]):
        fabric.backward(loss_of(net, tokens[dist.get_rank() :][:1]))
        norm = fabric.clip_gradients(net, optimizer, max_norm=MAX_NORM)
        assert norm.item() == pytest.approx(expected[1][step], abs=1e-5)
        optimizer.step()
        optimizer.zero_grad()
    for name, param in full_parameters(net.module).items():
        torch.testing.assert_close(param, expected[2][f"net.{name}"], rtol=0, atol=3e-5, msg=name)

    refusals: list[tuple[Any, dict[str, Any], str]] = [
        (Lit, {"expert_parallel_size": 3}, "must divide the 4 processes of a replica"),
        (
            Lit,
            {"expert_parallel_size": 4, "device_mesh": (2, 2)},
            r"must divide the 2 processes of a replica \(4 processes, 2 replicas\)",
        ),
        (Mixed, {"expert_parallel_size": 2}, "mlp has parameters of experts, on the axis"),
        (Whole, {"expert_parallel_size": 2}, "no parameter is a DTensor over expert_mesh"),
    ]
    for cls, arguments, message in refusals:
        trainer = make_trainer(VeScaleFSDPStrategy(**arguments), root, max_steps=1)
        data = DataLoader(TensorDataset(rows()), batch_size=1)
        with pytest.raises(ValueError, match=message):
            trainer.fit(cls("mixtral"), data)


def test_experts_with_fabric_and_what_is_refused(tmp_path: Path) -> None:
    run_ranks(with_fabric_and_refused, 4, tmp_path, timeout_s=120)
