"""OptimizerGroup: several optimizers do together what each does alone, and look like one."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR

from vescale_fsdp import Granularity, checkpoint, combine, fully_shard
from vescale_fsdp.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from vescale_fsdp.optim import AdamW8bit, OptimizerGroup, split_named_params
from vescale_fsdp.testing import run_ranks


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(2))
        self.head = nn.Linear(64, 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return self.head(x)


def make_net(granularity: int | None = None) -> nn.Module:
    torch.manual_seed(0)
    net = Net()
    if granularity is not None:
        policy = combine(AdamW8bit.granularity(), Granularity.elements(granularity))
        fully_shard(net.layers[0], granularity=policy)
        fully_shard(net, granularity=policy)
    return net


def make_members(net: nn.Module) -> dict[str, Optimizer]:
    """One of ours, and one of torch's with two groups."""
    hidden, rest = split_named_params(net)
    groups: list[dict[str, Any]] = [
        {"params": [each for each in rest if each[1].dim() > 1], "weight_decay": 0.1},
        {"params": [each for each in rest if each[1].dim() == 1]},
    ]
    return {"hidden": AdamW8bit(hidden, lr=0.1), "rest": SGD(groups, lr=0.05, momentum=0.9)}


def make_group(net: nn.Module) -> OptimizerGroup:
    return OptimizerGroup(make_members(net))


def backward(net: nn.Module, step: int) -> Tensor:
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(step))
    loss: Tensor = net(x).square().mean()
    loss.backward()
    return loss


def train(net: nn.Module, *optimizers: Optimizer, steps: range = range(3)) -> None:
    for number in steps:
        for optimizer in optimizers:
            optimizer.zero_grad()
        backward(net, number)
        for optimizer in optimizers:
            optimizer.step()


def assert_same(net: nn.Module, other: nn.Module) -> None:
    for (name, param), expected in zip(net.named_parameters(), other.parameters(), strict=True):
        pair = (p.full_tensor() if isinstance(p, DTensor) else p for p in (param, expected))
        assert torch.equal(*pair), name


def test_a_step_is_one_of_each_member() -> None:
    together, apart = make_net(), make_net()
    train(together, make_group(together))
    train(apart, *make_members(apart).values())
    assert_same(together, apart)


def test_the_closure_is_called_once_and_hooks_run_once() -> None:
    net = make_net()
    group = make_group(net)
    seen: list[Any] = []
    group.register_step_pre_hook(lambda *_: seen.append("pre"))
    group.register_step_post_hook(lambda *_: seen.append("post"))
    group.optimizers["rest"].register_step_post_hook(lambda *_: seen.append("member"))

    def closure() -> Tensor:
        seen.append(torch.is_grad_enabled())
        group.zero_grad()
        return backward(net, 0)

    with torch.no_grad():
        loss = group.step(closure)  # type: ignore[type-var, call-overload]
    assert isinstance(loss, Tensor)
    assert seen == ["pre", True, "member", "post"]


def test_groups_and_states_are_those_of_the_members() -> None:
    net = make_net()
    group = make_group(net)
    assert isinstance(group, Optimizer)
    members = [each for name in ("hidden", "rest") for each in group.optimizers[name].param_groups]
    assert len(group.param_groups) == 3
    assert all(one is other for one, other in zip(group.param_groups, members, strict=True))
    train(net, group)
    assert set(group.state) == set(net.parameters())
    assert len(group.state) == 6
    bias, weight = net.head.bias, net.layers[0].weight
    assert group.state[bias] is group.optimizers["rest"].state[bias]
    assert set(group.state[weight]) >= {"exp_avg", "exp_avg_scale"}
    group.state[bias] = {"momentum_buffer": torch.ones(3)}
    assert group.optimizers["rest"].state[bias]["momentum_buffer"].sum() == 3
    del group.state[bias]
    assert bias not in group.state
    assert group.state[bias] == {}  # as torch's: a state comes into being when it is asked for
    # Of the options that not both have there is no default.
    assert group.defaults["maximize"] is False
    assert "momentum" not in group.defaults
    group.zero_grad(set_to_none=False)
    assert all(int(param.grad.count_nonzero()) == 0 for param in net.parameters())


def test_schedulers_set_the_members_learning_rates() -> None:
    net = make_net()
    group = make_group(net)
    scheduler = LambdaLR(group, lambda step: 1 / (1 + step))
    train(net, group, steps=range(1))
    scheduler.step()
    rates = [g["lr"] for each in group.optimizers.values() for g in each.param_groups]
    assert rates == [0.05, 0.025, 0.025]
    with pytest.raises(ValueError, match="optimizer must support momentum"):
        OneCycleLR(group, max_lr=0.1, total_steps=5)


def test_a_gradient_scaler_skips_all_members() -> None:
    net = make_net()
    group = make_group(net)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    before = [param.detach().clone() for param in net.parameters()]
    for bad in (True, False):
        group.zero_grad()
        scaler.scale(net(torch.ones(2, 64)).sum()).backward()
        if bad:
            net.head.bias.grad.fill_(torch.inf)
        scaler.step(group)
        scaler.update()
        moved = [not torch.equal(p, q) for p, q in zip(net.parameters(), before, strict=True)]
        assert moved == [not bad] * 6


def test_state_dicts_go_to_a_group_and_survive_copies() -> None:
    net = make_net()
    group = make_group(net)
    train(net, group)
    other = make_net()
    other.load_state_dict(net.state_dict())
    loaded = make_group(other)
    loaded.load_state_dict(copy.deepcopy(group.state_dict()))
    twin = copy.deepcopy((net, group))
    unpickled = pickle.loads(pickle.dumps((net, group)))
    more = range(3, 5)
    train(net, group, steps=more)
    for its_net, its_group in ((other, loaded), twin, unpickled):
        train(its_net, its_group, steps=more)
        assert_same(its_net, net)
    assert [g["lr"] for g in loaded.param_groups] == [0.1, 0.05, 0.05]
    numbers = [number for g in group.state_dict()["param_groups"] for number in g["params"]]
    assert numbers == list(range(6))


def test_hooks_of_state_dicts_run() -> None:
    net = make_net()
    group = make_group(net)
    train(net, group)
    seen: list[str] = []
    group.register_state_dict_pre_hook(lambda _: seen.append("saving"))
    group.register_state_dict_post_hook(lambda _, saved: {**saved, "more": 1})
    group.register_load_state_dict_pre_hook(lambda _, saved: seen.append("loading"))
    group.register_load_state_dict_post_hook(lambda _: seen.append("loaded"))
    saved = group.state_dict()
    assert saved["more"] == 1
    group.load_state_dict(saved)
    assert seen == ["saving", "loading", "loaded"]


def test_mistakes_are_named() -> None:
    net = make_net()
    named = list(net.named_parameters())
    with pytest.raises(ValueError, match="got no optimizer"):
        OptimizerGroup()
    with pytest.raises(TypeError, match=r"'x' is Net, expected a torch\.optim\.Optimizer"):
        OptimizerGroup(x=net)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"OptimizerGroup got SGD, expected .* names or keywords"):
        OptimizerGroup(SGD(net.parameters()))  # type: ignore[arg-type]
    message = r"'layers.0.bias' of shape \(64,\), in group 0 of 'b', is in 'a' already"
    with pytest.raises(ValueError, match=message):
        OptimizerGroup(a=SGD(net.parameters()), b=AdamW(named[1:2]))
    group = OptimizerGroup([SGD(named[:1]), SGD(named[1:])])
    assert list(group.optimizers) == ["0", "1"]
    with pytest.raises(ValueError, match=r"call group.optimizers\[name\].* one of '0', '1'"):
        group.add_param_group({"params": []})
    with pytest.raises(ValueError, match=r"has 1 parameter groups, the OptimizerGroup has 2"):
        group.load_state_dict({"state": {}, "param_groups": [{"params": [0]}]})
    group.optimizers["0"].add_param_group({"params": [("more", nn.Parameter(torch.ones(2)))]})
    assert len(group.param_groups) == 3


def test_a_look_at_states_does_not_change_them() -> None:
    """Torch makes those of an optimizer without any by a step. One of SGD's never has any."""
    net = make_net()
    group = OptimizerGroup([AdamW([net.head.weight]), SGD([net.head.bias], 0.1)])
    backward(net, 0)
    for member in group.optimizers.values():
        member.step()
    for model, each in ((net, group), copy.deepcopy((net, group))):
        each.zero_grad()
        before = copy.deepcopy(list(each.optimizers["0"].state.values()))
        get_optimizer_state_dict(model, each)
        for old, new in zip(before, each.optimizers["0"].state.values(), strict=True):
            assert all(torch.equal(old[key], new[key]) for key in old)


# On ranks, through torch's functions


def save(path: str) -> None:
    net = make_net(1)
    group = make_group(net)
    train(net, group)
    checkpoint.save(path, net, group)

    options = StateDictOptions(full_state_dict=True)
    whole = get_optimizer_state_dict(net, group, options=options)
    plain = make_net()
    with torch.no_grad():
        for param, other in zip(plain.parameters(), net.parameters(), strict=True):
            param.copy_(other.full_tensor())
    single = make_group(plain)
    set_optimizer_state_dict(plain, single, copy.deepcopy(whole))  # torch keeps its tensors
    train(plain, single, steps=range(3, 4))
    again = make_net(1)
    checkpoint.load(path, again)
    loaded = make_group(again)
    set_optimizer_state_dict(again, loaded, whole, options=options)
    train(again, loaded, steps=range(3, 4))
    assert_same(again, plain)


def go_on(path: str, granularity: int) -> None:
    net = make_net(granularity)
    group = make_group(net)
    checkpoint.load(path, net, group)
    train(net, group, steps=range(3, 5))
    expected = make_net()
    train(expected, make_group(expected), steps=range(5))
    assert_same(net, expected)


def test_a_checkpoint_of_a_group_goes_on_elsewhere(tmp_path: Path) -> None:
    path = str(tmp_path / "checkpoint")
    run_ranks(save, 2, path)
    run_ranks(go_on, 1, path, 512)


# In trainers


def test_lightning_takes_it_for_one_optimizer(tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning")

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = make_net()

        def training_step(self, batch: list[Tensor], index: int) -> Tensor:
            return self.net(batch[0]).square().mean()

        def configure_optimizers(self) -> Any:
            group = OptimizerGroup(make_members(self.net))
            return [group], [LambdaLR(group, lambda step: 0.5**step)]

    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x), batch_size=2)
    options = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    options |= {"accelerator": "cpu", "devices": 1, "default_root_dir": tmp_path}
    module = Module()
    trainer = lightning.Trainer(max_epochs=2, enable_checkpointing=False, **options)
    trainer.fit(module, data)
    path = tmp_path / "lightning.ckpt"
    trainer.save_checkpoint(path)
    again = Module()
    resumed = lightning.Trainer(max_epochs=3, enable_checkpointing=False, **options)
    resumed.fit(again, data, ckpt_path=path)
    expected = make_net()
    group = make_group(expected)
    scheduler = LambdaLR(group, lambda step: 0.5**step)
    for _ in range(3):
        for batch in (x[:2], x[2:]):
            group.zero_grad()
            expected(batch).square().mean().backward()
            group.step()
        scheduler.step()
    assert_same(again.net, expected)
