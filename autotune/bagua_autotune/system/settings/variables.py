"""The environment variables that are searched where no preset is named."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from bagua_autotune.system.settings.places import EnvironmentVariable
from bagua_autotune.system.settings.setting import Setting

MIB = 2**20
CHANNELS = "BAGUA_DEFAULT_CHANNELS"
THREADS = "NCCL_SOCKET_NTHREADS"
SOCKETS = "NCCL_NSOCKS_PERTHREAD"
MIN_CHANNELS = "NCCL_MIN_NCHANNELS"
BUFFER_BYTES = "NCCL_BUFFSIZE"
INTERFACES = {"nccl": "NCCL_SOCKET_IFNAME", "gloo": "GLOO_SOCKET_IFNAME"}
BACKENDS = tuple(INTERFACES)

CONNECTED = (THREADS, SOCKETS, CHANNELS)
"""Variables that each multiply the connections between two ranks."""
NCCL_VALUES = {
    THREADS: ("1", "2", "4", "8"),
    SOCKETS: ("1", "2", "4", "8"),
    MIN_CHANNELS: ("2", "4", "8", "16"),
    BUFFER_BYTES: tuple(str(n * MIB) for n in (1, 2, 4, 8, 16)),
}
CHANNELS_VALUES = ("1", "2", "4", "8", "16")
# The value in force on most machines if a variable is not set.
ASSUMED = {
    THREADS: "1",
    SOCKETS: "1",
    MIN_CHANNELS: "1",
    BUFFER_BYTES: str(4 * MIB),
    CHANNELS: "1",
}
TAKES_MEMORY = (MIN_CHANNELS, BUFFER_BYTES)


def find_variables(
    backend: str,
    has_channels: bool,
    environment: Mapping[str, str],
    interfaces: Sequence[str] = (),
    only: Sequence[str] = (),
) -> list[Setting]:
    """The variables that are searched for a job.

    Args:
        backend: of its gradients: one of ``BACKENDS``.
        has_channels: whether our client sends its buckets.
        environment: the user's.
        interfaces: network interfaces that the user named.
        only: names that the user named; our client's channels may be one, whatever the job uses.
    """
    values: dict[str, Sequence[str]] = {}
    if backend == "nccl":
        values |= NCCL_VALUES
    if has_channels or CHANNELS in only:
        values[CHANNELS] = CHANNELS_VALUES
    if len(interfaces) > 1:
        values[INTERFACES[backend]] = [*interfaces, ",".join(interfaces)]
    return [
        Setting(
            EnvironmentVariable(name),
            tuple(dict.fromkeys(tried)),
            environment.get(name) or None,
            ASSUMED.get(name),
            takes_memory=name in TAKES_MEMORY,
        )
        for name, tried in values.items()
    ]
