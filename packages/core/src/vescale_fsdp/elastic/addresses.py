"""The address of this host for connections that other hosts make to it."""

from __future__ import annotations

import fcntl
import os
import socket
import struct

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
