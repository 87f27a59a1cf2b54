"""Runs a script in which DeepSpeed uses gloo alone, as on machines that have no shared memory.

What it saves is the same. Its operator for shared memory is compiled at first use, which takes two
cores half a minute: tests ended by their time limit meanwhile.

    torchrun ... gloo_alone.py SCRIPT [arguments]
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import deepspeed

if __name__ == "__main__":
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    sys.argv = sys.argv[1:]
    sys.path[0] = str(Path(sys.argv[0]).parent)  # as if it had been started
    runpy.run_path(sys.argv[0], run_name="__main__")
