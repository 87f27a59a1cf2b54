"""ShardedOptimizer: states on every rank, state dicts of all kinds, no part taken for the whole."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, init_device_mesh

from vescale_fsdp import RaggedShard, fully_shard
from vescale_fsdp.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from vescale_fsdp.optim.base import (
    Group,
    Params,
    ShardedOptimizer,
    State,
    gradient_of,
    local_of,
    zeros_placed,
)
from vescale_fsdp.ragged import RaggedTensor
from vescale_fsdp.testing import run_ranks


class Momentum(ShardedOptimizer):
    """Gradient descent with momentum in float64, which no parameter has."""

    fixed_options = frozenset({"mu"})

    def __init__(self, params: Params, lr: float = 0.1, mu: float = 0.5) -> None:
        super().__init__(params, {"lr": lr, "mu": mu})

    def check_layout(self, param: Tensor, group: Group, name: str) -> None:
        if param.numel() == 13:
            raise ValueError(f"{name} has an unlucky number of elements")

    def init_state(self, param: Tensor, group: Group) -> State:
        return {"step": torch.tensor(0.0), "buffer": zeros_placed(param, torch.float64)}

    def update(self) -> None:
        for group in self.param_groups:
            for param in self.with_gradient(group):
                state = self.state[param]
                state["step"] += 1
                buffer = local_of(state["buffer"]).mul_(group["mu"]).add_(gradient_of(param))
                local_of(param).sub_(buffer.to(param.dtype), alpha=group["lr"])


def make_net(*, sharded: bool = True) -> nn.Module:
    """With two ranks the second has nothing of the small layer."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 2), nn.Linear(2, 1, bias=False))
    if sharded:
        fully_shard(net)
    return net


def train(net: nn.Module, optimizer: torch.optim.Optimizer, num_steps: int = 2) -> None:
    for step in range(num_steps):
        optimizer.zero_grad()
        x = torch.randn(3, 5, generator=torch.Generator().manual_seed(step))
        net(x).square().mean().backward()
        optimizer.step()


def full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def full_states(net: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [full(optimizer.state[p][key]) for p in net.parameters() for key in ("step", "buffer")]


def assert_same(found: list[Tensor], expected: list[Tensor]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)


# Plain tensors


class Rows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 3))


def check_cut_tensors() -> None:
    net = fully_shard(Rows())
    local = net.weight.to_local().detach()
    for cut in (nn.Parameter(net.weight.to_local()), local, local[1:]):
        with pytest.raises(ValueError, match=r"'x' is a plain tensor .* pass the sharded"):
            Momentum([("x", cut)])
    with pytest.raises(ValueError, match="parameter 0 of group 0 is a plain tensor"):
        Momentum([net.weight.to_local()])  # no leaf: the reason that torch would give
    optimizer = Momentum(net.parameters())
    with pytest.raises(ValueError, match="parameter 0 of group 1 is a plain tensor"):
        optimizer.add_param_group({"params": [local]})
    assert len(optimizer.param_groups) == len(optimizer.state) == 1
    # A part that is no part, and memory that has been a shard.
    mesh = init_device_mesh("cpu", (2,))
    whole = nn.Parameter(torch.ones(3))
    replica = nn.Parameter(DTensor.from_local(whole.detach(), mesh, [Replicate()]))
    Momentum([whole, replica])
    freed = net.weight.to_local().detach()
    del net, local, cut, optimizer
    Momentum([nn.Parameter(freed)])


def check_refused_group() -> None:
    optimizer = Momentum(make_net().parameters())
    before = list(optimizer.state)
    params = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(13))]
    with pytest.raises(ValueError, match=r"parameter 1 of group 1 has an unlucky number"):
        optimizer.add_param_group({"params": params})
    assert len(optimizer.param_groups) == 1
    assert list(optimizer.state) == before


# States


def check_states() -> None:
    net = make_net()
    net[0].bias.requires_grad_(False)
    optimizer = Momentum(net.parameters())
    assert set(optimizer.state) == set(net.parameters()) - {net[0].bias}
    for param, state in optimizer.state.items():
        assert isinstance(state["buffer"], RaggedTensor)  # without elements on a rank, too
        assert state["buffer"]._spec.placements == param._spec.placements
        assert state["buffer"].dtype == torch.float64
        assert not state["buffer"].requires_grad
    net[0].bias.requires_grad_(True)
    net[2].requires_grad_(False)
    train(net, optimizer, 1)
    assert set(optimizer.state) == set(net.parameters())
    assert optimizer.state[net[0].bias]["step"] == 1
    assert optimizer.state[net[2].weight]["step"] == 0  # passed over: it had no gradient


def check_meta() -> None:
    with torch.device("meta"):
        net = nn.Linear(4, 3)
    fully_shard(net)
    optimizer = Momentum(net.parameters())
    assert not optimizer.state
    net.to_empty(device="cpu")
    nn.init.ones_(net.weight), nn.init.ones_(net.bias)
    net(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    # Two ranks average the same gradient, of ones.
    assert torch.equal(full(net.weight), torch.full((3, 4), 0.9))


def check_swapped() -> None:
    """Accelerate makes the optimizer first, and then puts the sharded parameters into it."""
    net, expected = make_net(sharded=False), make_net()
    optimizer = Momentum(net.parameters())
    fully_shard(net)
    optimizer.param_groups[0]["params"] = list(net.parameters())
    optimizer.state_dict()  # torch's fails where states have no parameter
    assert set(optimizer.state) == set(net.parameters())
    train(net, optimizer), train(expected, Momentum(expected.parameters()))
    assert_same([*map(full, net.parameters())], [*map(full, expected.parameters())])
    optimizer.param_groups[0]["params"][0] = net[0].weight.to_local().detach()
    with pytest.raises(ValueError, match="parameter 0 of group 0 is a plain tensor"):
        optimizer.step()


def check_gradient_of_another_placement() -> None:
    mesh = init_device_mesh("cpu", (2,))
    whole = torch.arange(12.0).view(4, 3)
    param = nn.Parameter(RaggedTensor.distribute(whole, mesh, [RaggedShard((0,), (1, 3))]))
    param.grad = RaggedTensor.distribute(whole, mesh, [RaggedShard((0,), (3, 1))])
    version = param._version
    Momentum([param], lr=1.0).step()
    assert torch.equal(full(param), torch.zeros(4, 3))
    assert param._version > version  # of the wrapper, by which autograd goes


# State dicts


def check_loads() -> None:
    """From the plain optimizer, from other cuts, and from another mesh; and back."""
    net, plain = make_net(), make_net(sharded=False)
    optimizer, single = Momentum(net.parameters()), Momentum(plain.parameters(), lr=0.3)
    train(plain, single)
    optimizer.load_state_dict(single.state_dict())
    expected = full_states(plain, single)
    assert_same(full_states(net, optimizer), expected)
    assert optimizer.param_groups[0]["lr"] == 0.3
    assert all(type(state["step"]) is Tensor for state in optimizer.state.values())

    mesh = init_device_mesh("cpu", (2,))
    recut = {"state": {}, "param_groups": single.state_dict()["param_groups"]}
    for key, state in single.state_dict()["state"].items():
        step, buffer = state["step"].item(), state["buffer"]  # older torch has numbers
        where = init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b")) if key == 0 else mesh
        placements = [Replicate()] * where.ndim
        moved = DTensor.from_local(buffer, where, placements)
        moved = moved.redistribute(placements=[Shard(0), *placements[1:]])
        recut["state"][key] = {"step": step, "buffer": moved}
    other = Momentum(make_net().parameters())
    net = list(other.param_groups[0]["params"])
    other.load_state_dict(recut)
    assert_same([full(other.state[p][k]) for p in net for k in ("step", "buffer")], expected)

    back = Momentum(make_net(sharded=False).parameters())
    back.load_state_dict(other.state_dict())
    params = back.param_groups[0]["params"]
    assert_same([back.state[p][k] for p in params for k in ("step", "buffer")], expected)


def check_loading_copies() -> None:
    """Two optimizers share nothing after one has loaded from the other."""
    net = make_net()
    optimizer, other = Momentum(net.parameters()), Momentum(net.parameters())
    train(net, optimizer)
    mine = [other.state[p]["buffer"] for p in net.parameters()]
    other.load_state_dict(optimizer.state_dict())
    expected = [each.clone() for each in full_states(net, other)]
    train(net, optimizer)
    assert_same(full_states(net, other), expected)
    assert all(other.state[p]["buffer"] is b for p, b in zip(net.parameters(), mine, strict=True))


def check_refused_loads() -> None:
    net = make_net()
    optimizer = Momentum(net.named_parameters())
    train(net, optimizer)
    expected = [each.clone() for each in full_states(net, optimizer)]
    good = optimizer.state_dict()
    last = good["state"][3]
    bad: list[tuple[Any, str]] = [
        ({**last, "other": 1}, r"Momentum, 2.bias: .* has the states \['buffer', 'other', 's"),
        ({"step": last["step"]}, r"has the states \['step'\], expected \['buffer', 'step'\]"),
        ({**last, "buffer": torch.ones(1)}, r"'buffer' has shape \(1,\), .* tensor's, \(2,\)"),
    ]
    for state, message in bad:
        with pytest.raises(ValueError, match=message):
            optimizer.load_state_dict({**good, "state": {**good["state"], 3: state}})
    with pytest.raises(ValueError, match=r"groups of \[2\] parameters, the optimizer of \[5\]"):
        optimizer.load_state_dict({"state": {}, "param_groups": [{"params": [0, 1]}]})
    assert_same(full_states(net, optimizer), expected)
    # What was not saved is as before the first step; options of the layout stay.
    groups = [{"params": list(range(5)), "lr": 0.7, "mu": 0.9, "initial_lr": 1.0}]
    optimizer.load_state_dict({"state": {0: good["state"][0]}, "param_groups": groups})
    assert [float(state["step"]) for state in optimizer.state.values()] == [2, 0, 0, 0, 0]
    group = optimizer.param_groups[0]
    assert (group["lr"], group["mu"], group["initial_lr"]) == (0.7, 0.5, 1.0)
    assert group["param_names"][0] == "0.weight"


def check_full_state_dicts() -> None:
    """Through torch's own functions, to and from one process."""
    net, plain = make_net(), make_net(sharded=False)
    optimizer, single = Momentum(net.parameters()), Momentum(plain.parameters())
    train(net, optimizer)
    options = StateDictOptions(full_state_dict=True)
    whole = get_optimizer_state_dict(net, optimizer, options=options)
    set_optimizer_state_dict(plain, single, copy.deepcopy(whole))
    assert_same(full_states(plain, single), full_states(net, optimizer))
    fresh = make_net()
    loaded = Momentum(fresh.parameters())
    set_optimizer_state_dict(fresh, loaded, whole, options=options)
    assert_same(full_states(fresh, loaded), full_states(net, optimizer))
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    loaded = Momentum(fresh.parameters())
    entries = get_optimizer_state_dict(net, optimizer, options=flat)
    set_optimizer_state_dict(fresh, loaded, entries, options=flat)
    assert_same(full_states(fresh, loaded), full_states(net, optimizer))


def check_copies() -> None:
    net = make_net()
    optimizer = Momentum(net.named_parameters())
    train(net, optimizer)
    both = copy.deepcopy((net, optimizer))
    train(net, optimizer), train(*both)
    assert_same([*map(full, both[0].parameters())], [*map(full, net.parameters())])
    loaded = pickle.loads(pickle.dumps(optimizer))
    found = [full(state["buffer"]) for state in loaded.state.values()]
    assert_same(found, [full(state["buffer"]) for state in optimizer.state.values()])
    loaded.step()  # no gradients: nothing to do
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    loaded.load_state_dict(torch.load(file))


def check_all() -> None:
    check_cut_tensors()
    check_refused_group()
    check_states()
    check_meta()
    check_swapped()
    check_gradient_of_another_placement()
    check_loads()
    check_loading_copies()
    check_refused_loads()
    check_full_state_dicts()
    check_copies()


def test_on_two_ranks() -> None:
    """States, state dicts and refusals, see the functions above."""
    run_ranks(check_all, 2)


# One process


def test_a_step_runs_closure_and_hooks_as_torch_does() -> None:
    param = nn.Parameter(torch.ones(3))
    optimizer = Momentum([param], lr=1.0)
    seen: list[Any] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("pre"))
    optimizer.register_step_post_hook(lambda *_: seen.append("post"))

    def closure() -> float:
        seen.append(torch.is_grad_enabled())
        optimizer.zero_grad()
        loss = param.sum()
        loss.backward()
        return loss.item()

    version = param._version
    with torch.no_grad():
        assert optimizer.step(closure) == 3.0
    assert seen == ["pre", True, "post"]
    assert torch.equal(param.detach(), torch.zeros(3))
    assert param._version > version


def test_load_hooks_run() -> None:
    optimizer = Momentum([nn.Parameter(torch.ones(3))])
    saved = Momentum([nn.Parameter(torch.ones(3))], lr=0.5).state_dict()
    seen: list[str] = []

    def before(_: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
        (group,) = state_dict["param_groups"]
        return {**state_dict, "param_groups": [{**group, "lr": 2 * group["lr"]}]}

    optimizer.register_load_state_dict_pre_hook(before)
    optimizer.register_load_state_dict_post_hook(lambda _: seen.append("after"))
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["lr"] == 1.0
    assert saved["param_groups"][0]["lr"] == 0.5
    assert seen == ["after"]


def test_sparse_gradients_are_refused() -> None:
    embedding = nn.Embedding(5, 2, sparse=True)
    optimizer = Momentum(embedding.parameters())
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match="Momentum does not support sparse gradients"):
        optimizer.step()


def test_parameters_come_from_iterators_in_groups_with_options() -> None:
    nets = [nn.Linear(2, 2), nn.Linear(3, 3)]
    groups = [{"params": nets[0].parameters()}, {"params": nets[1].parameters(), "lr": 0.3}]
    optimizer = Momentum(groups, lr=0.2)  # type: ignore[arg-type]
    assert [group["lr"] for group in optimizer.param_groups] == [0.2, 0.3]
    names = [name for name, _, _ in optimizer.named_params()]
    assert names == [f"parameter {k} of group {index}" for index in range(2) for k in range(2)]
    optimizer = Momentum(nets[0].named_parameters())
    assert [name for name, _, _ in optimizer.named_params()] == ["weight", "bias"]
