"""What is routed in torch does not depend on who has imported torch's functions before."""

from __future__ import annotations

import inspect
import subprocess
import sys

import torch
from torch.distributed.tensor import DTensor, distribute_tensor

# Every function of torch that `compat` routes, under names from before `vescale_fsdp` is imported.
SCRIPT = """
import inspect
import torch, torch.distributed as dist
from torch.distributed._state_dict_utils import _distribute_tensors
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions, _broadcast_state_dict, _distribute_state_dict, _init_optim_state,
    set_model_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
redistribute = DTensor.redistribute
functions = [distribute_tensor, redistribute, _distribute_tensors, _broadcast_state_dict,
             _distribute_state_dict, _init_optim_state]
signatures = [inspect.signature(f) for f in functions]

from vescale_fsdp import RaggedShard, RaggedTensor, fully_shard, optim

assert [inspect.signature(f) for f in functions] == signatures
dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
mesh, whole = init_device_mesh("cpu", (1,)), torch.arange(6.0).view(3, 2)
cut = [RaggedShard((0,), (1,))]
x = distribute_tensor(whole, mesh, cut)
assert type(x) is RaggedTensor, type(x)
assert type(distribute_tensor(whole, mesh, placements=cut, src_data_rank=None)) is RaggedTensor
plain = distribute_tensor(whole, mesh)
assert type(plain) is DTensor and plain.placements == (Replicate(),)
assert type(redistribute(plain, placements=cut)) is RaggedTensor
assert redistribute(plain, mesh, [Shard(0)]).placements == (Shard(0),)
for load in (_broadcast_state_dict, _distribute_state_dict):
    number = distribute_tensor(torch.tensor(0.0), mesh, [RaggedShard((), (1,))])
    local = {"x": x * 0, "number": number}
    load({"x": whole, "number": torch.tensor(3.0)}, local, device=torch.device("cpu"))
    assert type(local["x"]) is type(local["number"]) is RaggedTensor, local
    assert torch.equal(local["x"].full_tensor(), whole) and local["number"].item() == 3
model = fully_shard(torch.nn.Linear(2, 3), mesh=mesh)
full = {"weight": whole, "bias": torch.ones(3)}
set_model_state_dict(model, full, options=StateDictOptions(full_state_dict=True))
assert torch.equal(model.weight.full_tensor(), whole)
group = optim.OptimizerGroup(
    [torch.optim.Adam([model.weight]), torch.optim.SGD([model.bias], lr=1.0, momentum=0.9)]
)
_init_optim_state(group)
assert all(each.state for each in group.optimizers.values())
dist.destroy_process_group()
print("as it should be")
"""


def test_functions_that_were_imported_before_take_our_placements() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120, check=False
    )
    assert "as it should be" in ran.stdout, ran.stderr


def test_routed_functions_look_like_those_of_torch() -> None:
    assert list(inspect.signature(distribute_tensor).parameters) == [
        "tensor",
        "device_mesh",
        "placements",
        "src_data_rank",
    ]
    assert distribute_tensor.__module__.startswith("torch.")
    assert distribute_tensor is torch.distributed.tensor.distribute_tensor
    assert DTensor.redistribute.__name__ == "redistribute"
