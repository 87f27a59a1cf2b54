"""The mistakes that FSDP2 notices, each as a function that makes it, and what is said then."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, DataParallelMeshDims
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, ShardPlacementResult
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from .libraries import Library, Observe, layers, linear, ones

# Mistakes in the arguments of fully_shard


def a_module_list(library: Library) -> None:
    library.fully_shard(nn.ModuleList([linear()]))


def a_module_dict(library: Library) -> None:
    library.fully_shard(nn.ModuleDict({"a": linear()}))


def a_3d_mesh(library: Library) -> None:
    mesh = init_device_mesh("cpu", (1, 1, 2), mesh_dim_names=("a", "b", "c"))
    library.fully_shard(linear(), mesh=mesh)


def an_unnamed_2d_mesh(library: Library) -> None:
    library.fully_shard(linear(), mesh=init_device_mesh("cpu", (1, 2)))


def a_size_to_reshard_to_that_is_no_factor(library: Library) -> None:
    library.fully_shard(linear(), reshard_after_forward=3)


def a_size_to_reshard_to_of_zero(library: Library) -> None:
    library.fully_shard(linear(), reshard_after_forward=0)


def a_string_for_reshard_after_forward(library: Library) -> None:
    library.fully_shard(linear(), reshard_after_forward="x")


def a_module_twice(library: Library) -> None:
    library.fully_shard(library.fully_shard(linear()))


def a_module_again_in_a_list(library: Library) -> None:
    library.fully_shard([linear(), library.fully_shard(linear())])


def a_shard_of_a_missing_dimension(library: Library) -> None:
    library.fully_shard(linear(), shard_placement_fn=lambda _: Shard(1))


def a_replicated_parameter(library: Library) -> None:
    library.fully_shard(linear(), shard_placement_fn=lambda _: Replicate())


def a_number_for_a_placement(library: Library) -> None:
    library.fully_shard(linear(), shard_placement_fn=lambda _: 0)


def a_dtensor_on_another_type_of_device(library: Library) -> None:
    mesh = DeviceMesh("cuda", [0, 1], _init_backend=False)
    with FakeTensorMode(allow_non_fake_inputs=True):
        local = torch.empty(4, 4, device="cuda")
    spec = DTensorSpec(mesh, (Replicate(),), TensorMeta(local.shape, (4, 1), local.dtype))
    model = nn.Linear(4, 4, bias=False)
    model.weight = nn.Parameter(DTensor(local, spec, requires_grad=False))
    library.fully_shard(model)


def pinned_memory_without_an_accelerator(library: Library) -> None:
    library.fully_shard(linear(), offload_policy=CPUOffloadPolicy())


# dp_mesh_dims

BY_NAME = DataParallelMeshDims(shard="data")


def on_mesh(mesh: DeviceMesh, *placements: Any) -> nn.Linear:
    """A linear layer whose only parameter is a DTensor."""
    model = nn.Linear(4, 4, bias=False)
    model.weight = nn.Parameter(distribute_tensor(model.weight.data, mesh, placements))
    return model


def whole_mesh(data: int = 2, other: int = 1) -> DeviceMesh:
    return init_device_mesh("cpu", (data, other), mesh_dim_names=("data", "other"))


def axes_by_name_of_an_unnamed_mesh(library: Library) -> None:
    library.fully_shard(linear(), mesh=init_device_mesh("cpu", (2,)), dp_mesh_dims=BY_NAME)


def an_axis_that_is_not_there(library: Library) -> None:
    dims = DataParallelMeshDims(shard="dp")
    library.fully_shard(linear(), mesh=whole_mesh(), dp_mesh_dims=dims)


def plain_parameters_with_axes_by_name(library: Library) -> None:
    library.fully_shard(linear(), mesh=whole_mesh(), dp_mesh_dims=BY_NAME)


def a_dtensor_on_another_mesh(library: Library) -> None:
    model = on_mesh(whole_mesh(1, 2), Replicate(), Replicate())
    library.fully_shard(model, mesh=whole_mesh(), dp_mesh_dims=BY_NAME)


def a_dtensor_that_is_sharded_already(library: Library) -> None:
    mesh = whole_mesh()
    library.fully_shard(on_mesh(mesh, Shard(0), Replicate()), mesh=mesh, dp_mesh_dims=BY_NAME)


def a_dtensor_that_is_sharded_over_the_replicas(library: Library) -> None:
    mesh = whole_mesh(1, 2)
    dims = DataParallelMeshDims(shard="data", replicate="other")
    library.fully_shard(on_mesh(mesh, Replicate(), Shard(0)), mesh=mesh, dp_mesh_dims=dims)


# Mistakes at the first forward, and in loading


def meta_at_the_first_forward(library: Library) -> None:
    with torch.device("meta"):
        model = layers(2)
    library.shard(model, model[0])(ones())


def meta_at_unshard(library: Library) -> None:
    with torch.device("meta"):
        model = linear()
    library.fully_shard(model).unshard()


def a_list_as_the_root(library: Library) -> None:
    first, _ = library.fully_shard([linear(), linear()])
    first(ones())


# Mistakes in methods


def an_int_for_a_bool(library: Library) -> None:
    library.fully_shard(linear()).set_reshard_after_forward(2)


def forward_prefetch_of_a_plain_module(library: Library) -> None:
    library.fully_shard(linear()).set_modules_to_forward_prefetch([linear()])


def backward_prefetch_of_a_plain_module(library: Library) -> None:
    library.fully_shard(linear()).set_modules_to_backward_prefetch([linear()])


def a_shared_context_of_a_plain_module(library: Library) -> None:
    library.share_comm_ctx([library.fully_shard(linear()), linear()])


def a_stream_for_the_hook_beside_replicas(library: Library) -> None:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard"))
    model = library.fully_shard(linear(), mesh=mesh)
    model.set_all_reduce_hook(lambda _: None, stream=object())


def on_two_meshes(library: Library) -> Any:
    """A layer with its weight over both ranks, and its bias on this one only."""
    alone = init_device_mesh("cpu", (2, 1), mesh_dim_names=("expert", "data"))["data"]
    result = ShardPlacementResult(None, FSDPMeshInfo(alone, 0))
    return library.fully_shard(
        linear(), shard_placement_fn=lambda p: result if p.dim() == 1 else None
    )


def a_custom_gather_on_two_meshes(library: Library) -> None:
    on_two_meshes(library).set_custom_all_gather(object())


def a_custom_reduction_on_two_meshes(library: Library) -> None:
    on_two_meshes(library).set_custom_reduce_scatter(object())


def a_hook_on_two_meshes(library: Library) -> None:
    on_two_meshes(library).set_all_reduce_hook(lambda _: None)


def a_reset_of_a_part(library: Library) -> None:
    model = layers(2)
    library.shard(model, model[0])
    model(ones())
    model[0].reset_iter_state()


def no_buffers_at_all(library: Library) -> None:
    library.fully_shard(linear()).set_reduce_scatter_max_input_buffers(0)


def half_a_buffer(library: Library) -> None:
    library.fully_shard(linear()).set_reduce_scatter_max_input_buffers(0.5)


def a_bool_of_buffers(library: Library) -> None:
    library.fully_shard(linear()).set_reduce_scatter_max_input_buffers(True)


def the_group_s_memory_for_a_custom_gather(library: Library) -> None:
    model = library.fully_shard(linear())
    model.set_custom_all_gather(object())
    model.set_allocate_memory_from_process_group_for_comm(True)


def symmetric_memory_for_a_custom_gather(library: Library) -> None:
    model = library.fully_shard(linear())
    model.set_custom_all_gather(object())
    model.set_symm_mem_for_comm()


def symmetric_memory_without_an_accelerator(library: Library) -> None:
    library.fully_shard(linear()).set_symm_mem_for_comm()


def a_missing_method(library: Library) -> None:
    library.register_fsdp_forward_method(library.fully_shard(linear()), "generate")


ON_META = "FSDP parameters should be materialized from meta device before training, but the "
MULTIPLE = " is not supported with multiple param groups (from per-param mesh via shard_placement"
ONCE = (
    "Each distinct composable distributed API can only be applied to a module once. fully_shard "
    "has already been applied to "
)
PLACEMENT = "Invalid shard_placement_fn result: "

# The error and its first words
MISTAKES: dict[Observe, tuple[type[Exception], str]] = {
    a_module_list: (
        ValueError,
        "fully_shard does not support containers that do not implement forward: ModuleList(",
    ),
    a_module_dict: (
        ValueError,
        "fully_shard does not support containers that do not implement forward: ModuleDict(",
    ),
    a_3d_mesh: (ValueError, "fully_shard expects a 1D or 2D DeviceMesh but got DeviceMesh((a=1, "),
    an_unnamed_2d_mesh: (
        AssertionError,
        "Please init the 2D mesh for HSDP with mesh_dim_names specified",
    ),
    a_size_to_reshard_to_that_is_no_factor: (
        ValueError,
        "If passing reshard_after_forward as an int, it should be a factor of 2, not 3",
    ),
    a_size_to_reshard_to_of_zero: (
        ValueError,
        "If passing reshard_after_forward as an int, it should be a factor of 2, not 0",
    ),
    a_string_for_reshard_after_forward: (
        ValueError,
        "reshard_after_forward should be a bool or an int representing the group size to reshard "
        "to, not x",
    ),
    a_module_twice: (AssertionError, ONCE),
    a_module_again_in_a_list: (AssertionError, ONCE),
    a_shard_of_a_missing_dimension: (
        AssertionError,
        "Shard dim 1 is invalid for 1D tensor: torch.Size([4])",
    ),
    a_replicated_parameter: (ValueError, PLACEMENT + "R"),
    a_number_for_a_placement: (ValueError, PLACEMENT + "0"),
    a_dtensor_on_another_type_of_device: (
        ValueError,
        "Requires DTensor to have mesh of the same type as the FSDP mesh but got cuda for DTensor "
        "and cpu for FSDP",
    ),
    axes_by_name_of_an_unnamed_mesh: (
        ValueError,
        "mesh must have mesh_dim_names when dp_mesh_dims is provided",
    ),
    an_axis_that_is_not_there: (
        ValueError,
        "Mesh dim name 'dp' not found in mesh.mesh_dim_names ('data', 'other')",
    ),
    plain_parameters_with_axes_by_name: (
        ValueError,
        "When dp_mesh_dims is provided, all parameters must be DTensors on the full SPMD mesh "
        "(e.g. via distribute_module). Got plain tensor for parameter 'weight'.",
    ),
    a_dtensor_on_another_mesh: (
        ValueError,
        "Expected param's DTensor mesh to be the same mesh passed to fully_shard, but got ",
    ),
    a_dtensor_that_is_sharded_already: (ValueError, "Expected Replicate() on DP "),
    a_dtensor_that_is_sharded_over_the_replicas: (ValueError, "Expected Replicate() on DP "),
    meta_at_the_first_forward: (
        RuntimeError,
        ON_META + "following were still on meta device: ['1.",
    ),
    meta_at_unshard: (RuntimeError, ON_META + "following were still on meta device: ["),
    a_list_as_the_root: (RuntimeError, "FSDP requires a single root module but got ("),
    an_int_for_a_bool: (
        ValueError,
        "reshard_after_forward should be a bool, got <class 'int'>",
    ),
    forward_prefetch_of_a_plain_module: (
        ValueError,
        "Expects FSDPModule but got <class 'torch.nn.modules.linear.Linear'>: Linear(",
    ),
    backward_prefetch_of_a_plain_module: (
        ValueError,
        "Expects FSDPModule but got <class 'torch.nn.modules.linear.Linear'>: Linear(",
    ),
    a_shared_context_of_a_plain_module: (
        ValueError,
        "Expects list of FSDPModules but got Linear(",
    ),
    a_stream_for_the_hook_beside_replicas: (
        ValueError,
        "stream cannot be set when using native HSDP",
    ),
    a_custom_gather_on_two_meshes: (ValueError, "set_custom_all_gather" + MULTIPLE),
    a_custom_reduction_on_two_meshes: (ValueError, "set_custom_reduce_scatter" + MULTIPLE),
    a_hook_on_two_meshes: (ValueError, "set_all_reduce_hook" + MULTIPLE),
    a_reset_of_a_part: (RuntimeError, "reset_iter_state must be called on the root FSDP module"),
    no_buffers_at_all: (ValueError, "max_input_buffers must be a positive int, got 0"),
    half_a_buffer: (TypeError, "max_input_buffers must be an int, got float"),
    a_bool_of_buffers: (TypeError, "max_input_buffers must be an int, got bool"),
    the_group_s_memory_for_a_custom_gather: (
        AssertionError,
        "cannot call set_allocate_memory_from_process_group() when all gather comm is custom: obj",
    ),
    symmetric_memory_for_a_custom_gather: (
        AssertionError,
        "cannot call set_symm_mem() when all gather comm is custom: object",
    ),
}
if torch.accelerator.current_accelerator() is None:  # a build for CUDA misses its driver first
    MISTAKES |= {
        pinned_memory_without_an_accelerator: (
            RuntimeError,
            "Cannot access accelerator device when none is available.",
        ),
        symmetric_memory_without_an_accelerator: (
            RuntimeError,
            "SymmetricMemory does not find allocation backend NCCL",
        ),
    }
