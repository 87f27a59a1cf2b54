"""Checkpoints that are whole or not there, that are checked before they are believed, and that
load on any number of ranks, with any granularity and on any mesh.

::

    checkpoint.save("runs/step-100", model, optimizer, extra={"step": 100}, keep_last=3)
    extra = checkpoint.load(checkpoint.latest("runs"), model, optimizer)

A checkpoint is a directory::

    step-100/
      manifest.json      what is in it, where each byte lies, and its CRC32: the seal
      rank-00000.bin     what rank 0 has written: boxes of tensors, row-major, and JSON texts,
      rank-00001.bin     ...                      one after the other

What the files here do, from the bottom up:

* what lies on disk: `manifest`, `files`, and `seal`, by which it is whole or not there
* what models and optimizers have: `tensors`, `values` (as JSON), `optimizer`, `rng`, all of it in
  `contents`; `targets` is where it goes when it is loaded; `full` is the way to whole tensors in
  one process
* who writes and reads what: `ranks`, `planning`; `saving` and `reading` are all of it or nothing
* the format above: `saving`, `loading`, and `sealed`, which finds and checks checkpoints
* formats of others, in and out: `safetensors` with `safetensors_files`, `dcp` with `dcp_directory`
* by one process: `convert` from one to another, and `sources`, which reads any
* `stop`: to end; and to begin again, `engine.store`

Nothing that is loaded is unpickled, but for DCP's format, by `import_dcp` and `convert`;
`dcp_directory` says how.
"""

from vescale_fsdp.checkpoint import full
from vescale_fsdp.checkpoint.convert import convert
from vescale_fsdp.checkpoint.dcp import export_dcp, import_dcp
from vescale_fsdp.checkpoint.loading import load
from vescale_fsdp.checkpoint.manifest import Manifest
from vescale_fsdp.checkpoint.safetensors import LoadedNames, load_safetensors, save_safetensors
from vescale_fsdp.checkpoint.saving import SaveHandle, save
from vescale_fsdp.checkpoint.sealed import latest, verify
from vescale_fsdp.checkpoint.sources import read, read_extra
from vescale_fsdp.checkpoint.stop import StopOnSignal
from vescale_fsdp.engine import init_process_group

__all__ = [
    "LoadedNames",
    "Manifest",
    "SaveHandle",
    "StopOnSignal",
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
    "verify",
]
