"""A network with a delay: every host's link is a TAP device of a switch that holds frames."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from .host import Host
from .processes import ProcessError, read_line
from .tools import ToolError, run

SOURCE = Path(__file__).with_name("switch.c")
NAMESPACES = Path("/run/netns")


def switch(
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
