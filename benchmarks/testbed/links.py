"""Links between namespaces: a bridge with a pair of interfaces for each host, rates by ``tc``."""

from __future__ import annotations

from collections.abc import Sequence

from .host import Host
from .network import Network
from .tools import run

INTERFACE = "eth0"


def add_namespaces(names: Sequence[str]) -> None:
    """Make them; in each, the loopback interface is up.

    Raises:
        ToolError: not permitted, or iproute2 is missing.
    """
    for name in names:
        run("ip", "netns", "add", name)
        run("ip", "-n", name, "link", "set", "lo", "up")


def bridge(hosts: Sequence[Host], switch: str) -> None:
    """A link from each host to a bridge in the namespace ``switch``.

    Both ends are made where they belong: this machine's own namespace never sees one.
    """
    run("ip", "-n", switch, "link", "add", "bridge", "type", "bridge")
    run("ip", "-n", switch, "link", "set", "bridge", "up")
    for host in hosts:
        assert host.namespace is not None
        pair = ["link", "add", host.interface, "type", "veth", "peer", "name", host.name]
        run("ip", "-n", host.namespace, *pair, "netns", switch)
        run("ip", "-n", switch, "link", "set", host.name, "master", "bridge", "up")


def bring_up(hosts: Sequence[Host], network: Network) -> None:
    """Addresses, and the rate at which each host sends."""
    for host in hosts:
        assert host.namespace is not None
        run("ip", "-n", host.namespace, "address", "add", f"{host.address}/24", "dev", INTERFACE)
        for queue in network.queues:
            place = queue.index("dev") + 1
            run("tc", "-n", host.namespace, *queue[:place], INTERFACE, *queue[place:])
        run("ip", "-n", host.namespace, "link", "set", INTERFACE, "up")
