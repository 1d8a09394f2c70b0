"""The link of every host, its rate and its delay, and how links are made between namespaces.

Rates are by ``tc``. Without a delay there is a bridge, with a pair of interfaces for each host.
With one, every host's link is a TAP device of a switch that holds frames.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .host import Host
from .job import ProcessError, read_line
from .tools import ToolError, run

RATE_UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
TIME_UNITS = {"us": 1e-6, "ms": 1e-3}
FORM = re.compile(
    r"(?:unshaped|([\d.]+)(kbit|mbit|gbit)(?:-flow([\d.]+)(kbit|mbit|gbit))?)(?:-([\d.]+)(us|ms))?"
)

# What a link may send at once after a pause. At 1 ms of the rate a message of a few KB takes the
# time that the rate gives it, and the kernel's timer still keeps up with the rate.
BURST_SECONDS = 0.001
# A frame must fit in whole, also with headers, or nothing is ever sent.
LEAST_BURST_BYTES = 8192
# A connection's class is chosen by the sum of its ports: two of eight connections rarely share one.
FLOW_CLASSES, FIRST_CLASS = 256, 0x100
# Of a frame that is TCP (byte 23) both ports (at 34 and 36); see bpf(4) and tc-bpf(8). Anything
# else has no class, and the whole link.
FLOW_PROGRAM = ",".join(
    [
        "10",
        "48 0 0 23",
        "21 0 7 6",
        "40 0 0 34",
        "7 0 0 0",
        "40 0 0 36",
        "12 0 0 0",
        f"84 0 0 {FLOW_CLASSES - 1}",
        f"4 0 0 {(1 << 16) + FIRST_CLASS}",
        "22 0 0 0",
        "6 0 0 0",
    ]
)
# What may wait behind it; much, so that no frame is lost and no retransmission timer runs.
QUEUE_SECONDS = 0.1


@dataclass(frozen=True)
class Network:
    """What lies between two hosts.

    Attributes:
        rate_bits_per_second: at which a host sends, Ethernet headers counted, so that TCP carries
            about 4 % less, as on a real link; None: as fast as the kernel can.
        round_trip_seconds: added to what the kernel needs (some 50 microseconds).
        flow_bits_per_second: at which one connection sends at most; None: at the link's rate.
    """

    rate_bits_per_second: float | None = None
    round_trip_seconds: float = 0.0
    flow_bits_per_second: float | None = None

    @classmethod
    def parse(cls, text: str) -> Network:
        """``1gbit``, ``300mbit``, ``1gbit-2ms`` (round trip), ``1gbit-flow200mbit`` (of which one
        connection gets 200), ``unshaped``.

        Raises:
            ValueError: it is none of these.
        """
        match = FORM.fullmatch(text.strip().lower())
        try:
            if match is None:
                raise ValueError
            rate, rate_unit, flow, flow_unit, time, time_unit = match.groups()
            network = cls(
                float(rate) * RATE_UNITS[rate_unit] if rate else None,
                float(time) * TIME_UNITS[time_unit] if time else 0.0,
                float(flow) * RATE_UNITS[flow_unit] if flow else None,
            )
            if 0 in (network.rate_bits_per_second, network.flow_bits_per_second):
                raise ValueError
        except ValueError:
            raise ValueError(
                "a network is written like 300mbit, 1gbit, 1gbit-2ms, 1gbit-flow200mbit or "
                f"unshaped, not {text!r}"
            ) from None
        return network

    def __str__(self) -> str:
        rate = self.rate_bits_per_second
        text = "unshaped" if rate is None else _rate(rate)
        if self.flow_bits_per_second is not None:
            text += f"-flow{_rate(self.flow_bits_per_second)}"
        if self.round_trip_seconds:
            text += f"-{self.round_trip_seconds * 1e3:.10g}ms"
        return text

    @property
    def queues(self) -> list[list[str]]:
        """``tc``'s words for what a host sends through, but for the interface that stands where
        ``dev`` does (tc-tbf(8), tc-htb(8), tc-bpf(8)); empty where nothing is shaped."""
        rate, flow = self.rate_bits_per_second, self.flow_bits_per_second
        if rate is None:
            return []
        if flow is None:
            words = (
                f"tbf rate {rate:.0f}bit burst {_burst_bytes(rate):.0f} latency {QUEUE_SECONDS:g}s"
            )
            return [["qdisc", "add", "dev", "root", *words.split()]]
        whole = ["htb", "rate", f"{rate:.0f}bit", "burst", f"{_burst_bytes(rate):.0f}"]
        share = ["htb", "rate", f"{flow:.0f}bit", "burst", f"{_burst_bytes(flow):.0f}"]
        classes = [
            [
                "class",
                "add",
                "dev",
                "parent",
                "1:1",
                "classid",
                f"1:{FIRST_CLASS + place:x}",
                *share,
            ]
            for place in range(FLOW_CLASSES)
        ]
        classify = ["protocol", "ip", "prio", "1", "bpf", "bytecode", FLOW_PROGRAM]
        return [
            ["qdisc", "add", "dev", "root", "handle", "1:", "htb", "default", "1"],
            ["class", "add", "dev", "parent", "1:", "classid", "1:1", *whole],
            *classes,
            ["filter", "add", "dev", "parent", "1:", *classify],
        ]


def _rate(bits_per_second: float) -> str:
    unit = "gbit" if bits_per_second >= 1e9 else "mbit"
    return f"{bits_per_second / RATE_UNITS[unit]:.10g}{unit}"


def _burst_bytes(rate: float) -> float:
    return max(rate / 8 * BURST_SECONDS, LEAST_BURST_BYTES)


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
