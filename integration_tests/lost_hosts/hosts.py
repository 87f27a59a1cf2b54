"""Hosts on one machine: each has an agent of torchrun, memory of its own and, as root, a network.

::

    host 1 (namespace)           switch (namespace)          host 2 (namespace)
      torchrun                   +----------+                  torchrun
        rank 0, rank 1  [wire]---|          |---[wire]           rank 2, rank 3
      memory: a tmpfs            +----------+                  memory: a tmpfs

Without root, or without ``ip``, a host is an agent with a memory folder, on the network of this
machine, which cannot be cut. A host that dies without a network says goodbye: the kernel closes
its connections, which the kernel of a machine without power does not.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

from benchmarks import namespaces

RANKS = 2  # of a host
MEMORY_BYTES, LEFT_BYTES = 256 << 20, 64 << 10  # of a host; when it is full
# How ranks find out who is there, as docs/elastic.md says: by torchrun; by themselves, in a folder;
# by torchft's lighthouse.
RESTARTED, IN_PROCESS, TORCHFT = "restarted", "in process", "torchft"
_LIGHTHOUSE_PORT = 29_510
RENDEZVOUS = "store_type=file,last_call_timeout=3,keep_alive_interval=2,keep_alive_max_attempt=3"


class Host:
    """A host. It is started by `Hosts.add`.

    Args:
        name: for the log and the events.
        number: of its address.
        root: of all files of the trial.
        switch: None: hosts share the network of this machine.
        how: ranks find out who is there.
        memory: the folder of another host that has died, to come back with its memory.
    """

    def __init__(
        self,
        name: str,
        number: int,
        root: Path,
        switch: namespaces.Switch | None,
        how: str,
        memory: Path | None = None,
    ) -> None:
        self.name, self._root, self._switch, self._how = name, root, switch, how
        self.memory = memory or root / f"memory-{name}"
        self.log = root / f"log-{name}"
        self.is_cut = False
        self._stack = ExitStack()
        self._slow: threading.Event | None = None
        self.agent: subprocess.Popen[bytes] | None = None
        if memory is None:
            self.memory.mkdir()
            if switch is not None:
                options = ["-t", "tmpfs", "-o", f"size={MEMORY_BYTES}", "memory"]
                subprocess.run(["mount", *options, str(self.memory)], check=True)
        self._address, self._inside, self._port = "127.0.0.1", None, ""
        if switch is not None:
            self._inside = self._stack.enter_context(namespaces.holder())
            self._port = switch.connect(number, self._inside)
            self._address = namespaces.address(number)

    def start(self, arguments: list[str], environ: Mapping[str, str]) -> None:
        """Start the agent, which starts the ranks."""
        own = {
            "VESCALE_FSDP_MEMORY_DIR": str(self.memory),
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            "OMP_NUM_THREADS": "1",
            "HOST_NAME": self.name,
            "HOST_ADDRESS": self._address,
            "GLOO_SOCKET_IFNAME": namespaces.WIRE if self._inside is not None else "lo",
        }
        launch = [
            *("--nnodes", "1:2", "--rdzv-backend", "c10d", "--rdzv-id", "trial"),
            *("--rdzv-conf", RENDEZVOUS, "--local-addr", self._address),
        ]
        if self._how == RESTARTED:
            own["PET_RDZV_ENDPOINT"] = str(self._root / "meeting")  # ranks read it too
        if self._how == IN_PROCESS:
            own |= {"VESCALE_FSDP_MEETING": str(self._root / "rounds"), "VESCALE_FSDP_HOSTS": "1:2"}
            launch = ["--standalone"]
        if self._how == TORCHFT:  # others reach the store by this address
            launch = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{self._address}:29400"]
            launch += ["--rdzv-conf", "is_host=1", "--local-addr", self._address]
        enter = []
        if self._inside is not None:
            enter = namespaces.enter(self._inside)
        with open(self.log, "a") as stream:
            self.agent = subprocess.Popen(
                [
                    *(*enter, sys.executable, "-m", "torch.distributed.run"),
                    *(*launch, "--nproc-per-node", str(RANKS), "--max-restarts", "1000"),
                    *arguments,
                ],
                env={**os.environ, **own, **environ},
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=namespaces.die_with_parent,
            )

    @property
    def pid(self) -> int:
        assert self.agent is not None, "it was started"
        return self.agent.pid

    def ranks(self) -> list[int]:
        """The process ids of the ranks that live."""
        return sorted(children_of(self.pid))

    def kill_rank(self, index: int) -> bool:
        """Kill -9 one rank. Returns whether it was there."""
        ranks = self.ranks()
        if not ranks:
            return False
        with contextlib.suppress(ProcessLookupError):
            os.kill(ranks[index % len(ranks)], signal.SIGKILL)
            return True
        return False

    def cut(self) -> None:
        """Cut it off from the others. Packets are lost, and nobody is told."""
        assert self._switch is not None, "hosts without namespaces cannot be cut off"
        self.is_cut = True
        self._switch.cut(self._port)

    def mend(self) -> None:
        """Connect it again."""
        assert self._switch is not None, "hosts without namespaces cannot be cut off"
        self.is_cut = False
        self._switch.mend(self._port)

    def power_off(self, *, keep_memory: bool = False) -> None:
        """End everything on it at once; no other host gets a packet about it.

        Args:
            keep_memory: the memory folder remains, for a host that comes back with it.
        """
        if self._switch is not None and not self.is_cut:
            self.cut()
        self.kill()
        if not keep_memory:
            self.lose_memory()
        self._stack.close()

    def kill(self) -> None:
        """Kill -9 the agent and the ranks."""
        self.fast()
        if self.agent is None:
            return
        for process in (self.pid, *descendants(self.pid)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        self.agent.wait()

    def lose_memory(self) -> None:
        """Delete its memory, as when a machine restarts."""
        if self._switch is not None:
            subprocess.run(["umount", "--lazy", str(self.memory)], check=False)
        shutil.rmtree(self.memory, ignore_errors=True)

    def fill_memory(self) -> None:
        """Fill the memory, but for some pages, with a file of somebody else."""
        with open(self.memory / "filler", "wb") as file:
            for _ in range(100):
                left = max(shutil.disk_usage(self.memory).free - LEFT_BYTES, 4096)
                try:
                    os.posix_fallocate(file.fileno(), 0, left)
                except OSError:  # a rank was faster
                    time.sleep(0.01)
                else:
                    return

    def empty_memory(self) -> None:
        """Undo `fill_memory`."""
        (self.memory / "filler").unlink(missing_ok=True)

    def slow(self, share: float, period_s: float = 0.2) -> None:
        """Let its processes run for this share of the time only, until `fast`."""
        stop = self._slow = threading.Event()

        def run() -> None:
            while not stop.is_set():
                for wait_s, what in (
                    (share * period_s, signal.SIGSTOP),
                    ((1 - share) * period_s, signal.SIGCONT),
                ):
                    stop.wait(wait_s)
                    self._signal(what)
            self._signal(signal.SIGCONT)

        self._slower = threading.Thread(target=run)
        self._slower.start()

    def fast(self) -> None:
        """Undo `slow`."""
        if self._slow is not None:
            self._slow.set()
            self._slower.join()
            self._slow = None

    def _signal(self, what: signal.Signals) -> None:
        for process in (self.pid, *descendants(self.pid)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, what)

    def close(self) -> None:
        self.kill()
        self.lose_memory()
        self._stack.close()


class Hosts:
    """The hosts of one trial, made by `new_hosts`."""

    def __init__(
        self,
        root: Path,
        switch: namespaces.Switch | None,
        how: str,
        arguments: list[str],
        **environ: str,
    ) -> None:
        self.root, self.switch, self.how = root, switch, how
        self._arguments, self._environ = arguments, environ
        self.here: list[Host] = []
        self._num_made = 0

    def add(self, memory: Path | None = None, *, full: bool = False) -> Host:
        """Start a new host, or one that comes back with this memory.

        Args:
            full: its memory is full at first.
        """
        self._num_made += 1
        name = f"host{self._num_made}"
        host = Host(name, self._num_made, self.root, self.switch, self.how, memory)
        self.here.append(host)
        if full:
            host.fill_memory()
        self.start(host)
        return host

    def start(self, host: Host) -> None:
        """Start its agent, the first time or again."""
        host.start(self._arguments, self._environ)

    def remove(self, host: Host, *, keep_memory: bool = False) -> None:
        """Power off a host."""
        host.power_off(keep_memory=keep_memory)
        self.here.remove(host)

    def close(self) -> None:
        for host in self.here:
            host.close()
        self.here.clear()


@contextmanager
def new_hosts(
    root: Path, how: str, arguments: list[str], *, with_network: bool, **environ: str
) -> Iterator[Hosts]:
    """Make a switch and no hosts.

    Args:
        root: an empty folder.
        how: ranks find out who is there.
        arguments: the script for torchrun, and its arguments.
        with_network: whether each host is a namespace.
        environ: for the ranks.
    """
    with ExitStack() as stack:
        switch = stack.enter_context(namespaces.new_switch()) if with_network else None
        if how == TORCHFT:
            environ["TORCHFT_LIGHTHOUSE"] = stack.enter_context(_lighthouse(root, switch))
        hosts = Hosts(root, switch, how, arguments, **environ)
        try:
            yield hosts
        finally:
            hosts.close()


@contextmanager
def _lighthouse(root: Path, switch: namespaces.Switch | None) -> Iterator[str]:
    """Torchft's server, on a host of its own that does not die. Yields its address."""
    with ExitStack() as stack:
        address, enter = "127.0.0.1", []
        if switch is not None:
            inside, number = stack.enter_context(namespaces.holder()), 250
            switch.connect(number, inside)
            address = namespaces.address(number)
            enter = namespaces.enter(inside)
        log = stack.enter_context(open(root / "log-lighthouse", "w"))
        script = (
            "import time; from torchft.coordination import LighthouseServer; server = "
            f"LighthouseServer(bind='{address}:{_LIGHTHOUSE_PORT}', min_replicas=1, "
            "join_timeout_ms=3000, heartbeat_timeout_ms=5000); time.sleep(1e6)"
        )
        process = subprocess.Popen(
            [*enter, sys.executable, "-c", script],
            stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
            preexec_fn=namespaces.die_with_parent,
        )  # fmt: skip
        stack.callback(process.kill)
        yield f"http://{address}:{_LIGHTHOUSE_PORT}"


def own_mounts() -> None:
    """Let this process and its children have mounts of their own, which end with them."""
    clone_newns = 0x20000
    if ctypes.CDLL(None, use_errno=True).unshare(clone_newns) != 0:
        raise OSError(ctypes.get_errno(), "cannot make a mount namespace")
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)


def children_of(pid: int) -> list[int]:
    """The children of a process, of all of its threads."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += map(int, task.read_text().split())
    return found


def descendants(pid: int) -> list[int]:
    """Its children, and theirs."""
    found = []
    for child in children_of(pid):
        found += [child, *descendants(child)]
    return found


def wait_until_gone(pids: list[int], timeout_s: float = 10) -> None:
    """Return when none of these processes exists."""
    end = time.monotonic() + timeout_s
    while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.monotonic() < end:
        time.sleep(0.01)
