"""Start a training on this machine as if it were several nodes: one torchrun for each.

    python examples/launch.py --nodes 2 --ranks-per-node 2 examples/digits.py --epochs 3

When one of them fails, and after Ctrl-C, all of them end.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start(
    script: Sequence[str],
    nodes: int = 2,
    ranks_per_node: int = 2,
    environment: Mapping[str, str] = os.environ,
) -> list[subprocess.Popen[bytes]]:
    """One torchrun for each node; ``script`` is the program and its arguments."""
    port = free_port()
    common = [sys.executable, "-m", "torch.distributed.run"]
    common += ["--nnodes", str(nodes), "--nproc-per-node", str(ranks_per_node)]
    common += ["--master-addr", "127.0.0.1", "--master-port", str(port)]
    # torchrun says at length that it sets this to 1; on one machine that is what we want.
    variables = {"OMP_NUM_THREADS": "1", **environment}
    return [
        subprocess.Popen([*common, "--node-rank", str(node), *script], env=variables)
        for node in range(nodes)
    ]


def wait(processes: Sequence[subprocess.Popen[bytes]]) -> int:
    """The first exit code that is not 0; when one fails or we are interrupted, all end."""
    try:
        codes = [process.wait() for process in processes]
    except KeyboardInterrupt:
        codes = [128 + signal.SIGINT]
    finally:
        for process in processes:
            if process.poll() is None:
                process.terminate()
        for process in processes:
            process.wait()
    return next((code for code in codes if code), 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--ranks-per-node", type=int, default=2)
    parser.add_argument("script", nargs=argparse.REMAINDER)
    arguments = parser.parse_args()
    if not arguments.script:
        parser.error("name a training script, such as examples/digits.py")
    sys.exit(wait(start(arguments.script, arguments.nodes, arguments.ranks_per_node)))


if __name__ == "__main__":
    main()
