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
* what is loaded: `targets`
* what users call: `save`, `load`, `latest`, `verify`, and `stock`, the import of DCP's format

Nothing that is loaded is unpickled, but for `import_dcp`, which says how.
"""

from vescale_fsdp.checkpoint.latest import latest
from vescale_fsdp.checkpoint.load import load
from vescale_fsdp.checkpoint.manifest import Manifest
from vescale_fsdp.checkpoint.save import SaveHandle, save
from vescale_fsdp.checkpoint.stock import import_dcp
from vescale_fsdp.checkpoint.verify import verify

__all__ = ["Manifest", "SaveHandle", "import_dcp", "latest", "load", "save", "verify"]
