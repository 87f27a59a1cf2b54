"""A host may die after torchrun has counted it, and before it is in the ring (`liveness`).

The others then wait for it in torch's own code: while they connect, or, if they were making the
model, at the beginning of the training. Their agents only take it out of torchrun's rendezvous, and
act when a rank ends. So the first rank of each host looks there::

    agents  count 2 hosts, start their ranks         take out the host without heartbeats
    rank 0    Python and torch, connects, waits for the ranks of that host ...  ends: 1 of 2
    agent                                                            starts the ranks that are there

It finds the rendezvous if that is a file, in torchrun's own variable for ``--rdzv-endpoint``. Else
the connection has a limit of time.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch.distributed.elastic.rendezvous import RendezvousError

from vescale_fsdp import spi

_log = logging.getLogger(__name__)
_ENDPOINT = "PET_RDZV_ENDPOINT"
_THREAD, _LOOK_S = "vescale-fsdp agents", 2.0
_in_ring = threading.Event()


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """A context that ends this process, with exit code 1, if it takes longer; the log says so.

    Only under torchrun, which then starts the process again, or the ranks that are there.
    """
    connected = threading.Event()

    def watch() -> None:
        if not connected.wait(seconds):
            _end(
                f"not connected to all of {os.environ.get('WORLD_SIZE')} ranks within "
                f"{seconds:g} s: a host has died since it was counted, or starts slowly (then give "
                "init_process_group a larger connect_timeout_s)"
            )

    if "TORCHELASTIC_RUN_ID" in os.environ:
        threading.Thread(target=watch, name="vescale-fsdp connecting", daemon=True).start()
    try:
        yield
    finally:
        connected.set()


def watch_agents() -> None:
    """End this process, with exit code 1, if torchrun takes a host out before `rely_on_ring`.

    On the first rank of each of several hosts, whose rendezvous is a file; else it does nothing.
    Nor does it if it was called before.

    Cost: a thread that reads what is new in that file, every 2 seconds.
    """
    environ = os.environ
    file, run_id = environ.get(_ENDPOINT, ""), environ.get("TORCHELASTIC_RUN_ID", "")
    num_hosts = int(environ.get("GROUP_WORLD_SIZE", "1"))
    if num_hosts == 1 or not run_id or environ.get("LOCAL_RANK") != "0" or not Path(file).is_file():
        return
    if any(each.name == _THREAD for each in threading.enumerate()):
        return

    def watch() -> None:
        try:
            count = spi.agents_in(file, run_id)
            while not _in_ring.wait(_LOOK_S):
                if (num_left := count()) < num_hosts:
                    _end(
                        f"torchrun counts {num_left} of the {num_hosts} hosts on which it has "
                        "started ranks: one has died before its ranks were connected"
                    )
        except RendezvousError as error:
            _log.warning("hosts that die while ranks connect are noticed late: %s", error)

    _in_ring.clear()
    threading.Thread(target=watch, name=_THREAD, daemon=True).start()


def rely_on_ring() -> None:
    """Ranks notice losses by themselves from now on."""
    _in_ring.set()


def _end(why: str) -> None:
    _log.critical(
        "rank %s: %s. This process ends, so that torchrun starts it again",
        os.environ.get("RANK"),
        why,
    )
    logging.shutdown()
    os._exit(1)
