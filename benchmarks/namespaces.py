"""Network namespaces that end with the process that made them, and a switch that connects them.

::

    host 1 [wire]---[port1]   [port2]---[wire] host 2
                         | switch |
                         +--------+

The namespaces have no names. Each exists as long as a process runs in it, the holder. A holder ends
when the pipe from the process that started it closes. So nothing remains, however that process
ends. The switch has its own namespace, and the network of the machine is not changed.
"""

from __future__ import annotations

import ctypes
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = [
    "WIRE",
    "Switch",
    "address",
    "die_with_parent",
    "enter",
    "holder",
    "new_switch",
    "run",
    "why_not",
]

_PR_SET_PDEATHSIG = 1
WIRE = "wire"  # the name of a host's interface


def why_not(*commands: str) -> str | None:
    """Return why namespaces cannot be made on this system. None: they can.

    Args:
        commands: that must be there beside those for namespaces.
    """
    if sys.platform != "linux":
        return "network namespaces are a thing of Linux"
    needed = ("ip", "nsenter", "unshare", "hostname", *commands)
    missing = [name for name in needed if not shutil.which(name)]
    if missing:
        return f"{', '.join(missing)} not found; on Debian: apt-get install iproute2 util-linux"
    tried = subprocess.run(["unshare", "--net", "--uts", "true"], capture_output=True, text=True)
    return tried.stderr.strip() or None


@contextmanager
def holder() -> Iterator[int]:
    """Start a process that only keeps new namespaces alive, of network and host name.

    Yields its id.
    """
    with subprocess.Popen(
        ["unshare", "--net", "--uts", "cat"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,  # so that Ctrl+C does not reach it
    ) as process:
        assert process.stdin is not None, "a pipe"
        assert process.stdout is not None, "a pipe"
        process.stdin.write(b"ready\n")
        process.stdin.flush()
        process.stdout.readline()  # `cat` runs, so the namespace is there
        try:
            yield process.pid
        finally:
            process.kill()


def enter(inside: int) -> list[str]:
    """The beginning of a command that runs in the namespaces of a holder."""
    return ["nsenter", f"--net=/proc/{inside}/ns/net", f"--uts=/proc/{inside}/ns/uts"]


def run(inside: int, command: str) -> None:
    """Run a command in the namespaces of a holder."""
    subprocess.run([*enter(inside), *command.split()], check=True)


def address(number: int) -> str:
    """The address of the host with this number, from 0."""
    return f"10.0.{number // 250}.{number % 250 + 1}"


class Switch:
    """A bridge in a namespace of its own. Hosts have the addresses 10.0.0.1, 10.0.0.2, ...

    Args:
        inside: the holder of the bridge's namespace.
    """

    def __init__(self, inside: int) -> None:
        self.inside = inside

    def connect(self, number: int, host: int) -> str:
        """Connect a host, by its holder. Returns the name of its port on the switch."""
        port = f"port{number}"
        run(self.inside, f"ip link add {port} type veth peer name {WIRE} netns {host}")
        run(self.inside, f"ip link set {port} addrgenmode none master bridge up")
        run(host, "ip link set lo up")
        run(host, f"ip link set {WIRE} addrgenmode none up")
        run(host, f"ip address add {address(number)}/16 dev {WIRE}")
        run(host, f"hostname {address(number)}")  # as others reach it
        return port

    def cut(self, port: str) -> None:
        """Let no packet through the port any more. No host is told; its interface stays up."""
        run(self.inside, f"ip link set {port} nomaster")

    def mend(self, port: str) -> None:
        """Undo `cut`."""
        run(self.inside, f"ip link set {port} master bridge")


@contextmanager
def new_switch() -> Iterator[Switch]:
    """Make a switch without ports."""
    with holder() as inside:
        run(inside, "ip link add bridge type bridge")
        run(inside, "ip link set bridge up")
        yield Switch(inside)


def die_with_parent() -> None:
    """Make the kernel kill this process when its parent ends (on Linux)."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
