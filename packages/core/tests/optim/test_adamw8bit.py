"""AdamW8bit: the bits of one process on any number of ranks, and what it is on one process."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.optim import AdamW

from vescale_fsdp import Granularity, PlanError, RaggedShard, checkpoint, combine, fully_shard
from vescale_fsdp.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from vescale_fsdp.optim import AdamW8bit, adamw8bit
from vescale_fsdp.ragged import RaggedTensor
from vescale_fsdp.testing import run_ranks

TILE = (32, 32)
# Of each: rows of whole blocks and not, a vector, a stack, a small one with float32 moments.
SHAPES = [(40, 256), (41, 120), (5000,), (3, 48, 40), (2, 64, 64), (10, 10)]


def gradient(shape: Any, step: int) -> Tensor:
    """The same on every rank; some elements are tiny, as moments of many magnitudes have them."""
    generator = torch.Generator().manual_seed(step)
    return torch.randn(shape, generator=generator) * torch.rand(shape, generator=generator) ** 6


def initial(shape: Any) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(99))


def full(tensor: Tensor) -> Tensor:
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return whole.detach()


def step(optimizer: AdamW8bit, steps: range, skip: int | None = None) -> None:
    """Steps with the same gradients on any layout; one parameter may have none in some."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for number in steps:
        for index, param in enumerate(params):
            grad = gradient(param.shape, 10 * number + index).to(param.dtype)
            if index == skip and number % 2:
                param.grad = None
            elif isinstance(param, RaggedTensor):
                param.grad = RaggedTensor.distribute(grad, param.device_mesh, param.placements)
            elif isinstance(param, DTensor):
                replicated = [Replicate()] * param.device_mesh.ndim
                whole = DTensor.from_local(grad, param.device_mesh, replicated)
                param.grad = whole.redistribute(placements=param.placements)
            else:
                param.grad = grad
        optimizer.step()


def snapshot(optimizer: AdamW8bit) -> list[Tensor]:
    """All parameters and states, whole."""
    found = []
    for group in optimizer.param_groups:
        for param in group["params"]:
            found += [full(param), *map(full, optimizer.state[param].values())]
    return found


def assert_same(found: list[Tensor], expected: list[Tensor]) -> None:
    assert [each.shape for each in found] == [each.shape for each in expected]
    for number, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert one.dtype == other.dtype
        assert torch.equal(one, other), f"tensor {number} of {len(found)}"


def on_one_process(shapes: Any, dtype: torch.dtype, **options: Any) -> AdamW8bit:
    """With blocks of one chunk and no packing of several parameters: each by itself."""
    params = [nn.Parameter(initial(shape).to(dtype)) for shape in shapes]
    return AdamW8bit([{"params": [param]} for param in params], lr=0.01, **options)


def together(params: list[nn.Parameter], **options: Any) -> AdamW8bit:
    return AdamW8bit(params, lr=0.01, **options)


@contextmanager
def at_once(num_elements: int) -> Iterator[None]:
    """Step on so many elements at once."""
    before, adamw8bit._AT_ONCE_CPU = adamw8bit._AT_ONCE_CPU, num_elements
    try:
        yield
    finally:
        adamw8bit._AT_ONCE_CPU = before


# Any number of ranks


def random_cut(shape: Any, block: int, num_ranks: int, seed: int) -> RaggedShard:
    """Cuts at multiples of a block; ranks are often left without any."""
    generator = torch.Generator().manual_seed(seed)
    numel = math.prod(shape)
    places = torch.randint(0, -(-numel // block) + 1, (num_ranks - 1,), generator=generator)
    ends = [0, *sorted(min(int(k) * block, numel) for k in places), numel]
    runs = [(1, stop - start) for start, stop in pairwise(ends)]
    return RaggedShard.from_runs_of_elements(runs, shape)


def check_random_cuts() -> None:
    world = dist.get_world_size()
    meshes = [(init_device_mesh("cpu", (world,)), [])]
    if world == 4:
        names = ("replicate", "shard")
        meshes += [(init_device_mesh("cpu", (2, 2), mesh_dim_names=names), [Replicate()])]
    dtypes = [torch.float32, torch.bfloat16]
    if world == 3:  # so that each size of blocks meets each dtype
        dtypes.reverse()
    for block_size, dtype in zip((256, TILE), dtypes, strict=True):
        policy = AdamW8bit.granularity(block_size)
        expected = on_one_process(SHAPES, dtype, block_size=block_size)
        step(expected, range(3), skip=1)
        for seed, (mesh, outer) in enumerate(meshes):
            params = []
            for index, shape in enumerate(SHAPES):
                whole = initial(shape).to(dtype)
                need = policy("", nn.Parameter(whole))
                block = 1 if need is None else need.block(shape)
                num_parts = world if not outer else 2
                cut = random_cut(shape, block, num_parts, 100 * seed + index)
                ragged = RaggedTensor.distribute(whole, mesh, [*outer, cut])
                params.append(nn.Parameter(ragged))
            optimizer = together(params, block_size=block_size)
            with at_once(3000):
                step(optimizer, range(3), skip=1)
            assert_same(snapshot(optimizer), snapshot(expected))


class TwoLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Linear(256, 512)
        self.down = nn.Linear(512, 64)
        self.stack = nn.Parameter(torch.randn(3, 48, 40))
        self.small = nn.Linear(3, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu()) + self.small.weight.sum() + self.stack.mean()


def check_layouts() -> None:
    """Ours, FSDP2's, tensor parallelism under ours; steps on their own gradients."""
    world = dist.get_world_size()
    for block_size in (256, TILE):
        plain = TwoLayers()
        expected = together(list(plain.parameters()), block_size=block_size)
        step(expected, range(2))
        for shard in (shard_ours, shard_fsdp2, *([shard_tensor_parallel] if world == 4 else [])):
            net = shard(TwoLayers(), AdamW8bit.granularity(block_size))
            optimizer = together(list(net.parameters()), block_size=block_size)
            step(optimizer, range(2))
            assert_same(snapshot(optimizer), snapshot(expected))
            sharded = [(p, s) for p, s in optimizer.state.items() if isinstance(p, DTensor)]
            for param, state in sharded:
                assert all(isinstance(v, DTensor) for k, v in state.items() if k != "step")
                if param.numel() >= 4096:
                    codes = state["exp_avg"]
                    assert codes.placements == param.placements
                    assert codes.to_local().dtype == torch.uint8
                    per_block = 256 if block_size == 256 else 1024
                    here = state["exp_avg_scale"].to_local().numel()
                    assert here >= -(-codes.to_local().numel() // per_block)


def shard_ours(net: nn.Module, policy: Any) -> nn.Module:
    fully_shard(net.up, granularity=policy)
    return fully_shard(net, granularity=combine(policy, Granularity.rows(3)))


def shard_fsdp2(net: nn.Module, policy: Any) -> nn.Module:
    """By rows; four ranks would cut blocks of two parameters, which stay plain."""
    ignored = {net.down.weight, net.stack} if dist.get_world_size() == 4 else set()
    return torch_fully_shard(net, ignored_params=ignored)


def shard_tensor_parallel(net: nn.Module, policy: Any) -> nn.Module:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    parallelize_module(net, mesh["tensor"], plan)
    return fully_shard(net, mesh=mesh["data"], granularity=policy)


# Mutations: what these tests are for


def check_threshold_on_the_local_shard() -> None:
    """8 bits or not must be decided by the whole tensor."""
    mesh = init_device_mesh("cpu", (2,))
    shape = (32, 256)  # 8,192 elements: two shards of 4,096, or of 2,048 and 6,144
    expected = on_one_process([shape], torch.float32, min_8bit_size=4097)
    step(expected, range(2))
    cut = [RaggedShard((0,), (1, 3))]

    def run() -> Tensor:
        param = nn.Parameter(RaggedTensor.distribute(initial(shape), mesh, cut))
        optimizer = together([param], min_8bit_size=4097)
        step(optimizer, range(2))
        return full(param)

    assert torch.equal(run(), snapshot(expected)[0])
    honest = adamw8bit._is_8bit

    def by_local(param: Tensor, group: Any) -> bool:
        return param.to_local().numel() >= group["min_8bit_size"]

    adamw8bit._is_8bit = by_local
    try:
        assert not torch.equal(run(), snapshot(expected)[0])
    finally:
        adamw8bit._is_8bit = honest


def check_blocks_of_the_shard() -> None:
    """Blocks that begin where the shard does give other numbers."""
    mesh = init_device_mesh("cpu", (2,))
    shape = (32, 256)
    expected = on_one_process([shape], torch.float32)
    step(expected, range(2))
    cut = [RaggedShard((0, 1), (4000, 4192))]
    param = nn.Parameter(RaggedTensor.distribute(initial(shape), mesh, cut))
    with pytest.raises(PlanError):
        together([param])
    anchored = AdamW8bit(
        [nn.Parameter(param.to_local().detach().clone())], lr=0.01, min_8bit_size=1
    )
    for number in range(2):
        grad = RaggedTensor.distribute(gradient(shape, 10 * number), mesh, cut)
        anchored.param_groups[0]["params"][0].grad = grad.to_local()
        anchored.step()
    found = anchored.param_groups[0]["params"][0].detach()
    wanted = RaggedTensor.distribute(snapshot(expected)[0], mesh, cut).to_local()
    # The first blocks of the first rank are where they should be.
    assert not torch.equal(found, wanted)


def check_gradients_that_lie_elsewhere() -> None:
    """All ranks take part in their redistribution, also those that hold nothing."""
    mesh = init_device_mesh("cpu", (2,))
    for shape in ((10, 10), (32, 256)):
        first, halves = ([RaggedShard((0,), units)] for units in ((1, 0), (1, 1)))
        sharded = nn.Parameter(RaggedTensor.distribute(initial(shape), mesh, first))
        sharded.grad = RaggedTensor.distribute(gradient(shape, 0), mesh, halves)
        plain = nn.Parameter(initial(shape))
        plain.grad = gradient(shape, 0)
        for param in (sharded, plain):
            AdamW8bit([param]).step()
        assert torch.equal(full(sharded), full(plain)), shape


def check_refusals() -> None:
    """On every rank, wherever the cut is."""
    mesh = init_device_mesh("cpu", (3,))
    whole = torch.ones(40, 120)
    cut = nn.Parameter(RaggedTensor.distribute(whole, mesh, [RaggedShard((0,), (10, 30, 0))]))
    with pytest.raises(PlanError) as caught:
        AdamW8bit([("net.weight", cut)])
    assert str(caught.value) == (
        "AdamW8bit: 'net.weight' of shape (40, 120) is split inside a block of 256: a split after "
        "element 1200 is not at a multiple of 256. Its placements are (RaggedShard(dims=(0,), "
        "local_units=(1, 3, 0)),). Let fully_shard shard it with "
        "granularity=AdamW8bit.granularity(256) (combine(...) joins it with others), or keep its "
        "moments in float32 with a larger min_8bit_size in its parameter group"
    )
    with pytest.raises(PlanError, match="after element 1200 is not at a multiple of 3840"):
        AdamW8bit([cut], block_size=TILE)
    with pytest.raises(PlanError, match=r"AdamW8bit\.granularity\(256, min_8bit_size=64\)"):
        AdamW8bit([cut], min_8bit_size=64)  # the policy asks nothing for less than its own
    AdamW8bit([cut], block_size=240)
    AdamW8bit([{"params": [cut], "min_8bit_size": 4801}])
    columns = DTensor.from_local(torch.ones(40, 300), mesh, [Replicate()]).redistribute(
        placements=[Shard(1)]
    )
    with pytest.raises(PlanError, match=r"Shard\(dim=1\) cuts rows of 300 elements"):
        AdamW8bit([nn.Parameter(columns)])


# Checkpoints


def shard_with(granularity: int) -> tuple[nn.Module, AdamW8bit]:
    policy = combine(AdamW8bit.granularity(), Granularity.elements(granularity))
    net = shard_ours(TwoLayers(), policy)
    return net, together(list(net.parameters()))


def save(path: str) -> None:
    net, optimizer = shard_with(1)
    step(optimizer, range(2), skip=0)
    checkpoint.save(path, net, optimizer)


def load(path: str, granularity: int) -> None:
    net, optimizer = shard_with(granularity)
    checkpoint.load(path, net, optimizer)
    step(optimizer, range(2, 4), skip=0)
    expected = together(list(TwoLayers().parameters()))
    step(expected, range(4), skip=0)
    assert_same(snapshot(optimizer), snapshot(expected))


def check_full_state_dicts() -> None:
    """To one process and back, and to AdamW and back, through torch's functions."""
    net, optimizer = shard_with(1)
    step(optimizer, range(2))
    options = StateDictOptions(full_state_dict=True)
    whole = get_optimizer_state_dict(net, optimizer, options=options)
    plain = TwoLayers()
    single = together(list(plain.parameters()))
    set_optimizer_state_dict(plain, single, whole)
    with torch.no_grad():
        for param, other in zip(plain.parameters(), net.parameters(), strict=True):
            param.copy_(full(other))
    assert_same(snapshot(single), snapshot(optimizer))

    adamw = AdamW(plain.parameters())
    adamw.load_state_dict(single.dequantized_state_dict())
    for param in plain.parameters():
        assert adamw.state[param]["exp_avg"].dtype == torch.float32
    expected = together(list(plain.parameters()))
    expected.load_state_dict(adamw.state_dict())
    moments = get_optimizer_state_dict(plain, adamw)
    for values, how in ((moments, options), (moments, None)):
        # Codes where moments are expected are not numbers: they must be encoded on the way.
        _, loaded = shard_with(7)
        params = loaded.param_groups[0]["params"]
        assert loaded.param_groups[0]["lr"] == 0.01
        by_position = {i: values["state"][n] for i, (n, _) in enumerate(net.named_parameters())}
        if how is None:
            groups = adamw.state_dict()["param_groups"]
            loaded.load_state_dict({"state": by_position, "param_groups": groups})
        else:
            again, loaded = shard_with(7)
            set_optimizer_state_dict(again, loaded, values, options=how)
            params = list(again.parameters())
        for param, other in zip(params, plain.parameters(), strict=True):
            found = [full(v) for _, v in sorted(loaded.state[param].items())]
            assert_same(found, [v for _, v in sorted(expected.state[other].items())])


def check_two_ranks(path: str) -> None:
    check_random_cuts()
    check_layouts()
    check_threshold_on_the_local_shard()
    check_blocks_of_the_shard()
    check_gradients_that_lie_elsewhere()
    check_full_state_dicts()
    save(path)


def check_three_ranks(path: str) -> None:
    check_random_cuts()
    check_refusals()
    load(path, 1000)


def check_four_ranks() -> None:
    check_random_cuts()
    check_layouts()


def test_on_several_ranks(tmp_path: Path) -> None:
    """Bits are those of one process; a checkpoint of 2 ranks goes on with 3 and with 1."""
    path = str(tmp_path / "checkpoint")
    run_ranks(check_two_ranks, 2, path)
    run_ranks(check_three_ranks, 3, path)
    run_ranks(load, 1, path, 512)
    run_ranks(check_four_ranks, 4)


# One process


def test_small_tensors_step_as_torch_does() -> None:
    options: list[dict[str, Any]] = [
        {},
        {"maximize": True, "weight_decay": 0.0, "betas": (0.8, 0.9), "eps": 1e-3},
        {"lr": torch.tensor(0.3)},
    ]
    for each in options:
        ours, theirs = (
            [nn.Parameter(initial(shape)) for shape in [(63,), (7, 9), (130, 31), ()]]
            for _ in range(2)
        )
        optimizer = AdamW8bit(ours, min_8bit_size=10**6, **each)
        reference = AdamW(theirs, foreach=False, **each)
        for number in range(4):
            for index, (one, other) in enumerate(zip(ours, theirs, strict=True)):
                one.grad = gradient(one.shape, 10 * number + index)
                other.grad = one.grad.clone()
            optimizer.step(), reference.step()
        for one, other in zip(ours, theirs, strict=True):
            assert torch.equal(one, other)
            for name, value in reference.state[other].items():
                assert torch.equal(optimizer.state[one][name], value), name


def test_the_signature_is_that_of_torch_and_more() -> None:
    theirs = inspect.signature(AdamW).parameters
    ours = inspect.signature(AdamW8bit).parameters
    assert set(theirs) <= set(ours)
    for name, parameter in theirs.items():
        assert ours[name].default == parameter.default, name
        assert ours[name].kind == parameter.kind, name


@pytest.mark.parametrize("name", ["amsgrad", "foreach", "capturable", "differentiable", "fused"])
def test_what_is_not_offered_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"AdamW8bit has no {name}=True"):
        AdamW8bit([nn.Parameter(torch.ones(3))], **{name: True})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1.0}, "lr must not be negative, got -1.0"),
        ({"lr": torch.ones(2)}, r"a tensor of one element, got \(2,\)"),
        ({"betas": (0.9, 1.0)}, r"betas must be two numbers in \[0, 1\)"),
        ({"block_size": 0}, "block_size must be a number of elements"),
        ({"block_size": (3, 3, 3)}, "block_size must be a number of elements"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AdamW8bit([nn.Parameter(torch.ones(3))], **options)
    with pytest.raises(ValueError, match=message):
        AdamW8bit([{"params": [nn.Parameter(torch.ones(3))], **options}])


def test_complex_and_integer_parameters_are_refused() -> None:
    with pytest.raises(ValueError, match=r"parameter 0 of group 0 is torch\.complex64"):
        AdamW8bit([nn.Parameter(torch.ones(3, dtype=torch.complex64))])


@pytest.mark.parametrize(
    ("block_size", "bytes_per_element"), [(256, 2 + 8 / 256), (TILE, 2 + 8 / 1024)]
)
def test_two_bytes_and_a_few_scales_per_element(block_size: Any, bytes_per_element: float) -> None:
    param = nn.Parameter(torch.empty(512, 1024))
    state = AdamW8bit([param], block_size=block_size).state[param]
    num_bytes = sum(v.untyped_storage().nbytes() for k, v in state.items() if k != "step")
    assert num_bytes == bytes_per_element * param.numel()  # 2.03 with blocks of 256
    assert round(2 + 8 / 256, 2) == 2.03


def test_a_16_bit_parameter_is_rounded_once() -> None:
    shape = (64, 100)
    half = nn.Parameter(initial(shape).bfloat16())
    single = nn.Parameter(half.detach().float())
    for param in (half, single):
        optimizer = together([param])
        param.grad = gradient(shape, 0).bfloat16().to(param.dtype)
        optimizer.step()
    assert torch.equal(half.detach(), single.detach().bfloat16())


def test_a_float64_parameter_is_not_rounded() -> None:
    param = nn.Parameter(torch.full((64, 100), 1.0, dtype=torch.float64))
    param.grad = torch.ones_like(param)
    AdamW8bit([param], lr=1e-12, weight_decay=0.0).step()
    # The first step of Adam is lr; in float32 it would be lost beside 1.
    torch.testing.assert_close(
        param.detach(), torch.full_like(param, 1 - 1e-12), rtol=1e-15, atol=0
    )


def test_transposed_parameters_have_the_blocks_of_their_values() -> None:
    values = initial((100, 64))
    params = [nn.Parameter(values.clone()), nn.Parameter(values.t().contiguous().t())]
    for param in params:
        optimizer = together([param])
        for number in range(2):
            param.grad = gradient(param.shape, number)
            optimizer.step()
    assert torch.equal(params[0], params[1])
    assert params[1].stride() == (1, 100)


def test_nan_stays_in_its_block() -> None:
    param = nn.Parameter(initial((16, 512)))
    optimizer = together([param])
    for number in range(2):
        param.grad = gradient(param.shape, number)
        param.grad[3, 300] = math.nan if number == 0 else 0.0
        optimizer.step()
    bad = param.detach().isnan()
    assert bool(bad[3, 256:].all())
    assert int(bad.sum()) == 256


def test_the_error_of_8_bits_is_small() -> None:
    """Against moments of float32, after 20 steps, in units of how far the parameters went."""
    start = initial((64, 256))
    params = [nn.Parameter(start.clone()) for _ in range(2)]
    for param, smallest in zip(params, (1, 10**9), strict=True):
        optimizer = together([param], min_8bit_size=smallest, weight_decay=0.0)
        for number in range(20):
            param.grad = torch.randn(64, 256, generator=torch.Generator().manual_seed(number))
            optimizer.step()
    quantized, exact = (param.detach() for param in params)
    error = float((quantized - exact).norm() / (exact - start).norm())
    assert 0.001 < error < 0.05


def test_the_numbers_are_those_of_torchao(monkeypatch: pytest.MonkeyPatch) -> None:
    optim = pytest.importorskip("torchao.optim")
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    theirs, ours = (nn.Parameter(initial((64, 256))) for _ in range(2))
    reference, optimizer = optim.AdamW8bit([theirs], lr=0.01), together([ours])
    for number in range(3):
        for param, each in ((theirs, reference), (ours, optimizer)):
            param.grad = torch.randn(64, 256, generator=torch.Generator().manual_seed(number))
            each.step()
    # Codes differ where a moment lies near a midpoint, since bits of the maps differ.
    codes, others = optimizer.state[ours]["exp_avg"], reference.state[theirs]["exp_avg"].codes
    assert float((codes != others).float().mean()) < 1e-3
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)


def test_a_state_dict_with_amsgrad_is_refused() -> None:
    param = nn.Parameter(torch.ones(3))
    adamw = AdamW([param], amsgrad=True)
    param.grad = torch.ones(3)
    adamw.step()
    with pytest.raises(ValueError, match="AdamW8bit has no amsgrad"):
        AdamW8bit([param]).load_state_dict(adamw.state_dict())


def test_the_policy_asks_for_what_is_quantized() -> None:
    policy = AdamW8bit.granularity()
    assert policy("", nn.Parameter(torch.empty(64, 64))) == Granularity.elements(256)
    assert policy("", nn.Parameter(torch.empty(4095))) is None
    tiles = AdamW8bit.granularity(TILE)
    assert tiles("", nn.Parameter(torch.empty(64, 64))) == Granularity.tile(32, 32)
    assert tiles("", nn.Parameter(torch.empty(4096))) == Granularity.elements(1024)
