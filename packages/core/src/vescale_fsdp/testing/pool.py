"""The caller's side of a set of ranks: it starts them, sends calls, collects replies and kills.

Ranks are forked from a server process that has torch loaded. Two ranks start in about 0.1 s; fresh
interpreters take several seconds.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.util  # registers multiprocessing's exit handler before ranks.py's
import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
from multiprocessing.connection import Connection, wait
from pathlib import Path

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from vescale_fsdp.testing.worker import STORE_HOST, Call, ModuleSource, RankFailure, rank_main

PRELOADED = [
    "torch",
    "torch._dynamo",  # loaded by the first forward of a sharded module: a second for each rank
    "torch.distributed",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "vescale_fsdp.engine",
    "vescale_fsdp.testing.worker",
]
GRACE_S = 5.0  # time for the other ranks to return, once one has failed
END_CALL_S = 10.0  # time to destroy the process groups of a call that succeeded
REAP_S = 30.0  # time for the exit code of a dead rank; a busy server reads it late
DUMP_S = 0.3  # time for a hung rank to write its stacks


class Pool:
    """``world_size`` processes that wait for calls. Their output goes to files in `directory`."""

    def __init__(self, world_size: int) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        self.world_size = world_size
        self.directory = Path(tempfile.mkdtemp(prefix="vescale-fsdp-ranks-"))
        self._connections: list[Connection] = []
        self._processes = []
        self._log_offsets = [0] * world_size
        self._num_calls = 0
        # Not a FileStore: ranks that wait for each other read it only every 10 ms.
        self._store = TCPStore(STORE_HOST, 0, is_master=True, wait_for_workers=False)
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=rank_main,
                args=(theirs, rank, world_size, str(self._log(rank)), self._store.port),
                name=f"rank-{rank}-of-{world_size}",
            )
            process.start()
            theirs.close()  # so that a dead rank reads as end of file here
            self._connections.append(ours)
            self._processes.append(process)

    def is_alive(self) -> bool:
        return all(process.is_alive() for process in self._processes)

    def call(
        self, payload: bytes, sources: list[ModuleSource], timeout_s: float
    ) -> tuple[list[bytes], list[RankFailure]]:
        """Run the pickled ``(fn, args, filters)``. Returns the pickled results, and the failures.

        The results are in rank order; a rank that failed has an empty one.
        """
        self._num_calls += 1
        call = Call(
            payload,
            sources,
            self._num_calls,
            timeout_s,
            os.getcwd(),
            list(sys.path),
            dict(os.environ),
        )
        self._send(pickle.dumps(call))
        replies, failures = self._receive(timeout_s)
        self._forward_logs()
        return [replies.get(rank, b"") for rank in range(self.world_size)], failures

    def end_call(self) -> bool:
        """Let the ranks destroy the call's process groups. Returns whether all ranks survived.

        It is a separate step, because a rank must not close its connections while another rank
        still uses them. Gloo sometimes aborts here. Then the results are valid, but the pool
        cannot be used again.
        """
        self._send(b"")
        _, failures = self._receive(END_CALL_S)
        return not failures

    def kill(self) -> None:
        """Kill all ranks and remove the directory. Does not wait for calls to end."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for connection in self._connections:
            connection.close()
        shutil.rmtree(self.directory, ignore_errors=True)

    def _send(self, message: bytes) -> None:
        for connection in self._connections:
            # The rank is dead: _receive will read end of file and report it.
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                connection.send_bytes(message)

    def _receive(self, timeout_s: float) -> tuple[dict[int, bytes], list[RankFailure]]:
        """Wait for one reply of every rank, up to the timeout.

        Once a rank has failed, the others have `GRACE_S` to reply.
        """
        deadline = time.monotonic() + timeout_s
        why = f"did not finish within {timeout_s:g} s"
        waiting = {connection: rank for rank, connection in enumerate(self._connections)}
        replies: dict[int, bytes] = {}
        failures: list[RankFailure] = []
        while waiting:
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                return replies, failures + self._hung(sorted(waiting.values()), why)
            for connection in ready:
                assert isinstance(connection, Connection), f"waited on {connection!r}"
                rank = waiting.pop(connection)
                try:
                    reply = pickle.loads(connection.recv_bytes())
                except (EOFError, ConnectionResetError):
                    reply = self._died(rank)
                if isinstance(reply, bytes):
                    replies[rank] = reply
                    continue
                if not failures and time.monotonic() + GRACE_S < deadline:
                    deadline = time.monotonic() + GRACE_S
                    why = f"was still running {GRACE_S:g} s after rank {rank} failed"
                failures.append(reply)
        return replies, failures

    def _died(self, rank: int) -> RankFailure:
        process = self._processes[rank]
        process.join(REAP_S)
        how = "closed its connection, did not exit"
        if process.exitcode is not None:
            how = f"died with exit code {process.exitcode}"
        message = f"rank {rank} {how} and sent no result"
        return RankFailure(rank, "RankDied", message, f"{message}\n{self._log_tail(rank)}")

    def _hung(self, ranks: list[int], why: str) -> list[RankFailure]:
        """Failures of ranks that are still running, each with the stacks of its threads."""
        for rank in ranks:
            pid = self._processes[rank].pid
            assert pid is not None, f"rank {rank} was never started"
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGUSR1)  # the rank's faulthandler writes its stacks
        time.sleep(DUMP_S)
        failures = []
        for rank in ranks:
            message = f"rank {rank} {why} and was killed"
            text = f"{message}\n{self._log_tail(rank)}"
            failures.append(RankFailure(rank, "RankHung", message, text))
        return failures

    def _log(self, rank: int) -> Path:
        return self.directory / f"rank-{rank}.log"

    def _log_tail(self, rank: int) -> str:
        try:
            log = self._log(rank).read_bytes()
        except FileNotFoundError:
            return "(it wrote nothing)"
        return log[self._log_offsets[rank] :][-6000:].decode(errors="replace")

    def _forward_logs(self) -> None:
        """Write what the ranks printed during this call to our ``sys.stderr``."""
        for rank in range(self.world_size):
            try:
                with self._log(rank).open("rb") as log:
                    log.seek(self._log_offsets[rank])
                    text = log.read()
            except FileNotFoundError:
                continue  # the rank died before it could open its log
            self._log_offsets[rank] += len(text)
            if text:
                sys.stderr.write(f"[rank {rank}] {text.decode(errors='replace')}")
