"""``grad_dtype`` of parameters: gradients of another dtype, from a kernel of a user to ``.grad``.

Expected is what plain modules give, whose leaves have a ``grad_dtype`` in any version of torch, and
FSDP2, which follows it since 2.15.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.utils.checkpoint import checkpoint

from vescale_fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    QuantizedReduce,
    clip_grad_norm_,
    fully_shard,
    unsharded,
)
from vescale_fsdp.compat import REDUCES_IN_OWN_DTYPE
from vescale_fsdp.engine import remesh
from vescale_fsdp.engine.unit import unit_of
from vescale_fsdp.testing import run_ranks

from .helpers import full, full_gradients, full_parameters
from .subclasses import Narrow

BF16, FP32, NARROW = torch.bfloat16, torch.float32, 2.0**-9  # half of the last digit of bf16
WIDTH = 8
Grads = dict[str, Tensor | None]


class Product(torch.autograd.Function):
    """``x @ w.T`` as of a fused kernel: the gradient of w is float32, whatever w is."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, w = ctx.saved_tensors
        return grad @ w, grad.float().t() @ x.float()


class Fused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH**0.5)
        self.bias = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        product: Tensor = Product.apply(x, self.weight)  # type: ignore[no-untyped-call]
        return x + product + self.bias


class Stack(nn.Module):
    """Blocks, each within a checkpoint if that is asked for."""

    def __init__(self, reentrant: bool | None = None) -> None:
        super().__init__()
        self.inner = nn.Sequential(Fused(), Fused())
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        for block in self.inner:
            if self.reentrant is None:
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x


def made(dtype: torch.dtype, grad_dtype: Any = "unset", reentrant: bool | None = None) -> Stack:
    """The same values on each rank. Weights have the ``grad_dtype``, biases none."""
    torch.manual_seed(0)
    model = Stack(reentrant).to(dtype)
    if grad_dtype != "unset":
        for block in model.inner:
            block.weight.grad_dtype = grad_dtype  # type: ignore[union-attr]
    return model


def batch(rank: int, micro: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(10 * rank + micro)
    return torch.randn(3, WIDTH, generator=generator).to(dtype).requires_grad_()


def backwards(
    model: Any, num_micro: int = 2, first: int = 0, switch: str = "gradient_sync"
) -> None:
    """Backwards of micro-batches; the last one synchronizes."""
    for micro in range(first, num_micro):
        getattr(model, f"set_requires_{switch}")(micro == num_micro - 1)
        dtype = next(model.parameters()).dtype
        model(batch(dist.get_rank(), micro, dtype)).float().square().sum().backward()


def plain_gradients(model: nn.Module, num_micro: int = 2) -> Grads:
    """The mean over the ranks of the gradients of a plain model."""
    total: Grads = {}
    dtype = next(model.parameters()).dtype
    for rank in range(dist.get_world_size()):
        model.zero_grad()
        for micro in range(num_micro):
            model(batch(rank, micro, dtype)).float().square().sum().backward()
        for name, param in model.named_parameters():
            assert param.grad is not None
            total[name] = param.grad / dist.get_world_size() + total.get(name, 0)  # type: ignore[operator]
    return total


def assert_like(found: Grads, expected: Grads) -> None:
    """Same dtypes; the same numbers, but for the order of sums."""
    assert list(found) == list(expected)
    for name, other in expected.items():
        own = found[name]
        assert own is not None
        assert other is not None
        tolerance = 1e-5 if other.dtype == FP32 else 4 * NARROW
        torch.testing.assert_close(own, other, rtol=tolerance, atol=tolerance, msg=name)
        if other.dtype == FP32:
            assert not torch.equal(own, own.bfloat16().float()), f"{name} was rounded"


def shard(model: Any, by: Any = fully_shard, **options: Any) -> Any:
    for block in model.inner:
        by(block, **options)
    return by(model, **options)


# Beside FSDP2


def gradients_by(by: Any, policy: MixedPrecisionPolicy, *kind: Any, num_micro: int) -> Grads:
    model = by(made(*kind), mp_policy=policy)
    backwards(model, num_micro)
    for param in model.parameters():
        assert param.grad.dtype == param.grad._local_tensor.dtype
    return full_gradients(model)


def check_dtypes() -> None:
    """All pairs of ``reduce_dtype`` and ``grad_dtype``, of parameters in two dtypes."""
    for at_rest in (FP32, BF16):
        for reduce_dtype in (None, FP32, BF16):
            policy = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=reduce_dtype)
            for grad_dtype in ("unset", FP32, BF16, None):
                kind = at_rest, grad_dtype
                found = gradients_by(fully_shard, policy, *kind, num_micro=2)
                weight, bias = found["inner.0.weight"], found["inner.0.bias"]
                expected = at_rest if grad_dtype == "unset" else grad_dtype or reduce_dtype or BF16
                assert weight is not None
                assert bias is not None
                assert (weight.dtype, bias.dtype) == (expected, at_rest), (kind, reduce_dtype)
                if not REDUCES_IN_OWN_DTYPE:  # FSDP2 knows no ``grad_dtype``
                    continue
                # Without both, FSDP2 sums in the dtype that arrives, which a rank without a
                # gradient cannot know.
                differs = grad_dtype is None and reduce_dtype is None
                theirs = gradients_by(torch_fully_shard, policy, *kind, num_micro=2)
                for name, other in theirs.items():
                    if not (differs and "weight" in name):
                        # One more rounding, where FSDP2 adds what it has rounded before.
                        assert other is not None
                        narrow = BF16 in (other.dtype, reduce_dtype)
                        unit = NARROW * 2 if narrow else 1e-6
                        torch.testing.assert_close(
                            found[name], other, rtol=unit, atol=unit * 8, msg=f"{name} {kind}"
                        )


# In all ways of running


Way = Callable[[], tuple[Any, int]]  # a model after its backwards, and their number


def by_options(options: dict[str, Any], num_micro: int, reentrant: bool | None = None) -> Way:
    def run() -> tuple[Any, int]:
        model = shard(made(BF16, FP32, reentrant), **options)
        switch = "all_reduce" if "mesh" in options and num_micro > 1 else "gradient_sync"
        backwards(model, num_micro, switch=switch)
        return model, num_micro

    return run


def ways() -> dict[str, Way]:
    replicas = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("r", "s"))
    found: dict[str, Way] = {
        f"{name}, {num} backwards": by_options(options, num)
        for name, options in {
            "zero3": {},
            "stays unsharded": {"reshard_after_forward": False},
            "zero2": {"sharding": "zero2"},
            "ddp": {"sharding": "ddp"},
            "replicas": {"mesh": replicas},
            "hsdp_zero1": {"mesh": replicas, "sharding": "hsdp_zero1"},
            "offload": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
            "zeros": {"unused": "zeros"},
        }.items()
        for num in (1, 2)
    }
    found["checkpoint"] = by_options({}, 2, reentrant=False)
    found["reentrant checkpoint"] = by_options({}, 2, reentrant=True)
    found["recomputed"] = by_options({"activations": "recompute"}, 2)
    return found


def check_ways() -> None:
    expected = {num: plain_gradients(made(BF16, FP32), num) for num in (1, 2)}
    for name, run in ways().items():
        model, num = run()
        try:
            assert_like(full_gradients(model), expected[num])
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error


def one_unit(reentrant: bool, seen: list[torch.dtype]) -> Any:
    """A unit whose blocks are checkpoints inside of it: these give gradients to leaves."""
    model = fully_shard(made(BF16, FP32, reentrant))
    weight = model.inner[0].weight
    weight.register_hook(lambda grad: seen.append(grad.dtype))
    return model


def check_inside() -> None:
    expected = plain_gradients(made(BF16, FP32), 2)
    for reentrant in (False, True):
        seen: list[torch.dtype] = []
        model = one_unit(reentrant, seen)
        backwards(model)
        assert_like(full_gradients(model), expected)
        assert set(seen) == {FP32}, "hooks get what the kernel has made"
        # It is dropped with the rest, and the next step is alike.
        model.zero_grad()
        backwards(model)
        assert_like(full_gradients(model), expected)


def check_compiled() -> None:
    found = []
    for shards in (False, True):
        torch._dynamo.reset()
        model = made(BF16, FP32)
        if shards:
            shard(model)
        for block in model.inner:
            block.compile(backend="aot_eager")
        if shards:
            backwards(model)
            found.append(full_gradients(model))
        else:
            found.append(plain_gradients(model))
    assert_like(found[1], found[0])


class Clamped(Fused):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.clamp_(-0.25, 0.25)
        return super().forward(x)


def check_writes() -> None:
    """A write in a forward is kept: what it sees has the version of the unsharded parameter."""
    model = Clamped().to(BF16)
    model.weight.grad_dtype = FP32
    fully_shard(model, reshard_after_forward=True)
    backwards(model)
    assert full(model.weight).abs().max() == 0.25


def check_codes() -> None:
    """Gradients that travel in 8 bits are summed and stored as ``grad_dtype`` says."""
    model = shard(made(BF16, FP32), reduce_codec=QuantizedReduce(8))
    backwards(model)
    expected = plain_gradients(made(BF16, FP32))
    for name, grad in full_gradients(model).items():
        assert grad is not None
        assert grad.dtype == expected[name].dtype  # type: ignore[union-attr]
        torch.testing.assert_close(grad, expected[name], rtol=0.05, atol=1.0)


def check_subclass() -> None:
    """A parameter that gathers itself, in bf16: set before, and after it was gathered once."""
    for later in (False, True):
        model = made(FP32)
        for block in model.inner:
            block.weight = nn.Parameter(Narrow(block.weight.detach()))  # type: ignore[arg-type]
        if not later:
            model.inner[0].weight.grad_dtype = BF16  # type: ignore[union-attr]
        shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=BF16))
        if later:
            model.inner[0].unshard()  # type: ignore[operator]
            model.inner[0].reshard()  # type: ignore[operator]
            model.inner[0].weight.grad_dtype = BF16  # type: ignore[union-attr]
        backwards(model)
        grads = [block.weight.grad for block in model.inner]
        assert [grad.dtype for grad in grads] == [BF16, FP32]  # type: ignore[union-attr]
        expected = plain_gradients(made(BF16))
        for grad, name in zip(grads, ("inner.0.weight", "inner.1.weight"), strict=True):
            other = expected[name]
            assert other is not None
            own = full(grad).float()  # type: ignore[arg-type]
            torch.testing.assert_close(own, other.float(), rtol=0.02, atol=0.05)


def check_unset_sums() -> None:
    """Without ``grad_dtype``, sums over micro-batches keep what the kernel has made, too."""
    policy = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=FP32)
    model = shard(made(FP32), mp_policy=policy)
    backwards(model)
    weight = full_gradients(model)["inner.1.weight"]
    assert weight is not None
    if REDUCES_IN_OWN_DTYPE:
        theirs = shard(made(FP32), torch_fully_shard, mp_policy=policy)
        backwards(theirs)
        other = full_gradients(theirs)["inner.1.weight"]
        torch.testing.assert_close(weight, other, rtol=1e-6, atol=1e-6)


def check_all_ways() -> None:
    check_ways()
    check_inside()
    check_writes()
    check_codes()
    check_subclass()
    check_unset_sums()


# What it survives


def converted(model: Any) -> Any:
    return model.float().to(BF16)


def emptied(model: Any) -> Any:
    state = {name: param.clone() for name, param in full_parameters(model).items()}  # type: ignore[union-attr]
    model.to_empty(device="cpu")
    model.load_state_dict(state)
    return model


def assigned(model: Any) -> Any:
    model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True)
    return model


def on_new_axes(model: Any) -> Any:
    state = full_parameters(model)
    remesh(model)
    model.load_state_dict(state)
    return model


def check_survives() -> None:
    expected = plain_gradients(made(BF16, FP32))
    changes: Sequence[Callable[[Any], Any]] = (
        converted, emptied, assigned, copy.deepcopy, on_new_axes,
    )  # fmt: skip
    for change in changes:
        for runs_before in (False, True):
            model = shard(made(BF16, FP32))
            if runs_before:
                backwards(model)
            else:
                model.unshard()
                model.reshard()
            model = change(model)
            assert model.inner[0].weight.grad_dtype == FP32
            model.zero_grad()
            backwards(model)
            assert_like(full_gradients(model), expected)
    # Parameters of a unit that is not called yet are released where a module is in two units.
    tied = made(BF16, FP32)
    tied.inner[1].weight = tied.inner[0].weight
    plain = copy.deepcopy(tied)
    plain.inner[0].weight.grad_dtype = FP32
    shard(tied)
    backwards(tied)
    assert_like(full_gradients(tied), plain_gradients(plain))


def check_set_later() -> None:
    """FSDP2 looks until the first forward; ours parts a group, if its parameters differ."""
    expected = plain_gradients(made(BF16, FP32))
    for library in (fully_shard, torch_fully_shard) if REDUCES_IN_OWN_DTYPE else (fully_shard,):
        for convert in (False, True):
            model = shard(made(BF16), library)
            for block in model.inner:
                block.weight.grad_dtype = FP32
            if convert:
                model.float().to(BF16)
            backwards(model)
            assert_like(full_gradients(model), expected)
            if library is fully_shard:
                unit = unit_of(model.inner[0])
                assert unit is not None
                assert len(unit.groups) == 2
                optimizer = torch.optim.SGD(model.parameters(), 0.1)
                optimizer.zero_grad()
                backwards(model)  # the parts are gathered, and reduced, in later steps too
                assert_like(full_gradients(model), expected)
    model = shard(made(BF16))  # all of a group: it stays as it is
    for param in model.parameters():
        param.grad_dtype = FP32
    with unsharded(model):
        pass
    backwards(model)
    unit = unit_of(model.inner[0])
    assert unit is not None
    assert len(unit.groups) == 1
    assert {param.grad.dtype for param in model.parameters()} == {FP32}


def check_uses() -> None:
    """Clipping, a penalty on shards, ``torch.autograd.grad`` by them, and a loss without a use."""
    norms = []
    for library in (fully_shard, torch_fully_shard) if REDUCES_IN_OWN_DTYPE else (fully_shard,):
        model = shard(made(BF16, FP32), library)
        backwards(model)
        clip = clip_grad_norm_ if library is fully_shard else nn.utils.clip_grad_norm_
        norms.append(float(full(clip(model.parameters(), 1.0))))
        norms.append(float(full(nn.utils.clip_grad_norm_(model.parameters(), 1e9))))
    grads = plain_gradients(made(BF16, FP32)).values()
    total = torch.stack([grad.float().norm() for grad in grads if grad is not None]).norm()
    assert norms[::2] == pytest.approx([float(total)] * len(norms[::2]), rel=1e-3)
    assert norms[1::2] == pytest.approx([1.0] * len(norms[1::2]), rel=1e-2)
    model = shard(made(BF16, FP32))
    weight = model.inner[0].weight
    loss = model(batch(dist.get_rank(), 0, BF16)).float().square().sum()
    (loss + weight.float().square().sum()).backward()
    both = full(weight.grad)
    model.zero_grad()
    (by_grad,) = torch.autograd.grad(
        model(batch(dist.get_rank(), 0, BF16)).float().square().sum(), [weight]
    )
    assert (weight.grad, by_grad.dtype) == (None, FP32)
    expected = plain_gradients(made(BF16, FP32), 1)["inner.0.weight"]
    assert expected is not None
    torch.testing.assert_close(full(by_grad), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(both, expected + 2 * full(weight).float(), rtol=1e-2, atol=1e-2)


def check_all_uses() -> None:
    check_survives()
    check_set_later()
    check_uses()


# Dynamo looks for ``.grad`` where there is none.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # by itself
@pytest.mark.parametrize("check", [check_dtypes, check_all_ways, check_all_uses, check_compiled])
def test_a_gradient_has_the_dtype_that_was_set(check: Callable[[], None]) -> None:
    run_ranks(check, 2, timeout_s=90)
