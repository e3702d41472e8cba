"""The address at which process 0 listens, and checks that this process can reach it."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
from collections.abc import MutableMapping

from zerojax.distributed.launched import Launched

_EXEMPT = "no_grpc_proxy"
"""gRPC's variable, which it prefers to ``no_proxy``."""


def split(address: str) -> tuple[str, int]:
    """Splits ``host:port``; an IPv6 address is in brackets."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def where_to_listen(me: Launched) -> str:
    """Returns the address at which process 0 listens: that by which the others reach it.

    All addresses of the host, ``[::]``, where that is not known: the name is that of a proxy, has
    several addresses, or is a loopback address only here.
    """
    host, port = split(me.coordinator)
    if chosen := os.environ.get("JAX_COORDINATOR_BIND_ADDRESS"):
        return chosen
    addresses: list[str] = []
    with contextlib.suppress(OSError):
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        addresses = [str(each[4][0]) for each in sorted(found)]  # IPv4 first
    if addresses and is_loopback(host):
        is_certain = host == "localhost" or me.several_hosts is False
    else:
        is_certain = len(addresses) == 1 and _is_own(addresses[0])
    if not is_certain:
        return f"[::]:{port}"
    return f"[{addresses[0]}]:{port}" if ":" in addresses[0] else f"{addresses[0]}:{port}"


def wrong_loopback(me: Launched) -> str:
    """Returns why this process may not reach process 0 of another host; "" if no reason is known.

    Process 0 may be reached even so, as two nodes of Slurm may share a machine.
    """
    host, own_host = split(me.coordinator)[0], socket.gethostname()
    is_own_name = host.partition(".")[0] == own_host.partition(".")[0] != "localhost"
    if not me.several_hosts or is_own_name or not is_loopback(host):
        return ""
    return (
        f"the coordinator {me.coordinator} ({me.by}) is the loopback of {own_host}, and processes "
        "run on several hosts: name the host of process 0 by an address that the others reach "
        f"(`hostname -I` there); where /etc/hosts maps {host} to 127.*, correct the line"
    )


def _is_own(address: str) -> bool:
    with contextlib.suppress(OSError):
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        socket.create_server((address, 0), family=family).close()
        return True
    return False


def avoid_proxy(address: str, environ: MutableMapping[str, str]) -> None:
    """Exempts an address from gRPC's proxy, which may be that of other programs: ``http_proxy``."""
    if {"grpc_proxy", "https_proxy", "http_proxy"} & environ.keys():
        exempt = environ.get(_EXEMPT) or environ.get("no_proxy", "")
        environ[_EXEMPT] = f"{exempt},{split(address)[0]}"


def is_loopback(host: str) -> bool:
    """Returns whether a name resolves only to loopback addresses of the machine itself."""
    try:
        addresses = {str(info[4][0]) for info in socket.getaddrinfo(host, None)}
    except OSError:
        return False  # the name may resolve later, as Kubernetes' names do
    return all(ipaddress.ip_address(address.partition("%")[0]).is_loopback for address in addresses)
