"""All of ``torch.nn.init``, and copies of plain tensors: as of one process, on all ranks.

Initialisers without an operator of their own run on the whole tensor, which is gathered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.nn import init

from vescale_fsdp import Granularity, RaggedTensor, fully_shard
from vescale_fsdp.ragged import wrap_replicated
from vescale_fsdp.testing import run_ranks

from .helpers import make_mesh, random
from .layouts import counted_collectives, layouts_of, same, whole_of

INITIALISERS: dict[str, Callable[[Tensor], object]] = {
    "uniform_": lambda w: init.uniform_(w, -1, 2),
    "normal_": lambda w: init.normal_(w, 1.0, 2.0),
    "trunc_normal_": lambda w: init.trunc_normal_(w, std=0.5),
    "trunc_normal_, in the tail": lambda w: init.trunc_normal_(w, std=1.0, a=1.5, b=2.0),
    "constant_": lambda w: init.constant_(w, 3.0),
    "ones_": init.ones_,
    "zeros_": init.zeros_,
    "xavier_uniform_": lambda w: init.xavier_uniform_(w, gain=2.0),
    "xavier_normal_": init.xavier_normal_,
    "kaiming_uniform_": lambda w: init.kaiming_uniform_(w, a=5**0.5),
    "kaiming_normal_": lambda w: init.kaiming_normal_(w, mode="fan_out"),
    "orthogonal_": init.orthogonal_,
    "orthogonal_ with gain": lambda w: init.orthogonal_(w, gain=2.0),
    "columns": lambda w: w[:, 1:3].normal_(),
    "rows": lambda w: w[1:3].uniform_(),
    "transposed": lambda w: w.transpose(0, 1).bernoulli_(0.5),
}
OF_MATRICES: dict[str, Callable[[Tensor], object]] = {
    "eye_": init.eye_,
    "sparse_": lambda w: init.sparse_(w, 0.4, std=1.0),
}
OF_KERNELS: dict[str, Callable[[Tensor], object]] = {
    "dirac_": init.dirac_,
    "dirac_ of groups": lambda w: init.dirac_(w, groups=2),
}
SHAPES = [(6, 4), (4, 6), (2, 3, 2, 2)]


def initialisers(shape: tuple[int, ...]) -> Iterator[tuple[str, Callable[[Tensor], object]]]:
    yield from INITIALISERS.items()
    yield from (OF_MATRICES if len(shape) == 2 else OF_KERNELS).items()


def replicated(whole: Tensor) -> DTensor:
    made = DTensor.from_local(whole.clone(), make_mesh(), [Replicate()], run_check=False)
    return wrap_replicated(made.to_local(), made._spec)


@torch.no_grad()
def check_initialisers() -> None:
    """The ranks are seeded differently: the first rank's state counts."""
    for shape in SHAPES:
        for name, initialise in initialisers(shape):
            torch.manual_seed(11)
            expected = torch.zeros(shape)
            initialise(expected)
            whole = torch.zeros(shape)
            for x in [*layouts_of(whole), replicated(whole)]:
                # It writes to places that each rank draws, of what each rank has.
                are_alike = name == "sparse_" and not isinstance(x, RaggedTensor)
                torch.manual_seed(11 if are_alike else 11 + dist.get_rank())
                initialise(x)
                same(x, expected, (name, shape, x.placements))
                assert torch.equal(whole_of(x), of_first_rank(whole_of(x))), name


def of_first_rank(tensor: Tensor) -> Tensor:
    received = tensor.clone()
    dist.broadcast(received, 0)
    return received


@pytest.mark.parametrize("world_size", [1, 2])
def test_initialisers_are_those_of_one_process(world_size: int) -> None:
    run_ranks(check_initialisers, world_size)


def check_modules() -> None:
    def make() -> nn.Sequential:
        return nn.Sequential(nn.Conv2d(2, 3, 2), nn.Linear(5, 4, bias=False), nn.Linear(1, 1))

    @torch.no_grad()
    def initialise(model: nn.Sequential) -> None:
        init.orthogonal_(model[0].weight)
        init.sparse_(model[1].weight, 0.5)
        model[1].weight[:, 1:3].normal_()
        model[1].weight[0].copy_(torch.arange(5.0))
        init.eye_(model[2].weight)
        for name in ("0.bias", "2.bias"):
            model.get_parameter(name).data.copy_(torch.ones(model.get_parameter(name).shape))

    torch.manual_seed(5)
    expected = make()
    torch.manual_seed(5)
    initialise(expected)
    for granularity in (None, Granularity.rows(2), Granularity.whole()):
        with torch.device("meta"):
            model = make()
        fully_shard(model, granularity=granularity)
        initialise_on_meta(model, initialise)
        model.to_empty(device="cpu")
        torch.manual_seed(5 + dist.get_rank())
        initialise(model)
        for (name, found), param in zip(
            model.named_parameters(), expected.parameters(), strict=True
        ):
            assert found.requires_grad
            assert found.is_leaf
            same(found.detach(), param.detach(), (name, granularity))


def initialise_on_meta(model: nn.Module, initialise: Callable[[nn.Module], None]) -> None:
    """Nothing is sent."""
    with counted_collectives() as seen:
        initialise(model)
    assert seen == []


def test_modules_from_meta_are_initialised_as_by_one_process() -> None:
    run_ranks(check_modules, 2)


# --- copies of plain tensors ----------------------------------------------------------------------

NUMBERS = torch.arange(24.0).view(6, 4)
PLACES = torch.tensor([4, 1])
COPIES: dict[str, Callable[[Tensor, Tensor], object]] = {
    "to all": lambda w, plain: w.copy_(plain),
    "to the data": lambda w, plain: w.data.copy_(plain),
    "of another dtype": lambda w, plain: w.copy_(plain.double()),
    "of one row to all": lambda w, plain: w.copy_(plain[2]),
    "to rows": lambda w, plain: w[2:5].copy_(plain[:3]),
    "to a row": lambda w, plain: w.__setitem__(1, plain[3]),
    "to columns": lambda w, plain: w[:, 1:3].copy_(plain[:, 2:]),
    "of one row to columns": lambda w, plain: w.__setitem__(
        (slice(None), slice(2, 4)), plain[1, :2]
    ),
    "to the transposed": lambda w, plain: w.T.copy_(plain.T),
    "to places": lambda w, plain: w.__setitem__(PLACES, plain[:2]),
    "to places in a column": lambda w, plain: w[:, 1].__setitem__(PLACES, plain[0, 1:3]),
    "to elements": lambda w, plain: w.__setitem__((PLACES, PLACES - 1), plain[0, 1:3]),
    "of a number to places": lambda w, plain: w.__setitem__((PLACES, 2), 7.0),
    "to a plain mask": lambda w, plain: w.__setitem__(plain % 3 == 2, 7.0),
    "to a ragged mask": lambda w, plain: w.__setitem__(w < 0, plain.view(-1)[: int((w < 0).sum())]),
    "index_copy_": lambda w, plain: w.index_copy_(0, PLACES, plain[:2]),
    "index_fill_": lambda w, plain: w.index_fill_(1, PLACES // 2, 3.0),
}


@torch.no_grad()
def check_copies() -> None:
    """The plain tensors of ranks differ: those of the first rank are taken."""
    for name, copy in COPIES.items():
        expected = random((6, 4))
        copy(expected, NUMBERS)
        for x in layouts_of(random((6, 4))):
            version = x._local_tensor._version
            copy(x, NUMBERS + 3 * dist.get_rank())
            same(x, expected, (name, x.placements), rtol=0)
            assert x._local_tensor._version > version, name


def test_copies_have_the_values_of_the_first_rank() -> None:
    run_ranks(check_copies, 2)


def check_refused() -> None:
    for x in layouts_of(random((6, 4))):
        with counted_collectives() as seen:
            with pytest.raises(RuntimeError, match="expanded size"):
                x.copy_(torch.ones(5, 4))
            with pytest.raises(ValueError, match="a plain tensor of shape"):
                (x * 1).copy_(torch.ones(6, 4, requires_grad=True))
            for attempt in (
                lambda x=x: x.index_put_((PLACES,), torch.ones(2, 4), accumulate=True),
                lambda x=x: x[:, 1].add_(torch.ones(6)),
            ):
                with pytest.raises(NotImplementedError, match="may differ between ranks"):
                    attempt()
            with (
                torch.no_grad(),
                pytest.raises(NotImplementedError, match="shape of a sharded parameter"),
            ):
                nn.Parameter(x).t_()
        assert seen == []
        same(x, random((6, 4)))


def test_what_computes_with_plain_tensors_is_refused_before_communication() -> None:
    run_ranks(check_refused, 2)


@torch.no_grad()
def check_turned() -> None:
    for x in layouts_of(random((6, 4))):
        turned, expected = x.detach(), random((6, 4))
        assert turned.t_() is turned
        turned.mul_(2)
        turned.unsqueeze_(0).squeeze_(0)
        same(turned, expected.T * 2)
        same(x, expected * 2)  # it is a view
        turned.t_()
        same(turned, expected * 2)


def test_a_tensor_that_is_transposed_in_place_is_a_view() -> None:
    run_ranks(check_turned, 2)
