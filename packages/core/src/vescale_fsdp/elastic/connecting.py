"""A limit for the connection of ranks: a host may die after it was counted and before it connects.

The others then wait for it in torch's own code, for as long as the timeout of the process group.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_log = logging.getLogger(__name__)


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """A context that ends this process, with exit code 1, if it takes longer; the log says so.

    Only under torchrun, which then starts the process again, or the ranks that are there.
    """
    connected = threading.Event()

    def watch() -> None:
        if not connected.wait(seconds):
            _log.critical(
                "rank %s: not connected to all of %s ranks within %g s: a host has died since it "
                "was counted, or starts slowly (then give init_process_group a larger "
                "connect_timeout_s). This process ends, so that torchrun starts it again",
                os.environ.get("RANK"),
                os.environ.get("WORLD_SIZE"),
                seconds,
            )
            logging.shutdown()
            os._exit(1)

    if "TORCHELASTIC_RUN_ID" in os.environ:
        threading.Thread(target=watch, name="vescale-fsdp connecting", daemon=True).start()
    try:
        yield
    finally:
        connected.set()
