"""A rank: a process that runs one call after another, each in a process group of its own.

Functions and arguments are sent as pickles. A pickle has a function or class as (module name,
qualified name), and the other side imports the module. But pytest's ``--import-mode=importlib``
puts test modules into ``sys.modules`` under names that no other process can import, such as
``packages.core.tests.engine.test_parity``. So the caller also sends the path of each module that
the pickle names. The rank loads that file under the same name, and the packages above the module
too, so that relative imports of siblings work.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import importlib.util
import io
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
from types import FunctionType, ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from vescale_fsdp import compat


@dataclass(frozen=True)
class ModuleSource:
    """The name and the file of a module, or of a package above one."""

    name: str
    path: str | None  # None: a namespace package, which has no file
    search_paths: list[str] | None  # a package's directories; None: not a package


def dump(value: object) -> tuple[bytes, list[ModuleSource]]:
    """Pickle ``value``, and list the modules that the pickle names.

    In the list, each module follows the packages above it.
    """
    buffer = io.BytesIO()
    pickler = _Recorder(buffer)
    pickler.dump(value)
    names: dict[str, None] = {}  # an ordered set
    for module in pickler.modules:
        parts = module.split(".")
        names.update((".".join(parts[: end + 1]), None) for end in range(len(parts)))
    sources = [_source(name) for name in names]
    return buffer.getvalue(), [source for source in sources if source is not None]


def load(payload: bytes, sources: list[ModuleSource]) -> Any:
    """Undo ``dump`` in another process: make the modules importable, then unpickle."""
    for source in sources:
        _ensure(source)
    return pickle.loads(payload)


class _Recorder(pickle.Pickler):
    """A pickler that notes the modules of all functions and classes it writes by name."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.modules: dict[str, None] = {}

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, (type, FunctionType)) and obj.__module__:
            self.modules[obj.__module__] = None
        return NotImplemented  # pickle it as usual


def _source(name: str) -> ModuleSource | None:
    """The source of a module of this process; None if the other side can import it anyway."""
    module = sys.modules.get(name)
    if module is None or name == "__main__":  # multiprocessing sends __main__ itself
        return None
    path = getattr(module, "__file__", None)
    search_paths = getattr(module, "__path__", None)
    if path is not None and not path.endswith(".py"):
        return None  # an extension module is never a test's
    if path is None and search_paths is None:
        return None  # built in
    return ModuleSource(
        name,
        None if path is None else os.path.abspath(path),
        None if search_paths is None else [os.path.abspath(entry) for entry in search_paths],
    )


_modified: dict[str, int] = {}  # module loaded from its file -> time of change, ns


def _ensure(source: ModuleSource) -> None:
    """Load the module into ``sys.modules``, unless it is there from the same, unchanged file."""
    module = sys.modules.get(source.name)
    if source.path is None:
        if module is None or list(getattr(module, "__path__", [])) != source.search_paths:
            namespace = ModuleType(source.name)
            namespace.__path__ = source.search_paths or []
            sys.modules[source.name] = namespace
        return
    if module is not None and getattr(module, "__file__", None) == source.path:
        if source.name not in _modified or _modified[source.name] == _mtime_ns(source.path):
            return
    elif _finder_agrees(source):
        importlib.import_module(source.name)
        return
    _load_file(source)


def _finder_agrees(source: ModuleSource) -> bool:
    """Whether a plain import of the name would find this file."""
    if source.name in sys.modules:
        return False  # a test module of the same name, from another file
    try:
        spec = importlib.util.find_spec(source.name)
    except (ImportError, AttributeError, ValueError):
        return False
    return spec is not None and spec.origin == source.path


def _load_file(source: ModuleSource) -> None:
    assert source.path is not None, f"{source.name} has no file"
    modified = _mtime_ns(source.path)
    spec = importlib.util.spec_from_file_location(
        source.name, source.path, submodule_search_locations=source.search_paths
    )
    if spec is None or spec.loader is None:
        raise ImportError(f"cannot load the module {source.name} from {source.path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[source.name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[source.name]
        raise
    _modified[source.name] = modified


def _mtime_ns(path: str) -> int:
    return os.stat(path).st_mtime_ns


STORE_HOST = "127.0.0.1"
LOOPBACK_NAMES = ("lo", "lo0")  # Linux, macOS
# Collectives time out later than the caller does. So the caller can report what every rank does.
EXTRA_TIMEOUT_S = 30.0
FREEZE_AFTER = 100  # modules that calls have loaded


@dataclass(frozen=True)
class Call:
    """What a rank needs to run one function."""

    payload: bytes  # (fn, args, warning filters), pickled by `dump`
    sources: list[ModuleSource]
    number: int  # the keys of the call in the store begin with it
    timeout_s: float
    directory: str
    sys_path: list[str]
    environment: dict[str, str]


@dataclass(frozen=True)
class RankFailure:
    """How one rank failed."""

    rank: int
    type_name: str  # of the exception; "RankDied" or "RankHung" if there was none
    message: str
    traceback: str  # text; for a rank that died or hung, what it wrote last


def rank_main(
    connection: Connection, rank: int, world_size: int, log: str, store_port: int
) -> None:
    """Run calls until the caller ends. Each call has two replies: its result, and after clean-up.

    The ranks find each other through a store in the caller's process.

    It ends by ``os._exit``, without the interpreter's exit handlers. None of them is needed here,
    and torch 2.13's gloo sometimes aborts in them.
    """
    try:
        _redirect_output(log)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the caller handles Ctrl-C and kills us
        faulthandler.enable()  # writes the stacks to the log if the process crashes
        faulthandler.register(signal.SIGUSR1, all_threads=True)
        threading.Thread(target=_exit_without_caller, args=(connection,), daemon=True).start()
        store = TCPStore(STORE_HOST, store_port, wait_for_workers=False)
        gc.freeze()  # later collections skip what is loaded so far, so they are cheap
        frozen_at = len(sys.modules)
        while True:
            call = pickle.loads(connection.recv_bytes())
            connection.send_bytes(pickle.dumps(_run(call, rank, world_size, store)))
            connection.recv_bytes()  # every rank has replied, so none needs our connections
            frozen_at = _clean_up(frozen_at)
            connection.send_bytes(pickle.dumps(b""))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        os._exit(0)  # the caller is gone
    except BaseException:  # noqa: BLE001  # whatever it is, the caller must hear of it
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


def _exit_without_caller(connection: Connection) -> None:
    """Exit when the caller closes its end of the connection, also while a function runs.

    Otherwise a rank that hangs would outlive a caller that was killed.
    """
    poller = select.poll()
    poller.register(connection, 0)  # only the hang-up, which is always reported
    poller.poll()
    os._exit(0)


def _redirect_output(log: str) -> None:
    """Write the output of this process, from Python or C++, to a file that the caller reads."""
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)
    # The inherited objects may be buffered, or replaced (by pytest, for example).
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115


def _run(call: Call, rank: int, world_size: int, store: Any) -> bytes | RankFailure:
    """Run the function. Returns its pickled result, or what it raised."""
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
        if (numpy := sys.modules.get("numpy")) is not None:  # an earlier call may have loaded it
            numpy.random.seed(0)
        with warnings.catch_warnings():
            _set_filters(filters)
            return pickle.dumps(fn(*args))
    except BaseException as error:  # noqa: BLE001  # SystemExit too: the caller must hear of it
        text = "".join(traceback.format_exception(error))
        return RankFailure(rank, type(error).__name__, str(error), text)


def _adopt(call: Call) -> None:
    """Take over the caller's directory, module path and environment."""
    os.chdir(call.directory)
    sys.path[:] = call.sys_path
    if dict(os.environ) != call.environment:
        os.environ.clear()
        os.environ.update(call.environment)
    if "GLOO_SOCKET_IFNAME" not in os.environ:
        # Otherwise gloo uses the interface of the host's name, which may not reach itself.
        names = [name for _, name in socket.if_nameindex() if name in LOOPBACK_NAMES]
        if names:
            os.environ["GLOO_SOCKET_IFNAME"] = names[0]


def _set_filters(filters: list[Any]) -> None:
    """Replace the warning filters by these entries of another process' ``warnings.filters``."""
    warnings.resetwarnings()
    for action, message, category, module, line in reversed(filters):
        # A pattern is compiled, or None; in the interpreter's own filters it is a string.
        texts = [getattr(pattern, "pattern", pattern) or "" for pattern in (message, module)]
        warnings.filterwarnings(action, texts[0], category, texts[1], line)


def _clean_up(frozen_at: int) -> int:
    """Destroy the call's process groups, and collect garbage cycles.

    Args:
        frozen_at: how many modules were loaded when later collections last began to skip objects.

    Returns:
        The same, as of now.
    """
    if dist.is_initialized():
        dist.destroy_process_group()
    compat.forget_meshes()  # an equal mesh of the next call has other process groups
    gc.collect()
    # What calls have loaded stays (compilers, most of all), and each later collection would look at
    # it: 0.1 s. Not after every call: a cycle that is frozen while it is in use is never freed.
    if len(sys.modules) > frozen_at + FREEZE_AFTER:
        gc.freeze()
        return len(sys.modules)
    return frozen_at
