"""Settings without an effect warn once, where a user gives them; all others are silent."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from vescale_fsdp import fully_shard
from vescale_fsdp.testing import run_ranks

from .helpers import shard_units
from .models import MLP, inputs_of, make


@contextmanager
def warnings_of() -> Any:
    """The texts of what is warned of in the block, by a list that is filled at its end."""
    texts: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        yield texts
    assert all(each.filename == __file__ for each in caught), caught
    texts += [str(each.message) for each in caught]


def sharded(**options: Any) -> MLP:
    model = make(MLP)
    shard_units(model, model.layers, **options)
    return model


def step(model: nn.Module) -> None:
    model(inputs_of(0, dist.get_rank())).sum().backward()


WITHOUT_EFFECT: list[tuple[str, Callable[[Any], None]]] = [
    ("each backward waits for its own", lambda m: m.set_is_last_backward(False)),
    ("communicators of their own", lambda m: m.set_separate_reduce_scatter_group()),
    ("all-gathers are always asynchronous", lambda m: m._set_unshard_async_op(True)),
    ("parameters are on the CPU", lambda m: m.set_post_optim_event(torch.cpu.Event())),
    ("are always sums", lambda m: m.layers[0].set_force_sum_reduction_for_comms(True)),
    (
        "not queued on streams",
        lambda m: m.layers[0].set_all_reduce_hook(lambda _: None, stream=torch.cpu.Stream()),
    ),
    (
        "allocates no memory",
        lambda m: m.layers[0].set_allocate_memory_from_process_group_for_comm(True),
    ),
]

WITH_EFFECT: list[Callable[[Any], None]] = [
    lambda m: m.set_requires_gradient_sync(False),
    lambda m: m.set_requires_gradient_sync(True),
    lambda m: m.set_requires_all_reduce(True),
    lambda m: m.set_reshard_after_forward(True),
    lambda m: m.set_reshard_after_backward(False),
    lambda m: m.set_modules_to_forward_prefetch([m.layers[1]]),
    lambda m: m.set_modules_to_backward_prefetch([m.layers[1]]),
    lambda m: m.set_gradient_divide_factor(2.0),
    lambda m: m.set_reduce_scatter_max_input_buffers(2),
    lambda m: m.set_reduce_scatter_unused_params(True),
    lambda m: m.set_force_sum_reduction_for_comms(False),
    lambda m: m.set_all_reduce_hook(lambda _: None),
    lambda m: m.set_unshard_in_backward(True),
    lambda m: m.layers[0].set_allocate_memory_from_process_group_for_comm(False),
]


def check_setters() -> None:
    for has_run in (False, True):
        model = sharded()
        if has_run:
            step(model)
        for why, call in WITHOUT_EFFECT:
            with warnings_of() as found:
                for _ in range(3):
                    call(model)
            assert len(found) == 1, (why, found)
            assert " has no effect here: " in found[0]
            assert why in found[0]
        with warnings_of() as found:
            for call in WITH_EFFECT:
                call(model)
            step(model)
        assert found == []


def test_a_setter_without_effect_warns_once_and_says_why() -> None:
    run_ranks(check_setters, 2)


def check_clients() -> None:
    model = sharded()
    for package in ("torch", "accelerate", "transformers", "lightning"):
        client = ModuleType(f"{package}.of_a_test")
        source = "def call(model):\n    model.set_is_last_backward(True)\n"
        exec(source, client.__dict__)
        with warnings_of() as found:
            client.call(model)
        assert found == [], package
    assert "torch.of_a_test" not in sys.modules


def test_libraries_that_call_setters_by_themselves_do_not_warn() -> None:
    run_ranks(check_clients, 2)


def check_arguments_below_the_root() -> None:
    for name, value, there in (
        ("in_flight", 4, 2),
        ("unused", "zeros", "auto"),
        ("broadcast_buffers", True, False),
    ):
        model = make(MLP)
        for layer in model.layers:
            fully_shard(layer, **{name: value})
        fully_shard(model)
        with warnings_of() as found:
            step(model)
            step(model)
        (text,) = found
        assert text.startswith(f"fully_shard: {name}={value!r} of 'layers.0' (and 2 more)")
        assert f"the outermost module (MLP); the root has {name}={there!r}" in text
        for options in ({"all": True}, {"all": False}):  # all units, or the root alone
            model = make(MLP)
            for layer in model.layers:
                fully_shard(layer, **({name: value} if options["all"] else {}))
            fully_shard(model, **{name: value})
            with warnings_of() as found:
                step(model)
            assert found == []


def check_setters_below_the_root() -> None:
    text = "set_reduce_scatter_unused_params of 'layers.1' has no effect: call it on the root"
    model = sharded()
    model.layers[1].set_reduce_scatter_unused_params(True)
    with warnings_of() as found:
        step(model)
    assert len(found) == 1
    assert found[0].startswith(text)
    with warnings_of() as found:
        model.layers[1].set_reduce_scatter_unused_params(True)
    (text,) = found
    assert "this is 'layers.1'" in text
    assert "the outermost module (MLP)" in text
    model.set_reduce_scatter_unused_params(True)
    with warnings_of() as found:
        model.layers[1].set_reduce_scatter_unused_params(True)
    assert found == [], "the root's is the same"
    zeros = sharded(unused="zeros")
    with warnings_of() as found:
        zeros.set_reduce_scatter_unused_params(False)
    assert "unused='zeros', which has precedence" in found[0]


def test_settings_of_roots_warn_on_other_units() -> None:
    run_ranks(check_arguments_below_the_root, 2)
    run_ranks(check_setters_below_the_root, 2)


@pytest.mark.parametrize("value", [0, -1, 1.0, True, "2", None])
def test_in_flight_is_an_int_of_at_least_1(value: object) -> None:
    run_ranks(check_in_flight, 1, value)


def check_in_flight(value: Any) -> None:
    mesh = init_device_mesh("cpu", (1,))
    with pytest.raises(ValueError, match="in_flight must be an int of at least 1, got"):
        fully_shard(nn.Linear(2, 2), mesh=mesh, in_flight=value)
