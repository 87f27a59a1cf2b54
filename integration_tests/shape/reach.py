"""Which functions of torch and of frameworks are ours while we are installed, and in use.

Run as a program with ``torch`` or ``frameworks`` it prints their names, as JSON. "torch": after a
model was sharded, trained, compiled, saved and loaded. "frameworks": of Lightning, Accelerate and
transformers, first when stock programs have run that do not ask for us, then with us in use.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from types import FunctionType, ModuleType
from typing import Any

FRAMEWORKS = ("lightning", "lightning_fabric", "pytorch_lightning", "accelerate", "transformers")


def _functions(member: Any) -> Iterator[Any]:
    """What runs when an attribute is called, read or written."""
    if isinstance(member, staticmethod | classmethod):
        member = member.__func__
    if isinstance(member, property):
        yield from (each for each in (member.fget, member.fset, member.fdel) if each is not None)
    else:
        yield member


def _is_ours(function: Any, folders: tuple[str, ...]) -> bool:
    """Whether its code is in a file of ours, or it is an object of a class of ours."""
    if isinstance(function, partial):
        function = function.func
    if isinstance(function, FunctionType):  # may have got the code of another one
        return function.__code__.co_filename.startswith(folders)
    is_class = isinstance(function, type | ModuleType)
    return not is_class and type(function).__module__.startswith("vescale_fsdp")


def _our_folders() -> tuple[str, ...]:
    """The folders of those of our packages that are loaded."""
    names = [name for name in sys.modules if name.startswith("vescale_fsdp") and "." not in name]
    files = [sys.modules[name].__file__ for name in names]
    return tuple(f"{os.path.dirname(file)}{os.sep}" for file in files if file is not None)


def ours_in(packages: tuple[str, ...]) -> dict[str, int]:
    """The names of functions of ours in loaded modules, and in their classes, with identities.

    A function that has several names is the same object under each.
    """
    found: dict[str, int] = {}
    folders = _our_folders()
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] not in packages or not isinstance(module, ModuleType):
            continue
        for key, value in list(vars(module).items()):
            members = [(f"{name}.{key}", value)]
            if isinstance(value, type) and value.__module__ == name:
                members = [(f"{name}.{key}.{k}", v) for k, v in list(vars(value).items())]
            for label, member in members:
                for each in _functions(member):
                    if _is_ours(each, folders):
                        found[label] = id(each)
    return found


def distinct(found: dict[str, int], but: dict[str, int] | None = None) -> list[str]:
    """One name of each function. ``but``: those that are counted elsewhere."""
    left_out = set((but or {}).values())
    names = {mark: name for name, mark in sorted(found.items(), reverse=True)}
    return sorted(name for mark, name in names.items() if mark not in left_out)


def hooks() -> dict[str, int]:
    """How many entries there are in tables of torch that hold for the whole process."""
    from torch.distributed.tensor import DTensor
    from torch.nn.modules import module as modules
    from torch.optim import optimizer as optimizers

    tables = {"handlers of operators": DTensor._op_dispatcher._custom_op_handlers}  # type: ignore[attr-defined]
    tables["foreach types"] = optimizers._foreach_supported_types
    for each in (modules, optimizers):
        tables |= {k: v for k, v in vars(each).items() if k.startswith("_global_")}
    return {name: len(table) for name, table in tables.items() if hasattr(table, "__len__")}


def use_of_torch() -> dict[str, list[str]]:
    """What a training that uses all of the core changes in torch."""
    import torch
    import torch._dynamo
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    import torch.distributed.fsdp
    import torch.distributed.pipelining
    from torch import nn

    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", f"file://{folder}/store", rank=0, world_size=1)
        before = hooks()
        import vescale_fsdp
        from vescale_fsdp import checkpoint, optim
        from vescale_fsdp.checkpoint.state_dict import (
            StateDictOptions,
            get_model_state_dict,
            set_model_state_dict,
        )

        model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
        for layer in model:
            vescale_fsdp.fully_shard(layer)
        vescale_fsdp.fully_shard(model)
        optimizers: list[Any] = [torch.optim.AdamW(model.parameters())]
        optimizers += [optim.AdamW8bit(model.parameters(), lr=1e-3)]
        for optimizer in optimizers * 2:
            model(torch.randn(2, 8)).sum().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        checkpoint.save(f"{folder}/ours", model, optimizers[0])
        checkpoint.load(f"{folder}/ours", model, optimizers[0])
        dcp.save({"model": model.state_dict()}, checkpoint_id=f"{folder}/dcp")
        dcp.load({"model": model.state_dict()}, checkpoint_id=f"{folder}/dcp")
        whole = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(model, get_model_state_dict(model, options=whole), options=whole)
        recurrent = nn.LSTM(4, 4)
        vescale_fsdp.fully_shard(recurrent)
        recurrent(torch.ones(2, 1, 4))[0].sum().backward()
        torch.compile(model, backend="aot_eager")(torch.ones(2, 8)).sum().backward()
        torch.compile(lambda p: p * 2, backend="aot_eager")(model[0].weight)
        dist.destroy_process_group()
    added = {name: number - before.get(name, 0) for name, number in hooks().items()}
    entries = [f"{name}, {index}" for name, number in added.items() for index in range(number)]
    return {"functions": distinct(ours_in(("torch",))), "entries": entries}


def use_of_frameworks() -> dict[str, list[str]]:
    """What of ours is in stock programs that do not ask for us, and in those that do."""
    import accelerate.commands.config
    import accelerate.commands.launch as launch
    import lightning.fabric
    import lightning.pytorch.cli
    import transformers.trainer  # noqa: F401

    def trainer(**options: Any) -> None:
        lightning.Trainer(
            accelerator="cpu", devices=1, logger=False, enable_checkpointing=False, **options
        )

    trainer()
    lightning.fabric.Fabric(accelerator="cpu", devices=1)
    accelerate.Accelerator(cpu=True)
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        lines = ["compute_environment: LOCAL_MACHINE", "distributed_type: 'NO'", "use_cpu: true"]
        file.write("\n".join([*lines, "num_processes: 1", ""]))
        file.flush()
        arguments = ["--config_file", file.name, "train.py"]
        launch._validate_launch_command(launch.launch_command_parser().parse_args(arguments))
    unasked = distinct(ours_in(FRAMEWORKS))

    from vescale_fsdp_accelerate import VeScaleAccelerator, VeScaleFSDPPlugin

    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    os.environ.update(ACCELERATE_USE_CPU="true", ACCELERATE_USE_FSDP="true", FSDP_VERSION="2")
    trainer(strategy="vescale_fsdp")
    lightning.fabric.Fabric(accelerator="cpu", devices=1, strategy="vescale_fsdp")
    VeScaleAccelerator(cpu=True, fsdp_plugin=VeScaleFSDPPlugin())
    in_use = distinct(ours_in(FRAMEWORKS), but=ours_in(("torch",)))
    return {"unasked": unasked, "in_use": in_use}


if __name__ == "__main__":
    found = use_of_torch() if sys.argv[1] == "torch" else use_of_frameworks()
    print(json.dumps(found))
