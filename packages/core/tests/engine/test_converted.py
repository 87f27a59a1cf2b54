"""``.half()`` and ``.float()`` between micro-batches keep gradients, also those that wait.

Expected is what one process gives, and FSDP2 of torch 2.15 where it can go on after a conversion:
where ``param_dtype`` fixes the dtype of compute. (Without it, its all-gather raises.)
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from vescale_fsdp import MixedPrecisionPolicy, fully_shard
from vescale_fsdp.compat import REDUCES_IN_OWN_DTYPE
from vescale_fsdp.testing import run_ranks

from .helpers import full

FP16, BF16, FP32, FP64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
CONVERSIONS = {"half": FP16, "bfloat16": BF16, "float": FP32, "double": FP64}
MIXED = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=FP32)
UNIT = {FP16: 2.0**-10, BF16: 2.0**-7, FP32: 2.0**-20, FP64: 2.0**-20}  # there are sums in FP32


def made(dtype: torch.dtype, grad_dtype: torch.dtype | None) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to(dtype)
    for param in model.parameters() if grad_dtype else ():
        param.grad_dtype = grad_dtype
    return model


def loss(model: nn.Module, rank: int, micro: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * rank + micro)
    dtype = next(model.parameters()).dtype
    x = torch.randn(3, 4, generator=generator).to(dtype)
    value: Tensor = model(x).float().square().sum()
    return value


def sharded_gradients(
    by: Any, dtype: torch.dtype, grad_dtype: Any, name: str, num_waiting: int, **options: Any
) -> list[Tensor]:
    """Gradients after three backwards, of which the first ones wait, and a conversion."""
    model: Any = made(dtype, grad_dtype)
    by(model[0], **options)
    by(model, **options)
    for micro in range(3):
        is_last = micro >= num_waiting
        if "mesh" in options:  # partial sums wait for the other replicas
            model.set_requires_all_reduce(is_last)
        else:
            model.set_requires_gradient_sync(is_last)
        loss(model, dist.get_rank(), micro).backward()
        if micro == 1:
            getattr(model, name)()
    for param in model.parameters():
        assert param.dtype == CONVERSIONS[name]
        assert param.grad.dtype == param.grad._local_tensor.dtype
    return [full(param.grad) for param in model.parameters()]


def plain_gradients(dtype: torch.dtype, name: str, computes: torch.dtype | None) -> list[Tensor]:
    """The same in one process, in float64, of inputs and weights that are rounded alike."""
    total: dict[str, Tensor] = {}
    for rank in range(dist.get_world_size()):
        model = made(dtype, None)
        for micro in range(3):
            twin = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).double()
            own = model.state_dict()
            twin.load_state_dict({k: v.to(computes or v.dtype).double() for k, v in own.items()})
            loss(twin, rank, micro).backward()
            for key, param in twin.named_parameters():
                assert param.grad is not None
                total[key] = total.get(key, torch.zeros(())) + param.grad / dist.get_world_size()
            if micro == 1:
                getattr(model, name)()
    return list(total.values())


def check(replicates: bool) -> None:
    options: dict[str, Any] = {}
    if replicates:
        options["mesh"] = init_device_mesh("cpu", (2, 2), mesh_dim_names=("r", "s"))
    names = {FP32: ("half", "bfloat16", "double"), BF16: ("float", "half")}
    for dtype in (FP32, BF16) if not replicates else (FP32,):
        for name in names[dtype]:
            for policy in (MixedPrecisionPolicy(), MIXED):
                for grad_dtype in (None, FP32):
                    for num_waiting in (2, 0) if not replicates else (2,):
                        case = dtype, grad_dtype, name, num_waiting
                        found = sharded_gradients(fully_shard, *case, mp_policy=policy, **options)
                        compare(found, case, policy)
                        if REDUCES_IN_OWN_DTYPE and policy is MIXED and dtype == FP32:
                            theirs = sharded_gradients(
                                torch_fully_shard, *case, mp_policy=policy, **options
                            )
                            for own, other in zip(found, theirs, strict=True):
                                unit = UNIT[other.dtype]
                                torch.testing.assert_close(own, other, rtol=unit, atol=unit)


def compare(found: list[Tensor], case: Any, policy: MixedPrecisionPolicy) -> None:
    dtype, grad_dtype, name, _ = case
    converted = CONVERSIONS[name]
    expected = plain_gradients(dtype, name, policy.param_dtype)
    # Torch before 2.15 cannot tell the dtype of the parameter itself from none.
    is_known = grad_dtype is not None and (REDUCES_IN_OWN_DTYPE or grad_dtype != dtype)
    widest = max(UNIT[each] for each in (dtype, converted, policy.param_dtype or converted))
    for own, other in zip(found, expected, strict=True):
        assert own.dtype == (grad_dtype if is_known else converted), case
        atol = 8 * widest * float(other.abs().max())  # a few roundings of the largest ones
        torch.testing.assert_close(own.double(), other, rtol=0, atol=atol, msg=str(case))


class Optional(nn.Module):
    """Its second layer is used by one rank, or by all."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.is_short = nn.Linear(4, 4), nn.Linear(4, 4), False

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return x if self.is_short else self.second(x)


def check_one_rank() -> None:
    """What waits on one rank alone is sent in the dtype in which the others send nothing."""
    for name in ("half", "double"):
        torch.manual_seed(0)
        model: Any = Optional()
        fully_shard(model.second)
        fully_shard(model)
        for micro in range(2):
            model.set_requires_gradient_sync(micro == 1)
            model.is_short = micro == 1 or dist.get_rank() == 1
            loss(model, dist.get_rank(), micro).backward()
            if micro == 0:
                getattr(model, name)()
        grad = full(model.second.bias.grad)
        torch.manual_seed(0)
        plain = Optional()
        loss(plain, 0, 0).backward()
        wanted = plain.second.bias.grad
        assert wanted is not None
        dtype = CONVERSIONS[name]
        torch.testing.assert_close(grad, (wanted / 2).to(dtype), rtol=2e-3, atol=2e-3)


def check_on_two() -> None:
    check(False)
    check_one_rank()


def test_gradients_that_wait_survive_conversions() -> None:
    run_ranks(check_on_two, 2, timeout_s=60)


def test_partial_sums_of_replicas_survive_conversions() -> None:
    run_ranks(check, 4, True, timeout_s=60)
