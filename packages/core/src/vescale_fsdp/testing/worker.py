"""A rank: a process that runs one call after another, each in a process group of its own."""

from __future__ import annotations

import faulthandler
import gc
import os
import pickle
import random
import select
import signal
import socket
import sys
import threading
import traceback
import warnings
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from vescale_fsdp import compat

from vescale_fsdp.testing.sources import ModuleSource, load

STORE_HOST = "127.0.0.1"
LOOPBACK_NAMES = ("lo", "lo0")  # Linux, macOS
# Collectives give up later than the caller does: it then reports where every rank stood.
EXTRA_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class Call:
    """What a rank needs to run one function."""

    payload: bytes  # (fn, args, warning filters), by sources.dump
    sources: list[ModuleSource]
    number: int  # its keys in the store begin with it
    timeout_s: float
    directory: str
    sys_path: list[str]
    environment: dict[str, str]


@dataclass(frozen=True)
class Raised:
    """The reply of a rank whose function raised."""

    type_name: str
    message: str
    traceback: str


def rank_main(
    connection: Connection, rank: int, world_size: int, log: str, store_port: int
) -> None:
    """Serve calls until the caller goes away. A call is answered twice: result, then clean-up.

    The ranks find each other through a store of the caller's, on this machine.

    Leaves by ``os._exit``: nothing here needs the interpreter's exit handlers, and torch 2.13's
    gloo now and then aborts in them.
    """
    try:
        _redirect_output(log)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the caller's, which kills us
        faulthandler.enable()  # a crash leaves its stacks in the log
        faulthandler.register(signal.SIGUSR1, all_threads=True)
        threading.Thread(target=_exit_without_caller, args=(connection,), daemon=True).start()
        store = TCPStore(STORE_HOST, store_port, wait_for_workers=False)
        gc.freeze()  # what was loaded so far stays: the collection after each call is cheap
        while True:
            call = pickle.loads(connection.recv_bytes())
            connection.send_bytes(pickle.dumps(_run(call, rank, world_size, store)))
            connection.recv_bytes()  # every rank has replied: none needs our connections
            _clean_up()
            connection.send_bytes(pickle.dumps(b""))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        os._exit(0)  # the caller is gone
    except BaseException:  # noqa: BLE001  # whatever it is, the caller must hear of it
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


def _exit_without_caller(connection: Connection) -> None:
    """Exit when the caller's end of the connection closes, also while a function runs.

    Else a rank that hangs would outlive a caller that was killed.
    """
    poller = select.poll()
    poller.register(connection, 0)  # no event but the hang-up, which is always reported
    poller.poll()
    os._exit(0)


def _redirect_output(log: str) -> None:
    """Send what this process prints, from Python or C++, to a file that the caller reads."""
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)
    # The inherited objects may be another's (pytest replaces them) and buffered.
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115


def _run(call: Call, rank: int, world_size: int, store: Any) -> bytes | Raised:
    """The function's pickled result, or what it raised."""
    try:
        _adopt(call)
        fn, args, filters = load(call.payload, call.sources)
        timeout = timedelta(seconds=call.timeout_s + EXTRA_TIMEOUT_S)
        store.set_timeout(timeout)
        dist.init_process_group(
            "gloo",
            store=PrefixStore(f"call-{call.number}", store),
            rank=rank,
            world_size=world_size,
            timeout=timeout,
        )
        torch.set_num_threads(1)
        torch.manual_seed(0)
        random.seed(0)
        with warnings.catch_warnings():
            _set_filters(filters)
            return pickle.dumps(fn(*args))
    except BaseException as error:  # noqa: BLE001  # SystemExit too: the caller must hear of it
        return _raised(error)


def _adopt(call: Call) -> None:
    """Take over the caller's directory, module path and environment."""
    os.chdir(call.directory)
    sys.path[:] = call.sys_path
    if dict(os.environ) != call.environment:
        os.environ.clear()
        os.environ.update(call.environment)
    if "GLOO_SOCKET_IFNAME" not in os.environ:
        # Else gloo takes the interface of the host's name, which may not reach itself.
        names = [name for _, name in socket.if_nameindex() if name in LOOPBACK_NAMES]
        if names:
            os.environ["GLOO_SOCKET_IFNAME"] = names[0]


def _set_filters(filters: list[Any]) -> None:
    """Make these entries of another process' ``warnings.filters`` the only ones here."""
    warnings.resetwarnings()
    for action, message, category, module, line in reversed(filters):
        # Patterns are compiled ones, or None, or a string in the interpreter's own filters.
        texts = [getattr(pattern, "pattern", pattern) or "" for pattern in (message, module)]
        warnings.filterwarnings(action, texts[0], category, texts[1], line)


def _raised(error: BaseException) -> Raised:
    text = "".join(traceback.format_exception(error))
    return Raised(type(error).__name__, str(error), text)


def _clean_up() -> None:
    """Drop what the call left: its process groups and what only cycles hold."""
    if dist.is_initialized():
        dist.destroy_process_group()
    compat.forget_meshes()  # equal meshes of the next world have other process groups
    gc.collect()
