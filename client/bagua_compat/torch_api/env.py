"""What Bagua's launchers tell a process, read from its environment."""

from __future__ import annotations

import os
import socket

from bagua_wire import limits


def get_world_size() -> int:
    """Return how many processes the job has; 1 where no launcher tells."""
    return int(os.environ.get("WORLD_SIZE", 1))


def get_rank() -> int:
    """This process's number in the job, from 0."""
    return int(os.environ.get("RANK", 0))


def get_local_rank() -> int:
    """This process's number on its node, from 0."""
    return int(os.environ.get("LOCAL_RANK", 0))


def get_local_size() -> int:
    """How many processes of the job this node has."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def get_node_rank() -> int:
    """The node's number, from 0: torchrun's GROUP_RANK, else NODE_RANK of a static launcher."""
    elastic = {"RANK", "GROUP_RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE"}
    name = "GROUP_RANK" if elastic <= os.environ.keys() else "NODE_RANK"
    return int(os.environ.get(name, 0))


def get_master_addr() -> str:
    """Return rank 0's address."""
    return os.environ.get("MASTER_ADDR", "127.0.0.1")


def get_default_bucket_size() -> int:
    """Bytes of a bucket before anything is tuned."""
    return int(os.environ.get("BAGUA_DEFAULT_BUCKET_SIZE", 10 * 1024**2))


def get_bagua_service_port() -> int:
    """The port of the tuning service; -1: any free one."""
    return int(os.environ.get("BAGUA_SERVICE_PORT", -1))


def is_report_metrics_switch_on() -> bool:
    """BAGUA_REPORT_METRICS, which neither Bagua nor this project uses."""
    return int(os.environ.get("BAGUA_REPORT_METRICS", 0)) == 1


def get_autotune_level() -> int:
    """Return whether the job is tuned: 0: not; from 1 on: it is."""
    return int(os.environ.get("BAGUA_AUTOTUNE", 0))


def get_autotune_max_samples() -> int:
    """Return the most trials that a tuning makes."""
    return int(os.environ.get("BAGUA_AUTOTUNE_MAX_SAMPLES", limits.SAMPLES))


def get_autotune_sampling_confidence_time_s() -> float:
    """Return the most seconds that a trial takes."""
    return float(os.environ.get("BAGUA_AUTOTUNE_SAMPLING_CONFIDENCE_TIME_S", 5.0))


def get_autotune_warmup_time_s() -> float:
    """Return the most seconds before the first trial."""
    return float(os.environ.get("BAGUA_AUTOTUNE_WARMUP_TIME_S", 30.0))


def get_is_output_autotune_log() -> bool:
    """Whether the service writes a line of CSV for each trial.

    Any text switches it on in Bagua, "0" too, which is what its launchers set; here 0 is off.
    """
    return os.environ.get("BAGUA_IS_OUTPUT_AUTOTUNE_LOG", "0").strip() not in ("", "0")


def get_autotune_server_wait_time() -> int:
    """Seconds in which a service that is absent is asked again often."""
    return int(os.environ.get("BAGUA_AUTOTUNE_SERVER_WAIT_TIME", 300))


def find_free_network_port() -> int:
    """A TCP port that no process of this host listens on now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        listener.bind(("", 0))
        port: int = listener.getsockname()[1]
        return port
