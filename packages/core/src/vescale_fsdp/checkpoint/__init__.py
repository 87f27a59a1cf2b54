"""Checkpoints that are complete or absent, that are checked before they are loaded, and that
load on any number of ranks, with any granularity and on any mesh.

::

    checkpoint.save("runs/step-100", model, optimizer, extra={"step": 100}, keep_last=3)
    extra = checkpoint.load(checkpoint.latest("runs"), model, optimizer)

A checkpoint is a directory::

    step-100/
      manifest.json      the contents, the place of each byte, and its CRC32: the seal
      rank-00000.bin     the data of rank 0: boxes of tensors, row-major, and JSON texts,
      rank-00001.bin     ...                      one after the other

The files, from the bottom up:

* the data on disk: `manifest`, `files`, `seal`, which publishes, finds and prunes checkpoints, and
  `replacing`, for programs that save under one name again
* the state of models and optimizers: `encoding` (tensors as bytes, values as JSON), `optimizer`,
  together in `contents`; `targets` are the places to load into; `full` makes whole tensors in one
  process
* the work of all ranks: `saving` and `loading` do all of it or nothing
* of ``torch.distributed.checkpoint``, what its own functions do not do: `state_dict`, `planner`
* `safetensors` with `safetensors_files`
* other formats, and `convert` from one to another: `foreign`, loaded when it is asked for
* in one process: `sources`, which reads any
* `unread`: tensors that are read when they are needed
* `stop` ends a job; `ranks.attempt` restarts it

Loading never unpickles, except for DCP's format in `import_dcp` and `convert`, and DeepSpeed's in
`convert` and `read`; the files of `foreign` say how.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from vescale_fsdp.checkpoint import full, state_dict
from vescale_fsdp.checkpoint.loading import load
from vescale_fsdp.checkpoint.manifest import Manifest
from vescale_fsdp.checkpoint.planner import SavePlanner
from vescale_fsdp.checkpoint.replacing import Place
from vescale_fsdp.checkpoint.safetensors import LoadedNames, load_safetensors, save_safetensors
from vescale_fsdp.checkpoint.saving import SaveHandle, save
from vescale_fsdp.checkpoint.seal import latest, verify
from vescale_fsdp.checkpoint.sources import read, read_extra, unread_state
from vescale_fsdp.checkpoint.stop import StopOnSignal
from vescale_fsdp.checkpoint.unread import UnreadTensor
from vescale_fsdp.ranks import init_process_group

if TYPE_CHECKING:
    from vescale_fsdp.checkpoint.foreign import export_dcp, import_dcp
    from vescale_fsdp.checkpoint.foreign.convert import convert

__all__ = [
    "LoadedNames",
    "Manifest",
    "Place",
    "SaveHandle",
    "SavePlanner",
    "StopOnSignal",
    "UnreadTensor",
    "convert",
    "export_dcp",
    "full",
    "import_dcp",
    "init_process_group",
    "latest",
    "load",
    "load_safetensors",
    "read",
    "read_extra",
    "save",
    "save_safetensors",
    "state_dict",
    "unread_state",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name in ("convert", "export_dcp", "import_dcp"):
        return getattr(import_module("vescale_fsdp.checkpoint.foreign"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
