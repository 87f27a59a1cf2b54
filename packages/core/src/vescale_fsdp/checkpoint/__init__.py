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

What the folders here do, from the bottom up:

* `disk`: what lies there, byte by byte, and the seal
* `state`: what models and optimizers have, and where it goes when it is loaded; `state.full` is the
  way to whole tensors in one process
* `transfer`: who writes and reads what, and all of it or nothing
* `sealed`: the format above
* `safetensors`, `dcp`: formats of others, in and out
* by one process: `convert` from one to another, and `read` (`sources` is behind both)
* `stop`: to end; and to begin again, `engine.attempts`

Nothing that is loaded is unpickled, but for DCP's format, by `import_dcp` and `convert`;
`dcp.directory` says how.
"""

from vescale_fsdp.checkpoint.convert import convert
from vescale_fsdp.checkpoint.dcp.read import import_dcp
from vescale_fsdp.checkpoint.dcp.write import export_dcp
from vescale_fsdp.checkpoint.disk.manifest import Manifest
from vescale_fsdp.checkpoint.read import read, read_extra
from vescale_fsdp.checkpoint.safetensors.load import LoadedNames, load_safetensors
from vescale_fsdp.checkpoint.safetensors.save import save_safetensors
from vescale_fsdp.checkpoint.sealed.latest import latest
from vescale_fsdp.checkpoint.sealed.load import load
from vescale_fsdp.checkpoint.sealed.save import SaveHandle, save
from vescale_fsdp.checkpoint.sealed.verify import verify
from vescale_fsdp.checkpoint.state import full
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
