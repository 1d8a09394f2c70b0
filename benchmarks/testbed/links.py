"""Links between namespaces, with rates by ``tc``.

Without a delay: a bridge, with a pair of interfaces for each host. With one: every host's link is a
TAP device of a switch that holds frames.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from .host import Host
from .network import Network
from .processes import ProcessError, read_line
from .tools import ToolError, run

INTERFACE = "eth0"
SOURCE = Path(__file__).with_name("switch.c")
NAMESPACES = Path("/run/netns")


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


def delayed(
    hosts: Sequence[Host], place: Host, round_trip_seconds: float, folder: Path
) -> subprocess.Popen[bytes]:
    """Compile the switch in ``folder`` and start it in ``place``; the hosts' links are there then.

    The frames of either direction are held for half of the round trip.

    Raises:
        ToolError: no C compiler, or the kernel has no TAP devices.
    """
    if shutil.which("cc") is None:
        raise ToolError("a delay needs a C compiler named cc")
    program = folder / "switch"
    run("cc", "-O2", "-o", str(program), str(SOURCE))
    command = [str(program), f"{round_trip_seconds / 2 * 1e9:.0f}", hosts[0].interface]
    command += [str(NAMESPACES / str(host.namespace)) for host in hosts]
    process = place.popen(command, hurried=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        read_line(process)
    except ProcessError as error:
        raise ToolError(f"the switch for the delay {error}") from None
    return process


def bring_up(hosts: Sequence[Host], network: Network) -> None:
    """Addresses, and the rate at which each host sends."""
    for host in hosts:
        assert host.namespace is not None
        run("ip", "-n", host.namespace, "address", "add", f"{host.address}/24", "dev", INTERFACE)
        for queue in network.queues:
            place = queue.index("dev") + 1
            run("tc", "-n", host.namespace, *queue[:place], INTERFACE, *queue[place:])
        run("ip", "-n", host.namespace, "link", "set", INTERFACE, "up")
