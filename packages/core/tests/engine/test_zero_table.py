"""The table of ZeRO's stages: what is cut when, and that all rows train alike."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor, Replicate

from vescale_fsdp import check_gradients, clip_grad_norm_, fully_shard, unsharded
from vescale_fsdp.engine.axes import row_of
from vescale_fsdp.program import ZERO_TABLE
from vescale_fsdp.ragged import RaggedShard
from vescale_fsdp.testing import run_ranks

from .helpers import averaged_gradients, full_gradients, full_parameters
from .models import TinyGPT, gpt_loss, make, tokens_of
from .recorders import Recorder

pytestmark = pytest.mark.usefixtures("each_alone")

ONE_AXIS = ("ddp", "zero1", "zero2", "zero3")
TWO_AXES = ("hsdp", "hsdp_zero1")


def mesh_of(sharding: str) -> DeviceMesh:
    world = dist.get_world_size()
    if sharding in ONE_AXIS:
        return init_device_mesh("cpu", (world,))
    return init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("outer", "inner"))


def sharded(sharding: str | None, **options: object) -> nn.Module:
    model = make(TinyGPT)
    mesh = options.pop("mesh", None) or mesh_of(sharding or "zero3")
    for block in model.blocks:
        fully_shard(block, mesh=mesh, sharding=sharding, **options)
    return fully_shard(model, mesh=mesh, sharding=sharding, **options)


def is_gathered(module: nn.Module) -> bool:
    return not isinstance(module.weight, DTensor)


def check_training(sharding: str, foreach: bool, **options: object) -> None:
    """Two steps of three micro-batches, of which only the last is synchronized, then one more."""
    plain, ours = make(TinyGPT), sharded(sharding, **options)
    optimizers = [
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=foreach)
        for model in (plain, ours)
    ]
    rank = dist.get_rank()
    for step, num_batches in enumerate((3, 3, 1)):
        for batch in range(num_batches):
            ours.set_requires_gradient_sync(batch == num_batches - 1)
            for model in (plain, ours):
                gpt_loss(model, tokens_of(10 * step + batch, rank)).backward()
        found, expected = full_gradients(ours), averaged_gradients(plain)
        for name, gradient in expected.items():
            torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-6, msg=name)
        for param, gradient in zip(plain.parameters(), expected.values(), strict=True):
            param.grad = gradient
        assert check_gradients(ours)
        norms = [clip_grad_norm_(m.parameters(), 0.5) for m in (plain, ours)]
        torch.testing.assert_close(norms[1], norms[0])
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    with unsharded(ours, writeback=True):  # nothing is kept from before the last step
        for name, param in plain.named_parameters():
            torch.testing.assert_close(ours.get_parameter(name).detach(), param.detach())
    for name, param in full_parameters(ours).items():
        torch.testing.assert_close(param, dict(plain.named_parameters())[name].detach())
    state = {name: value.full_tensor() for name, value in ours.state_dict().items()}
    with unsharded(ours, writeback=True):
        for name, param in ours.named_parameters():
            assert torch.equal(param, state[name]), "what is gathered is what rests"
            param.data.mul_(2)
    before = gpt_loss(ours, tokens_of(0, rank)).detach()
    with torch.no_grad():
        for param in plain.parameters():
            param.mul_(2)
    torch.testing.assert_close(before, gpt_loss(plain, tokens_of(0, rank)).detach())


def check_all(names: tuple[str, ...]) -> None:
    for sharding in names:
        check_training(sharding, foreach=False)
        check_training(sharding, foreach=True)  # writes that no version of a tensor counts
        if sharding in ("zero3", *TWO_AXES):
            check_training(sharding, foreach=False, accumulate="sharded")


def test_all_rows_of_one_axis_train_as_one_process() -> None:
    run_ranks(check_all, 2, ONE_AXIS, timeout_s=60)


@pytest.mark.nightly
def test_all_rows_of_two_axes_train_as_one_process() -> None:
    run_ranks(check_all, 4, (*TWO_AXES, "zero2", "ddp"), timeout_s=90)


def check_placements() -> None:
    size = sum(param.numel() for param in make(TinyGPT).parameters())
    held = {}
    for sharding in ZERO_TABLE:
        model = sharded(sharding)
        params = list(model.parameters())
        held[sharding] = torch.tensor(float(sum(p._local_tensor.numel() for p in params)))
        dist.all_reduce(held[sharding])
        kinds = [type(placement) for placement in params[0].placements]
        expected = {
            "ddp": [Replicate],
            "hsdp": [Replicate, RaggedShard],
        }.get(sharding, [RaggedShard])
        assert kinds == expected, (sharding, kinds)
        assert params[0].device_mesh.size() == 4
    copies = {name: found.item() / size for name, found in held.items()}
    assert copies == {"ddp": 4, "zero1": 1, "zero2": 1, "zero3": 1, "hsdp": 2, "hsdp_zero1": 1}


def test_what_rests_is_cut_over_the_axes_that_the_table_says() -> None:
    run_ranks(check_placements, 4, timeout_s=60)


def check_between() -> None:
    cases = [(name, name == "zero2", {}) for name in ONE_AXIS]
    cases.append(("zero3", True, {"accumulate": "sharded"}))
    for sharding, reduces, options in cases:
        model = sharded(sharding, **options)
        loss = gpt_loss(model, tokens_of(0, dist.get_rank()))
        stays = sharding != "zero3"
        assert is_gathered(model.blocks[0].up) == stays, sharding
        model.set_requires_gradient_sync(False)
        with Recorder() as recorder:
            loss.backward()
        # TinyGPT has three units: two blocks and the root.
        assert recorder.count("reductions") == (3 if reduces else 0)
        with Recorder() as recorder:
            gpt_loss(model, tokens_of(1, dist.get_rank()))
        assert recorder.count("gathers") == (0 if stays else 3), sharding


def test_between_the_passes_of_a_step_the_table_holds() -> None:
    run_ranks(check_between, 2, timeout_s=60)


def check_outer_traffic() -> None:
    """The slow axis carries each weight and each gradient once a step, cut by the inner axis."""
    model = sharded("hsdp_zero1")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        with Recorder() as recorder:
            gpt_loss(model, tokens_of(step, dist.get_rank())).backward()
        if step:
            # Three units: each once over the outer axis; inside, blocks twice and the root once.
            assert recorder.count("gathers") == 3 + 2 * 2 + 1
            assert recorder.count("reductions") == 2 * 3
        optimizer.step()
        optimizer.zero_grad()
    with Recorder() as recorder, torch.no_grad():
        gpt_loss(model, tokens_of(0, 0))
        gpt_loss(model, tokens_of(1, 0))
    assert recorder.count("gathers") == 3 + 2 * 3, "weights that stay go over the outer axis once"


def test_the_outer_axis_carries_each_weight_once_a_step() -> None:
    run_ranks(check_outer_traffic, 4, timeout_s=60)


def check_refusals() -> None:
    mesh = init_device_mesh("cpu", (2,))
    for options, text in [
        ({"sharding": "zero4"}, "must be one of ddp, zero1, zero2, zero3, hsdp, hsdp_zero1"),
        ({"sharding": "hsdp"}, "for a mesh of 2 axes, got 1; for that there are ddp and zero1"),
        ({"sharding": "zero2", "reshard_after_forward": True}, "leave out reshard_after_forward"),
        ({"accumulate": "whole"}, "accumulate must be 'unsharded' or 'sharded', got 'whole'"),
        ({"sharding": "zero1", "accumulate": "sharded"}, "use sharding='zero2'"),
        ({"sharding": "zero2", "accumulate": "unsharded"}, "use sharding='zero1'"),
        ({"sharding": "ddp", "accumulate": "sharded"}, "nothing is sharded there"),
    ]:
        with pytest.raises(ValueError, match=text):
            fully_shard(nn.Linear(2, 2), mesh=mesh, **options)


def test_what_the_table_does_not_have_is_refused() -> None:
    run_ranks(check_refusals, 2, timeout_s=60)


def step_by_step(sharding: str | None, mesh: DeviceMesh, **options: object) -> list[object]:
    """What is issued, and the bits, of two steps of three micro-batches."""
    model = sharded(sharding, mesh=mesh, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found: list[object] = []
    for batch in range(6):
        model.set_requires_gradient_sync(batch % 3 == 2)
        with Recorder() as recorder:
            loss = gpt_loss(model, tokens_of(batch, dist.get_rank()))
            loss.backward()
        found += [loss.item(), recorder.num_copied, recorder.num_operators]
        found += [(event.name, event.is_async) for event in recorder.events]
        if batch % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()
    return [*found, *(param.detach() for param in model.parameters())]


def check_default() -> None:
    """None is the named row, in all that is issued and in every bit."""
    for name, mesh in (("zero3", mesh_of("zero3")), ("hsdp", mesh_of("hsdp"))):
        for options in ({}, {"accumulate": "sharded"}, {"reshard_after_forward": False}):
            unnamed, named = (step_by_step(each, mesh, **options) for each in (None, name))
            assert len(unnamed) == len(named), (name, options)
            for one, other in zip(unnamed, named, strict=True):
                if isinstance(one, torch.Tensor):
                    assert torch.equal(one.full_tensor(), other.full_tensor())
                else:
                    assert one == other, (name, options)
    # What is named so is the same to ranks that compare their models, too.
    rows = {row_of(each, 1, None, None) for each in (None, "zero3")}
    assert len(rows) == 1


@pytest.mark.nightly
def test_nothing_named_is_zero3_on_one_axis_and_hsdp_on_two() -> None:
    run_ranks(check_default, 4, timeout_s=120)


def check_no_sync_of_fsdp2() -> None:
    """Without synchronization nothing is reduced, as with FSDP2, and the sums are the same."""
    gradients, counts = [], []
    for shard, options in (
        (torch_fully_shard, {}),
        (fully_shard, {}),
        (fully_shard, {"sharding": "zero3"}),
        (fully_shard, {"accumulate": "sharded"}),
    ):
        model = make(TinyGPT)
        for block in model.blocks:
            shard(block, **options)
        shard(model, **options)
        found = []
        for batch in range(3):
            model.set_requires_gradient_sync(batch == 2)
            loss = gpt_loss(model, tokens_of(batch, dist.get_rank()))
            with Recorder() as recorder:
                loss.backward()
            found.append(recorder.count("reductions"))
        counts.append(found)
        gradients.append({n: p.grad.full_tensor() for n, p in model.named_parameters()})
    assert counts == [[0, 0, 3], [0, 0, 3], [0, 0, 3], [3, 3, 3]]
    for found in gradients[1:]:
        for name, gradient in gradients[0].items():
            torch.testing.assert_close(found[name], gradient, rtol=1e-5, atol=1e-6, msg=name)


def test_no_sync_is_that_of_fsdp2_but_where_sharded_sums_are_asked_for() -> None:
    run_ranks(check_no_sync_of_fsdp2, 2, timeout_s=60)
