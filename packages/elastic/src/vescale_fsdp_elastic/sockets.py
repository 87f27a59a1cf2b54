"""TCP connections between ranks, beside those of the communicators.

A rank listens, and offers its address and a secret to the ranks that shall connect, by a message of
`vescale_fsdp.ranks`. What connects says the secret and its rank. The kernel then asks regularly
whether the other host is there, so that a connection to a host without power ends.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import socket
import struct
from typing import Any

# The kernel asks after a second without a packet, then each second, until it has asked six times.
# So a cut of 5 s is not noticed here, and one of 7 s is.
SILENCE_S = 7
_OPTIONS = (
    ("TCP_KEEPIDLE", 1),
    ("TCP_KEEPINTVL", 1),
    ("TCP_KEEPCNT", SILENCE_S - 1),
    ("TCP_USER_TIMEOUT", 1000 * SILENCE_S),  # also if what was sent is not acknowledged
)
_CONNECT_S = 10.0
_SECRET_BYTES = 16
_SIOCGIFADDR = 0x8915


def of_interface() -> str | None:
    """The address of gloo's interface; None if ``GLOO_SOCKET_IFNAME`` names none.

    Raises:
        OSError: there is no such interface.
    """
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]
    if not interface:
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        request = struct.pack("256s", interface.encode()[:15])
        return socket.inet_ntoa(fcntl.ioctl(asked.fileno(), _SIOCGIFADDR, request)[20:24])


def of_network() -> str:
    """This host's address on the network of the ranks.

    It is that of gloo's interface, if one is named, else that by which rank 0's host is reached.

    Raises:
        OSError: rank 0's host is not reached.
    """
    named = of_interface()
    if named is not None:
        return named
    host = os.environ.get("MASTER_ADDR", "127.0.0.1")
    family, kind, _, _, there = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(there)  # sends nothing
        return str(probe.getsockname()[0])


class Server:
    """Listens for connections of other ranks.

    Args:
        num_expected: connections that may wait until they are accepted.

    Attributes:
        offer: what `connect` needs, as JSON.

    Raises:
        OSError: it cannot listen.
    """

    def __init__(self, num_expected: int = 1) -> None:
        address = of_network()
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._socket = socket.create_server((address, 0), family=family, backlog=num_expected + 8)
        self._socket.settimeout(_CONNECT_S)
        self._secret = secrets.token_bytes(_SECRET_BYTES)
        self.offer: list[Any] = [*self._socket.getsockname()[:2], self._secret.hex()]

    def accept(self) -> tuple[int, socket.socket]:
        """Return the rank that has connected, and its connection.

        Raises:
            OSError: nothing that knows the secret has connected within 10 s.
        """
        while True:
            connection, _ = self._socket.accept()
            connection.settimeout(_CONNECT_S)
            said = connection.recv(_SECRET_BYTES + 4, socket.MSG_WAITALL)
            if said[:_SECRET_BYTES] == self._secret and len(said) == _SECRET_BYTES + 4:
                return int.from_bytes(said[_SECRET_BYTES:], "big"), _asked_often(connection)
            connection.close()

    def close(self) -> None:
        """Stop to listen. Connections stay."""
        self._socket.close()


def connect(offer: list[Any], rank: int) -> socket.socket:
    """Connect to a server as this rank. Does not wait until it accepts.

    Raises:
        OSError: there is no connection within 10 s.
    """
    address, port, secret = offer
    connection = socket.create_connection((address, port), timeout=_CONNECT_S)
    try:
        connection.sendall(bytes.fromhex(secret) + rank.to_bytes(4, "big"))
        return _asked_often(connection)
    except OSError:
        connection.close()
        raise


def _asked_often(connection: socket.socket) -> socket.socket:
    """Let the kernel ask whether the other host is there; reads and writes have no other limit."""
    connection.settimeout(None)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _OPTIONS:
        option = getattr(socket, name, None)  # macOS has other names
        if option is not None:
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
    return connection
