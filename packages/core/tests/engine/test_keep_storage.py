"""``set_keep_unsharded_storage``: a reshard leaves memory where it is, as in FSDP2 of 2.15."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp
from torch import Tensor, nn

from .libraries import LIBRARIES, Library, Observe, Outcomes, layers, observe_all, ones, sees

HAS_IT = hasattr(torch.distributed.fsdp.FSDPModule, "set_keep_unsharded_storage")
WORLD_SIZE = 4
SEEN: dict[Observe, Any] = {}  # what each function says, with either library


def made(library: Library, **options: Any) -> Any:
    """Two units in a root of one parameter.

    On Linux CPUs a region has its address for ever. Here it is resized to nothing and back, as on
    an accelerator, where the address may be another one then.
    """
    patch = mock.patch("vescale_fsdp.dbuffer.memory._is_mapped", return_value=False)
    with patch:
        model = nn.Sequential(*layers(2), nn.PReLU(4))
        return library.shard(model, *model[:2], **options)


def taken(module: Any) -> int:
    """The bytes of an unsharded weight after the reshard."""
    module.unshard()
    storage = module.weight.untyped_storage()
    module.reshard()
    return int(storage.nbytes())


class Addresses:
    """Where the weights of the units are in each of their forwards."""

    def __init__(self, model: Any) -> None:
        self.of: list[set[int]] = []
        self._taken: list[Tensor] = []
        for layer in model[:2]:
            seen: set[int] = set()
            self.of.append(seen)
            layer.register_forward_pre_hook(lambda module, _, seen=seen: self._look(module, seen))

    def _look(self, module: nn.Module, seen: set[int]) -> None:
        seen.add(module.weight.data_ptr())  # type: ignore[union-attr,operator]
        self._taken += [torch.empty(size) for size in (16, 20, 40)]  # what was freed, if anything


def train(model: Any, num_steps: int = 3) -> list[Any]:
    """The gradients of each step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []
    for step in range(num_steps):
        model(ones() * (dist.get_rank() + step)).square().sum().backward()
        seen.append([param.grad.full_tensor().tolist() for param in model.parameters()])
        optimizer.step()
        optimizer.zero_grad()
    return seen


@sees(SEEN, [[1, 1], True])
def addresses_stay_over_steps(library: Library) -> Any:
    model = made(library)
    model.set_keep_unsharded_storage(True)
    addresses = Addresses(model)
    gradients = train(model)
    torch.manual_seed(0)
    gives_the_same = gradients == train(made(library))
    return [[len(each) for each in addresses.of], gives_the_same]


@sees(SEEN, [[1, 1], True])
def addresses_stay_where_a_part_is_kept_for_the_backward(library: Library) -> Any:
    model = made(library, reshard_after_forward=2)
    model.set_keep_unsharded_storage(True)
    addresses = Addresses(model)
    gradients = train(model)
    torch.manual_seed(0)
    gives_the_same = gradients == train(made(library, reshard_after_forward=2))
    return [[len(each) for each in addresses.of], gives_the_same]


@sees(SEEN, [False, True, True, False])
def memory_is_kept_until_it_is_switched_off(library: Library) -> Any:
    model = made(library)
    before = taken(model[0])
    model.set_keep_unsharded_storage(True)
    kept = [taken(model[0]), taken(model[0])]
    model.set_keep_unsharded_storage(False)
    return [each > 0 for each in (before, *kept, taken(model[0]))]


@sees(SEEN, [True, False, True, True])
def it_can_be_set_for_all_or_one(library: Library) -> Any:
    model = made(library)
    model[0].set_keep_unsharded_storage(True)
    first = [taken(model[0]) > 0, taken(model[1]) > 0]
    model.set_keep_unsharded_storage(True)
    model.set_keep_unsharded_storage(False, recurse=False)
    return [*first, taken(model[0]) > 0, taken(model[1]) > 0]


def it_survives_a_conversion(library: Library) -> Any:
    model = made(library)
    model.set_keep_unsharded_storage(True)
    kept = [taken(model[0])]
    model.to(torch.float64)
    kept.append(taken(model[0]))
    model.half().float()
    return [*kept, taken(model[0]), taken(model[1])]


@pytest.fixture(scope="module")
def outcomes() -> Outcomes:
    return observe_all([*SEEN, it_survives_a_conversion], WORLD_SIZE)


@pytest.mark.parametrize("observe", SEEN, ids=lambda observe: observe.__name__)
@pytest.mark.parametrize("library", LIBRARIES)
def test_both_keep_memory(outcomes: Outcomes, observe: Observe, library: str) -> None:
    if library == "fsdp2" and not HAS_IT:
        pytest.skip("since torch 2.15")
    assert outcomes[library, observe.__name__] == [("returned", SEEN[observe])] * WORLD_SIZE


def test_a_conversion_does_not_switch_it_off(outcomes: Outcomes) -> None:
    (first, *_), *_ = [found for _, found in outcomes["ours", "it_survives_a_conversion"]]
    assert first > 0
    for outcome in outcomes["ours", "it_survives_a_conversion"]:
        assert outcome == ("returned", [first, 2 * first, first, first])
