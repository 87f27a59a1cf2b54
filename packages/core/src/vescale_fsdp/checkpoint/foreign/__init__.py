"""Checkpoints in formats that are not ours: read without a model, written, converted.

The files:

* `formats` detects the format of a path, and opens it as a `sources.Source`
* directories of ``torch.distributed.checkpoint`` (DCP): `dcp` writes them and loads them into
  models, `dcp_directory` reads them
* directories of DeepSpeed: `deepspeed`, with `pickles`, an unpickler that runs no code of a file
* `convert` writes a checkpoint in another format

The files of safetensors are in `checkpoint`, which saves and loads them, too. No file outside knows
one of these: `checkpoint`, `sources` and ``vescale_fsdp.spi`` load this package when one of the
names below is asked for.
"""

from vescale_fsdp.checkpoint.foreign.convert import convert
from vescale_fsdp.checkpoint.foreign.dcp import export_dcp, import_dcp
from vescale_fsdp.checkpoint.foreign.dcp_directory import MetadataUnpickler
from vescale_fsdp.checkpoint.foreign.formats import format_of, opened

__all__ = ["MetadataUnpickler", "convert", "export_dcp", "format_of", "import_dcp", "opened"]
