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

* bytes: `jsons`, `geometry`, `manifest`, `files`, `seal`
* what is saved: `values`, `tensors`, `rng`, `optimizer`, `contents`
* who does what: `ranks`, `planning`, `reading`
* what is loaded: `targets`, and all of it or nothing: `change`
* what users call: `save`, `load`, `latest`, `verify`
* safetensors: `safetensors` (the format), `placing`, `save_safetensors`, `load_safetensors`
* DCP's format: `stock` and `stock_names` (in), `stock_files` (out), `import_dcp`, `export_dcp`
* exports by all ranks: `staged`; by one process: `sources`, `convert`
* to end: `stop`; and to begin again: `engine.attempts`

Nothing that is loaded is unpickled, but for DCP's format, by `import_dcp` and `convert`; `stock`
says how.
"""

from vescale_fsdp.checkpoint.convert import convert
from vescale_fsdp.checkpoint.export_dcp import export_dcp
from vescale_fsdp.checkpoint.import_dcp import import_dcp
from vescale_fsdp.checkpoint.latest import latest
from vescale_fsdp.checkpoint.load import load
from vescale_fsdp.checkpoint.load_safetensors import LoadedNames, load_safetensors
from vescale_fsdp.checkpoint.manifest import Manifest
from vescale_fsdp.checkpoint.save import SaveHandle, save
from vescale_fsdp.checkpoint.save_safetensors import save_safetensors
from vescale_fsdp.checkpoint.stop import StopOnSignal
from vescale_fsdp.checkpoint.verify import verify
from vescale_fsdp.engine.attempts import init_process_group

__all__ = [
    "LoadedNames",
    "Manifest",
    "SaveHandle",
    "StopOnSignal",
    "convert",
    "export_dcp",
    "import_dcp",
    "init_process_group",
    "latest",
    "load",
    "load_safetensors",
    "save",
    "save_safetensors",
    "verify",
]
