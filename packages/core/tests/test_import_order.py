"""What is wrapped in torch: who has imported it before, and a torch that has it otherwise."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest
from torch.distributed.checkpoint import HuggingFaceStorageWriter
from torch.distributed.tensor import DTensor, _utils

from vescale_fsdp import compat

# Torch's own functions, which users may have by names from before `vescale_fsdp` is imported.
SCRIPT = """
import torch, torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor, zeros

from vescale_fsdp import RaggedShard, RaggedTensor, fully_shard, ragged

dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
mesh, whole = init_device_mesh("cpu", (1,)), torch.arange(6.0).view(3, 2)
cut = [RaggedShard((0,), (1,))]
x = ragged.distribute_tensor(whole, mesh, cut)
made = DTensor.from_local(
    x.to_local(), mesh, cut, run_check=False, shape=whole.shape, stride=whole.stride()
)
assert type(made) is RaggedTensor, type(made)
model = fully_shard(torch.nn.Linear(2, 3), mesh=mesh)
full = {"weight": whole, "bias": torch.ones(3)}
options = StateDictOptions(full_state_dict=True)
for refused in (
    lambda: distribute_tensor(whole, mesh, cut),
    lambda: zeros(3, 2, device_mesh=mesh, placements=cut),
    lambda: set_model_state_dict(model, full, options=options),
    lambda: set_model_state_dict(
        model, full, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    ),
):
    try:
        refused()
    except (RuntimeError, NotImplementedError):
        pass
    else:
        raise AssertionError("torch would go on")
assert type(zeros(3, 2, device_mesh=mesh, placements=[Shard(0)])) is DTensor
assert torch.distributed.tensor.distribute_tensor is distribute_tensor
dist.destroy_process_group()
print("as it should be")
"""


def test_functions_that_were_imported_before_do_not_go_on_with_wrong_data() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120, check=False
    )
    assert "as it should be" in ran.stdout, ran.stderr


def test_wrapped_functions_look_like_those_of_torch() -> None:
    for function in (
        DTensor.from_local,
        _utils.compute_local_shape_and_global_offset,
        HuggingFaceStorageWriter.prepare_global_plan,
    ):
        assert function.__module__.startswith("torch.")
        original = inspect.unwrap(function)
        assert original is not function
        assert inspect.signature(function) == inspect.signature(original)


def test_another_torch_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def other(changed: object) -> None: ...

    monkeypatch.setattr(DTensor, "from_local", staticmethod(other))
    monkeypatch.setattr(_utils, "compute_local_shape_and_global_offset", other)
    monkeypatch.setattr(HuggingFaceStorageWriter, "prepare_global_plan", other)
    with pytest.warns(match=r"DTensor.from_local of torch .* is not known to vescale_fsdp"):
        compat.wrap_from_local(bool, other)
    with pytest.warns(match="it takes a RaggedShard for replication: do not call it"):
        compat.refuse_boxes(bool, "")
    with pytest.warns(match="HuggingFaceStorageWriter of torch .* else it loses parts of tensors"):
        compat.refuse_lost_boxes(bool, "", "", "")
    assert DTensor.from_local is other
    assert _utils.compute_local_shape_and_global_offset is other
    assert HuggingFaceStorageWriter.prepare_global_plan is other
