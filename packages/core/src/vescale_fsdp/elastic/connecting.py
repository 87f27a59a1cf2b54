"""`init_process_group`, with a limit: a host may die after it was counted and before it connects.

torchrun has then started ranks that wait for the lost ones, in torch's own code, for 30 minutes.
"""

from __future__ import annotations

import logging
import os
import threading
from typing import Any

from vescale_fsdp import engine

_log = logging.getLogger(__name__)


def init_process_group(
    backend: str | None = None, *, connect_timeout_s: float = 120.0, **options: Any
) -> None:
    """Call it in place of ``torch.distributed.init_process_group`` in a script for torchrun.

    Under torchrun a process that is not connected to all others in time logs that and ends, with
    exit code 1. torchrun then starts the ranks that are there.

    Args:
        backend: as in torch.
        connect_timeout_s: for all ranks to be connected. It must be longer than the time between
            the first and the last rank that comes to this line.
        options: torch's other arguments.
    """
    connected = threading.Event()

    def watch() -> None:
        if not connected.wait(connect_timeout_s):
            _log.critical(
                "rank %s: not connected to all of %s ranks within %g s: a host has died since "
                "torchrun counted it, or starts slowly (then give connect_timeout_s more seconds). "
                "This process ends, so that torchrun starts again the ranks that are there",
                os.environ.get("RANK"),
                os.environ.get("WORLD_SIZE"),
                connect_timeout_s,
            )
            logging.shutdown()
            os._exit(1)

    if "TORCHELASTIC_RUN_ID" in os.environ:
        threading.Thread(target=watch, name="vescale-fsdp connecting", daemon=True).start()
    try:
        engine.init_process_group(backend, **options)
    finally:
        connected.set()
