"""torchrun whose processes are forked where torch is loaded already.

The agent of torchrun needs three seconds of a core to load torch, and so does each rank, also each
time that it is started again. These agents are forked from the server that `run_ranks` forks ranks
from, and their ranks from them. All else is torchrun's own: how hosts meet, restarts, signals, the
environment, exit codes. That it works with interpreters of their own, other tests show
(`test_plain_example_under_torchrun`, those of the wheels and of ``python3 dev.py elastic``).
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import multiprocessing
import os
import runpy
import signal
import stat
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path

from vescale_fsdp.testing.pool import PRELOADED

AGENT = "agent of torchrun"  # the name under which the agent's process runs this file


class Torchrun:
    """A torchrun that runs.

    Args:
        arguments: of torchrun, with the script's.
        log: the file to which the agent and its ranks append what they print.
        environ: beside the environment of this process.
        cwd: where they work.
        preload: further modules that the agent loads, so that its ranks have them.
    """

    def __init__(
        self,
        *arguments: object,
        log: Path,
        environ: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        preload: Sequence[str] = (),
    ) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        environ = {**os.environ, "OMP_NUM_THREADS": "1", **(environ or {})}
        given = [*map(str, arguments)], environ, str(log), str(cwd or Path.cwd()), [*preload]
        # By its path: no other process can import this file by the name that pytest gives it.
        self._process = context.Process(
            target=runpy.run_path, args=(__file__, {"given": given}, AGENT)
        )
        self._process.start()
        assert self._process.pid is not None, "it has just been started"
        self.pid: int = self._process.pid

    def poll(self) -> int | None:
        """The exit code; negative: the signal that has ended it; None: it runs."""
        return self._process.exitcode

    def wait(self, timeout_s: float) -> int:
        """The exit code, when it has ended."""
        self._process.join(timeout_s)
        code = self.poll()
        if code is None:
            raise TimeoutError(f"torchrun still runs after {timeout_s} s")
        return code

    def ranks(self) -> list[int]:
        """The processes of its ranks, in their order."""
        return children(self.pid)

    def kill(self) -> None:
        """Kill the agent and all that it and its ranks have started."""
        for pid in (self.pid, *descendants(self.pid)) if self.poll() is None else ():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.join()


def run_torchrun(
    *arguments: object,
    log: Path,
    timeout_s: float,
    environ: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    preload: Sequence[str] = (),
) -> int:
    """Run a `Torchrun` until it ends; its exit code."""
    agent = Torchrun(*arguments, log=log, environ=environ, cwd=cwd, preload=preload)
    try:
        return agent.wait(timeout_s)
    finally:
        agent.kill()


def children(pid: int) -> list[int]:
    """The processes that one has started, from Linux' list of them."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            found += map(int, task.read_text().split())
    return sorted(found)


def descendants(pid: int) -> list[int]:
    """The processes that one has started, and that these have."""
    return [each for child in children(pid) for each in (child, *descendants(child))]


def _agent(
    arguments: list[str], environ: dict[str, str], log: str, cwd: str, preload: list[str]
) -> None:
    """The process of an agent."""
    _become(environ)
    os.chdir(cwd)
    file = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(file, stream.fileno())
        stream.reconfigure(write_through=True)  # type: ignore[union-attr]
    os.close(file)
    for name in preload:
        importlib.import_module(name)
    import torch.distributed.run
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    subprocess_handler.Popen = _Rank  # type: ignore[attr-defined,misc,assignment]
    torch.distributed.run.main(arguments)


class _Rank:
    """A rank that the agent has forked: what it needs of a `subprocess.Popen`."""

    def __init__(self, args: Sequence[str], env: Mapping[str, str], **_: object) -> None:
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            _, unbuffered, *script = args
            assert unbuffered == "-u", f"torchrun starts ranks by {args}"
            _run_script(script, env)

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout: float) -> int:
        end = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired("a rank", timeout)
            time.sleep(0.01)
        return code


def _run_script(script: list[str], environ: Mapping[str, str]) -> None:
    """Be the process of a rank until its end, as if this were an interpreter of its own."""
    code: object = 1
    try:
        os.setsid()
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        # The agent's connections, which would seem to be open when it is dead. Its objects stay.
        gc.freeze()
        for file in map(int, os.listdir("/proc/self/fd")):
            with contextlib.suppress(OSError):
                if stat.S_ISSOCK(os.fstat(file).st_mode):
                    os.close(file)
        _become(environ)
        atexit._clear()
        sys.argv = script
        sys.path.insert(0, str(Path(script[0]).parent))
        runpy.run_path(script[0], run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code or 0
    except BaseException:  # noqa: BLE001  as an interpreter does
        traceback.print_exc()
    finally:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 1)


def _become(environ: Mapping[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environ)


if __name__ == AGENT:
    _agent(*given)  # type: ignore[name-defined]  # noqa: F821
