"""Which network interface gloo uses between machines, where the machine's own name does not lead to one.

gloo takes the address that the machine's name stands for. On many machines /etc/hosts says 127.0.1.1 for it, which is of
no use to other machines: ranks there would wait for this one in vain. Then the interface that leads to rank 0 is taken.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys

__all__ = ["choose_interface"]

_SIOCGIFADDR = 0x8915  # linux/sockios.h: ask for the address of an interface


def choose_interface(host: str) -> None:
    """Set ``GLOO_SOCKET_IFNAME`` to the interface that leads to a host, if gloo would not find one and it is not set."""
    if "GLOO_SOCKET_IFNAME" in os.environ or _name_is_usable():
        return
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # sends nothing, but finds the way
        names = [name for _, name in socket.if_nameindex() if _address_of(name) == probe.getsockname()[0]]
        if names:
            os.environ["GLOO_SOCKET_IFNAME"] = names[0]


def _name_is_usable() -> bool:
    """Whether this machine's name stands for an address of it that other machines can reach."""
    try:
        found = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
    except OSError:
        return False
    addresses = [(family, str(address[0])) for family, _, _, _, address in found]
    return any(_is_ours(family, address) for family, address in addresses if not address.startswith(("127.", "::1")))


def _is_ours(family: int, address: str) -> bool:
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True


def _address_of(interface: str) -> str | None:
    """The IPv4 address of an interface; None if it has none, or the system cannot be asked."""
    if not sys.platform.startswith("linux"):
        return None
    import fcntl  # lazy: Windows has none

    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        answer = fcntl.ioctl(any_socket, _SIOCGIFADDR, interface.encode().ljust(256, b"\0"))
        return socket.inet_ntoa(answer[20:24])
    return None
