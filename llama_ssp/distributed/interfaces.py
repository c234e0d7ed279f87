"""The network interfaces of this machine, and which of them connections between nodes are over. No torch.

gloo listens at the address of the interface that GLOO_SOCKET_IFNAME names, and so does all of ours.
"""

import fcntl
import os
import socket
import struct
from contextlib import suppress
from pathlib import Path

INTERFACE = "GLOO_SOCKET_IFNAME"
LOOPBACK = "127.0.0.1"
ROUTES = Path("/proc/net/route")
DEFAULT_ROUTE = "00000000"  # its destination there
IPV6_TABLE = Path("/proc/net/if_inet6")
LINK_LOCAL = "20"  # the scope there of addresses that hold on one link alone
# Linux's request for an IPv4 address: | name, IF_NAME bytes | family, 2 | port, 2 | address, 4 |
SIOCGIFADDR = 0x8915
IF_REQUEST = 40
IF_NAME = 16


def chosen_interface() -> str:
    """Returns the first network interface that INTERFACE names; "" if it names none."""
    return os.environ.get(INTERFACE, "").partition(",")[0].strip()


def address_of(interface: str) -> str:
    """Returns an interface's address, the IPv4 one if it has both; "" for none, and for no such interface."""
    name = struct.pack(f"{IF_REQUEST}s", interface.encode()[: IF_NAME - 1])
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        answer = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, name)
        return socket.inet_ntoa(answer[IF_NAME + 4 : IF_NAME + 8])

    # A line for each address: its digits, the interface's number, the prefix, the scope, flags, and the name.
    with suppress(OSError):
        for line in IPV6_TABLE.read_text("ascii").splitlines():
            digits, _, _, scope, _, of_interface = line.split()
            if of_interface == interface and scope != LINK_LOCAL:
                return socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits))
    return ""


def address_towards(host: str) -> str:
    """Returns this machine's address on the route to a host; "" for a host that is not found."""
    with suppress(OSError):
        family, _, _, _, place = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(place)  # sends nothing
            return str(probe.getsockname()[0])
    return ""


def interface_of(address: str) -> str:
    """Returns the interface that has this address; "" if none has."""
    return next((name for _, name in socket.if_nameindex() if address_of(name) == address), "")


def default_interface() -> str:
    """Returns the interface of the default route, of several the preferred one; "" without one."""
    found = list[tuple[int, str]]()
    with suppress(OSError):
        for line in ROUTES.read_text(encoding="ascii").splitlines()[1:]:
            name, destination, _gateway, _flags, _refs, _use, metric, *_ = line.split()
            if destination == DEFAULT_ROUTE:
                found.append((int(metric), name))
    return min(found)[1] if found else ""
