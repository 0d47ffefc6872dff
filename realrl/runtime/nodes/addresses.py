"""Addresses of this machine: its own one towards another machine, and the interface that has it. IPv4."""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import socket
import struct

from realrl.config.schema import ClusterConfig
from realrl.errors import UsageError

_SIOCGIFADDR = 0x8915  # <linux/sockios.h>
_ANYWHERE = "192.0.2.1"  # an address for documents: nothing is sent there, but the default route leads to it


def parse_place(text: str) -> tuple[str, int]:
    """Split ``HOST:PORT``. Raises `UsageError` if it is none."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise UsageError(f"{text!r} is no HOST:PORT", remedy="Write it like 10.0.0.1:29500, as `realrl run` tells it.")
    return host, int(port)


def resolve(host: str) -> str:
    """Return the IPv4 address of a host. Raises `UsageError` if there is none."""
    try:
        return str(socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_STREAM)[0][4][0])
    except (OSError, UnicodeError) as error:
        raise UsageError(f"there is no host {host!r}: {error}", remedy="Give its IPv4 address.") from error


def own_address(towards: str) -> str:
    """Return this machine's address on its route to another one, whatever its host name says.

    Raises:
        UsageError: there is no route.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((towards, 9))  # sends nothing
        except OSError as error:
            raise UsageError(f"there is no route to {towards}: {error.strerror}") from error
        return str(probe.getsockname()[0])


def addresses() -> dict[str, str]:
    """Return interface -> its IPv4 address, without loopback."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                answer = fcntl.ioctl(asking.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                address = socket.inet_ntoa(answer[20:24])
                if not ipaddress.IPv4Address(address).is_loopback:
                    found[name] = address
    return found


def interface_of(address: str) -> str | None:
    """Return the interface that has an address; None if it is not known."""
    return next((name for name, other in addresses().items() if other == address), None)


def reachable_address() -> str:
    """Return the address by which other machines reach this one: on the default route, or the only one.

    Raises:
        UsageError: there are several or none; names them.
    """
    with contextlib.suppress(UsageError):
        address = own_address(_ANYWHERE)
        if not ipaddress.IPv4Address(address).is_loopback:
            return address
    found = addresses()
    if len(found) != 1:
        said = ", ".join(f"{address} ({name})" for name, address in found.items()) or "none but loopback"
        raise UsageError(
            f"this machine has no one address for the others: {said}", remedy="Name it: cluster.master_address=ADDRESS"
        )
    return next(iter(found.values()))


def master_address(cluster: ClusterConfig) -> str:
    """Return the address at which the machines of a run join.

    Raises:
        UsageError: it is not known, or other machines could not reach it.
    """
    address = resolve(cluster.master_address) if cluster.master_address else reachable_address()
    if ipaddress.IPv4Address(address).is_loopback and cluster.n_nodes > 1:
        raise UsageError(
            f"cluster.master_address={cluster.master_address} is {address} on this machine, which others cannot reach",
            remedy="Name the address that this machine has for the others.",
        )
    return address


def listen(address: str, port: int) -> socket.socket:
    """Return a socket that listens on an address of this machine; port 0 takes a free one.

    Raises:
        UsageError: the port is taken, or the address is not this machine's, or that of all interfaces.
    """
    if ipaddress.IPv4Address(address).is_unspecified:
        raise UsageError(f"cluster.master_address={address} is no address of one interface", remedy="Name one address.")
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # an earlier run's connections may be closing
    try:
        listener.bind((address, port))
        listener.listen(1024)
    except OSError as error:
        listener.close()
        raise UsageError(
            f"the master cannot listen on {address}:{port}: {error.strerror}",
            remedy="Choose another cluster.master_port (0 takes a free one), and a cluster.master_address of this "
            "machine; `ss -ltnp` lists who listens.",
        ) from error
    return listener
