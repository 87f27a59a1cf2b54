"""What is kept between forward and backward, and where shards rest."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import CPUOffloadPolicy

from vescale_fsdp import RankMismatchError, fully_shard
from vescale_fsdp.engine.unit import unit_of
from vescale_fsdp.testing import run_ranks

from .helpers import averaged_gradients, full_gradients, shard_units
from .models import MLP, inputs_of, make
from .recorders import Recorder


def check_parts(size: int) -> None:
    rank = dist.get_rank()
    plain, model = make(MLP), make(MLP)
    shard_units(model, model.layers, reshard_after_forward=size)
    (group,) = unit_of(model.layers[0]).groups
    for number in range(3):
        plain.zero_grad()
        model.zero_grad()
        plain(inputs_of(number, rank)).sum().backward()
        out = model(inputs_of(number, rank))
        assert group.is_sharded
        assert group._part.numel() == group.layout.total_size // size
        with Recorder() as recorder:
            out.sum().backward()
        assert recorder.count("gathers") == 3
        assert group._part is None
        expected = averaged_gradients(plain)
        for name, gradient in full_gradients(model).items():
            torch.testing.assert_close(gradient, expected[name], rtol=1e-5, atol=1e-6, msg=name)
        with torch.no_grad():
            assert torch.equal(model(inputs_of(number, 0)), plain(inputs_of(number, 0)))
        assert group._part is None  # without gradients nothing comes back for it


def test_an_int_keeps_a_part_on_each_of_so_many_neighbours() -> None:
    run_ranks(check_parts, 4, 2)


def check_stale_part() -> None:
    model = make(MLP, 1)
    fully_shard(model, reshard_after_forward=2)
    x = inputs_of(0, 0)
    model(x)  # no backward: the part that was kept is of no use
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    out = model(x)
    assert torch.equal(out, torch.zeros_like(out))
    out.sum().backward()


def test_a_part_that_no_backward_took_is_dropped() -> None:
    run_ranks(check_stale_part, 4)


def check_sizes() -> None:
    with pytest.raises(ValueError, match="it should be a factor of 4, not 3"):
        fully_shard(MLP(), reshard_after_forward=3)
    with pytest.warns(UserWarning, match="reshard_after_forward=1"):
        model = fully_shard(MLP(), reshard_after_forward=1)
    assert unit_of(model).reshard_after_forward is False
    model = fully_shard(MLP(), reshard_after_forward=4)
    assert (unit_of(model).reshard_after_forward, unit_of(model).num_parts) == (True, 1)


def test_the_int_is_a_factor_of_the_number_of_ranks() -> None:
    run_ranks(check_sizes, 4)


def check_offload() -> None:
    rank = dist.get_rank()
    plain, model = make(MLP), make(MLP)
    policy = CPUOffloadPolicy(pin_memory=False)
    shard_units(model, model.layers, offload_policy=policy)
    plain(inputs_of(0, rank)).sum().backward()
    model(inputs_of(0, rank)).sum().backward()
    expected = averaged_gradients(plain)
    for name, gradient in full_gradients(model).items():
        assert torch.equal(gradient, expected[name]), name
    assert all(p.to_local().device.type == "cpu" for p in model.parameters())
    if not torch.accelerator.is_available():
        with pytest.raises(RuntimeError, match="Cannot access accelerator device when none is"):
            fully_shard(MLP(), offload_policy=CPUOffloadPolicy())
    with pytest.raises(TypeError, match="offload_policy must be an OffloadPolicy, got True"):
        fully_shard(MLP(), offload_policy=True)


def test_offloaded_shards_rest_on_the_cpu() -> None:
    run_ranks(check_offload, 2)


def check_disagreement() -> None:
    model = fully_shard(make(MLP, 1), reshard_after_forward=2 if dist.get_rank() else True)
    with pytest.raises(RankMismatchError, match=r"in 1 parts.* and rank 1 has .*in 2 parts"):
        model(inputs_of(0, 0))


def test_ranks_that_keep_different_parts_are_told() -> None:
    run_ranks(check_disagreement, 4)
