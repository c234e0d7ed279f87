"""Addresses by which the nodes of a group reach each other. Runs on a node, in the script. No torch.

    ... -m llama_ssp.batch.slurm.address resolve NAME            another node's address, as this node finds it
    ... -m llama_ssp.batch.slurm.address interface NAME          this node's address on that network
    ... -m llama_ssp.batch.slurm.address here ADDRESS [NAME]     this node's address on the route to ADDRESS,
                                                                 or on that network; and its interface
    ... -m llama_ssp.batch.slurm.address port                    a free port of this node

A node must not look up its own name: Debian's /etc/hosts gives 127.0.1.1 for it, which no other node reaches.
"""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
import sys
from functools import partial
from pathlib import Path

from llama_ssp.distributed.draft_link import own_address_towards
from llama_ssp.errors import OK, DistributedError, exit_code_of

SIOCGIFADDR = 0x8915
IPV6 = Path("/proc/net/if_inet6")
FIX = "name the network that joins the nodes: cluster.slurm.interface=ib0"


def resolve(name: str) -> str:
    """An address of another node: IPv4 before IPv6, loopback last."""
    try:
        found = {str(info[4][0]) for info in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)}
    except OSError as error:
        where = f"{socket.gethostname()} looks up {name}"
        raise DistributedError("the first node has no address", where, error.strerror, fix=FIX) from error
    return min(found, key=lambda one: (ipaddress.ip_address(one).is_loopback, ":" in one, one))


def of_interface(name: str) -> str:
    """This node's address on a network: IPv4 before IPv6. Raises DistributedError where it has none."""
    found = _ipv4(name) or next((address for address, owner in _ipv6() if owner == name), None)
    if found is None:
        names = ", ".join(name for _, name in socket.if_nameindex())
        raise DistributedError("a network has no address here", socket.gethostname(), name, names, FIX)
    return found


def towards(address: str) -> tuple[str, str]:
    """This node's address on the route to another one, and its interface; "" where that is not found."""
    try:
        own = own_address_towards(address)
    except OSError as error:
        raise DistributedError("no route to the first node", address, error.strerror, fix=FIX) from error
    names = [name for _, name in socket.if_nameindex() if _ipv4(name) == own]
    names += [name for found, name in _ipv6() if found == own]
    return own, "".join(names[:1])


def bracketed(address: str) -> str:
    """The address as it is written before a port."""
    return f"[{address}]" if ":" in address else address


def _ipv4(name: str) -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
        except OSError:
            return None
    return socket.inet_ntoa(answer[20:24])


def _ipv6() -> list[tuple[str, str]]:
    """The node's IPv6 addresses that need no scope, with their interfaces."""
    lines = IPV6.read_text(encoding="ascii").splitlines() if IPV6.exists() else []
    fields = [line.split() for line in lines]
    addresses = [(ipaddress.IPv6Address(bytes.fromhex(one[0])), one[5]) for one in fields]
    return [(str(address), name) for address, name in addresses if not address.is_link_local]


def _answer(command: str, *values: str) -> int:
    if command == "resolve":
        print(bracketed(resolve(*values)))
    elif command == "interface":
        print(bracketed(of_interface(*values)))
    elif command == "here":
        address, *name = values
        found = (of_interface(*name), *name) if name else towards(address.strip("[]"))
        print(*found)
    else:
        with socket.create_server(("", 0)) as free:
            print(free.getsockname()[1])
    return OK


if __name__ == "__main__":
    sys.exit(exit_code_of(partial(_answer, *sys.argv[1:])))
