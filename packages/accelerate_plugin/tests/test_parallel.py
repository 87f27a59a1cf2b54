"""Tensor and expert parallelism with sharding, compared with one process on all rows."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate.utils import ParallelismConfig
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from transformers import MixtralConfig, MixtralForCausalLM

from vescale_fsdp.testing import run_ranks
from vescale_fsdp_accelerate import VeScaleFSDPPlugin

from .helpers import accelerator, full, make_model
from .parallel_models import (
    MAX_NORM,
    SIZES,
    Trained,
    loader,
    loss_of,
    make_llama,
    make_mixtral,
    make_optimizer,
    tokens_of_all,
    train_alone,
)


def two_by_two() -> ParallelismConfig:
    return ParallelismConfig(tp_size=2, dp_shard_size=2)


def train(acc: Any, model: Any, num_batches: int) -> tuple[Trained, Any, Any]:
    """Losses are the means over all rows."""
    optimizer: Any = make_optimizer(model)  # before the model is sharded, as scripts make it
    model, optimizer, batches = acc.prepare(model, optimizer, loader(num_batches))
    losses, norms = [], []
    for (tokens,) in batches:
        loss = loss_of(model, tokens)
        acc.backward(loss)
        norms.append(acc.clip_grad_norm_(model.parameters(), MAX_NORM).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(acc.gather(loss.detach().view(1)).mean().item())
    params = {name: full(param) for name, param in model.named_parameters()}
    return (losses, norms, params), model, optimizer


def assert_equal(found: Trained, expected: Trained) -> None:
    assert found[0] == pytest.approx(expected[0], abs=1e-5)
    assert found[1] == pytest.approx(expected[1], abs=1e-5)
    assert found[2].keys() == expected[2].keys()
    for name, param in expected[2].items():
        torch.testing.assert_close(found[2][name], param, rtol=0, atol=2e-5, msg=name)


def shapes_of(model: Any, *names: str) -> dict[str, Any]:
    found = {}
    for name in names:
        param = model.get_parameter(name)
        found[name] = param.device_mesh.mesh_dim_names, param.device_mesh.shape
    return found


def llama(folder: Path) -> None:
    expected = train_alone(make_llama())
    with accelerator(parallelism_config=two_by_two()) as acc:
        # Weights of the other processes are replaced by those of the first.
        found, model, optimizer = train(acc, make_llama(seed=dist.get_rank()), 2)
        assert_equal(found, expected)
        q, norm = "model.layers.0.self_attn.q_proj.weight", "model.norm.weight"
        assert shapes_of(model, q, norm) == {
            q: (("dp_shard", "tp"), (2, 2)),
            norm: (("dp_shard",), (2,)),
        }
        whole = acc.get_state_dict(model)
        assert set(whole) == (set(expected[2]) if acc.is_main_process else set())
        for name, value in whole.items():
            torch.testing.assert_close(value, found[2][name], rtol=0, atol=0, msg=name)
        for kind, sealed in (("SHARDED", False), ("FULL", False), ("SHARDED", True)):
            acc.state.fsdp_plugin.set_state_dict_type(f"{kind}_STATE_DICT")
            acc.state.fsdp_plugin.sealed = sealed
            place = folder / f"{kind}{sealed}"
            acc.save_state(place)
            with torch.no_grad():
                for param in model.parameters():
                    param.zero_()
            states = copy.deepcopy(optimizer.optimizer.state_dict()["state"])
            for state in optimizer.optimizer.state.values():
                state["exp_avg"].zero_()
            acc.load_state(place)
            for name, param in model.named_parameters():
                assert torch.equal(full(param), found[2][name]), (kind, name)
            for index, state in optimizer.optimizer.state_dict()["state"].items():
                for key, value in state.items():
                    assert torch.equal(full(value), full(states[index][key])), (kind, index, key)


def tied_llama() -> None:
    expected = train_alone(make_llama(tied=True))
    with accelerator(parallelism_config=two_by_two()) as acc:
        found, model, _ = train(acc, make_llama(tied=True), 2)
        assert_equal(found, expected)
        assert model.lm_head.weight is model.model.embed_tokens.weight


def parallelized_by_the_script() -> None:
    expected = train_alone(make_llama())
    with accelerator(parallelism_config=two_by_two()) as acc:
        model = make_llama()
        plan = {
            "self_attn.q_proj": ColwiseParallel(),
            "self_attn.k_proj": ColwiseParallel(),
            "self_attn.v_proj": ColwiseParallel(),
            "self_attn.o_proj": RowwiseParallel(),
            "mlp.gate_proj": ColwiseParallel(),
            "mlp.up_proj": ColwiseParallel(),
            "mlp.down_proj": RowwiseParallel(),
        }
        for layer in model.model.layers:
            parallelize_module(layer, acc.torch_device_mesh["tp"], plan)
        if dist.get_rank() >= 2:  # the second data-parallel rank
            with torch.no_grad():
                for param in model.parameters():
                    param.add_(1)
        found, model, _ = train(acc, model, 2)
        assert_equal(found, expected)


def llamas(folder: Path) -> None:
    llama(folder)
    tied_llama()
    parallelized_by_the_script()


def mixtrals(folder: Path) -> None:
    gate, down = "model.layers.0.mlp.gate.weight", "model.layers.0.mlp.experts.down_proj"
    expected = train_alone(make_mixtral())
    cases: list[tuple[Any, Any, Any, Any]] = [
        # plug-in's options, parallelism config, mesh of the router, mesh of experts
        ({"ep_size": 2}, None, (("shard",), (4,)), (("efsdp", "ep"), (2, 2))),
        ({"ep_size": 4}, None, (("shard",), (4,)), (("efsdp", "ep"), (1, 4))),
        ({"ep_size": 2}, two_by_two(), (("dp_shard",), (2,)), (("efsdp", "ep"), (2, 2))),
        (
            {"ep_size": 2, "replicas": 2},
            None,
            (("replicate", "shard"), (2, 2)),
            (("dp_replicate", "efsdp", "ep"), (2, 1, 2)),
        ),
    ]
    for index, (options, config, of_router, of_experts) in enumerate(cases):
        plugin = VeScaleFSDPPlugin(**options)
        with accelerator(fsdp_plugin=plugin, parallelism_config=config) as acc:
            num_batches = 4 if config is None else 2
            found, model, _ = train(acc, make_mixtral(seed=dist.get_rank()), num_batches)
            assert_equal(found, expected)
            assert shapes_of(model, gate, down) == {gate: of_router, down: of_experts}
            if index == 0:
                acc.save_state(folder)
                with torch.no_grad():
                    for param in model.parameters():
                        param.zero_()
                acc.load_state(folder)
                for name, param in model.named_parameters():
                    assert torch.equal(full(param), found[2][name]), name


def load_elsewhere(folder: Path, kind: str) -> list[float]:
    """Losses after loading into an accelerator without any parallelism config."""
    make = make_mixtral if kind == "mixtral" else make_llama
    with accelerator() as acc:
        model: Any = make(seed=7)
        model, optimizer = acc.prepare(model, make_optimizer(model))
        acc.load_state(folder)
        losses = []
        for _ in range(2):
            loss = loss_of(model, tokens_of_all())
            acc.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses


def go_on_alone(make: Any) -> list[float]:
    model = make()
    optimizer = make_optimizer(model)
    for (tokens,) in loader(1):
        loss_of(model, tokens).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
    losses = []
    for _ in range(2):
        loss = loss_of(model, tokens_of_all())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_llama_trains_as_in_one_process_and_its_checkpoint_loads_elsewhere(tmp_path: Path) -> None:
    run_ranks(llamas, 4, tmp_path, timeout_s=120)
    expected = go_on_alone(make_llama)
    for name in ("SHARDEDFalse", "FULLFalse", "SHARDEDTrue"):
        for losses in run_ranks(load_elsewhere, 2, tmp_path / name, "llama"):
            assert losses == pytest.approx(expected, abs=2e-5)


def test_mixtral_trains_as_in_one_process_and_its_checkpoint_loads_elsewhere(
    tmp_path: Path,
) -> None:
    run_ranks(mixtrals, 4, tmp_path, timeout_s=120)
    expected = go_on_alone(make_mixtral)
    for losses in run_ranks(load_elsewhere, 2, tmp_path, "mixtral"):
        assert losses == pytest.approx(expected, abs=2e-5)


def refused() -> None:
    two_dp = ParallelismConfig(dp_shard_size=2, tp_size=2)
    refusals: list[tuple[Any, Any, str]] = [
        ({}, ParallelismConfig(cp_size=2, dp_shard_size=2), "cp_size=2 .*ring attention"),
        ({}, ParallelismConfig(sp_size=2, dp_shard_size=2), "sp_size=2 .*DeepSpeed's"),
        ({}, ParallelismConfig(tp_size=4), "tp_size=4 leaves nothing to shard over"),
        ({"ep_size": 3}, None, "ep_size: 3 must be a multiple of tp_size .* divide the 4"),
        ({"ep_size": 4, "replicas": 2}, None, "divide the 2 processes of a replica"),
        ({"sharding": "hsdp_zero1"}, two_dp, "hsdp_zero1 does not work with tensor or expert"),
    ]
    for options, config, message in refusals:
        plugin = VeScaleFSDPPlugin(**options)
        with (
            pytest.raises(ValueError, match=message),
            accelerator(fsdp_plugin=plugin, parallelism_config=config),
        ):
            pass
    with accelerator(parallelism_config=two_dp) as acc:
        with pytest.raises(ValueError, match="Model has no plan for tensor parallelism"):
            acc.prepare(make_model())
        with pytest.raises(ValueError, match=r"two halves \(packed\).*fsdp_vescale_ep_size: 2"):
            acc.prepare(make_mixtral())
        with pytest.raises(ValueError, match="there is no mesh of experts"):
            _ = acc.expert_mesh
        model = make_llama()
        model.config.num_key_value_heads = 3
        with pytest.raises(ValueError, match="does not divide num_key_value_heads=3"):
            acc.prepare(model)
        model, weight = make_llama(), "model.norm.weight"
        other = torch.distributed.init_device_mesh("cpu", (4,), mesh_dim_names=("all",))
        norm = distribute_tensor(model.get_parameter(weight).data, other)
        model.model.norm.weight = torch.nn.Parameter(norm)
        with pytest.raises(ValueError, match=f"{weight} is a DTensor on .*torch_device_mesh"):
            acc.prepare(model)
    with accelerator(fsdp_plugin=VeScaleFSDPPlugin(ep_size=4)) as acc:
        with pytest.raises(ValueError, match="LlamaForCausalLM has no plan for expert"):
            acc.prepare(make_llama())
        config = MixtralConfig(**SIZES, num_local_experts=2)
        with pytest.raises(ValueError, match=r"ep_size=4 does not divide the 2 experts of model\."):
            acc.prepare(MixtralForCausalLM(config))
        model = make_mixtral()
        assert acc.expert_mesh.mesh_dim_names[:2] == ("efsdp", "ep")
        mesh = acc.expert_mesh["ep"]
        layer = model.model.layers[0].mlp
        layer.extra = torch.nn.Parameter(torch.ones(2))
        layer.own = torch.nn.Parameter(distribute_tensor(torch.ones(4), mesh))
        assert isinstance(layer.own.data, DTensor)
        with pytest.raises(ValueError, match=r"mlp has parameters of experts.* of their own"):
            acc.prepare(model)


def test_what_cannot_be_done_is_refused_by_name() -> None:
    run_ranks(refused, 4)
