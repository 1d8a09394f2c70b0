"""The whole path in two minutes: two hosts, a service, a real training of 4 ranks, the result.

    python -m examples.demo

Makes two hosts of this machine with a link of 200 Mbit/s between them, starts the service and
examples/digits.py with BAGUA_AUTOTUNE=1 there, and shows what comes of it. The training ends when
its tuning does.
"""

from __future__ import annotations

import argparse
import secrets
import socket
import subprocess
import sys
from pathlib import Path

import torch

from benchmarks.testbed import Network, Testbed, relay, rootless

JOB = "digits"
NETWORK, GPU_NETWORK = "200mbit", "10gbit"
# On two quiet cores all is over in three minutes; the minutes keep it under five beside other work.
LIMITS = {
    "BAGUA_AUTOTUNE_MAX_SAMPLES": "12",
    "BAGUA_AUTOTUNE_MAX_MINUTES": "2.5",
    "BAGUA_AUTOTUNE_SAMPLING_CONFIDENCE_TIME_S": "4",
    "BAGUA_AUTOTUNE_WARMUP_TIME_S": "8",
}
TRAINING = [str(Path(__file__).with_name("digits.py")), "--batch", "8", "--until-tuned"]
TRAINING += ["--minutes", "4", "--width", "32"]
LAST_LOOK_SECONDS = 10.0
"""The command that watches looks once a second."""


def made() -> Testbed:
    """Two hosts: of one rank with a GPU where there are GPUs, else of two ranks."""
    found = torch.cuda.device_count()
    if found:
        shared = ["0", "0"] if found == 1 else True
        return Testbed(Network.parse(GPU_NETWORK), ranks_per_node=1, gpus=shared)
    return Testbed(Network.parse(NETWORK), ordinary_priority=True)


def introduction(testbed: Testbed) -> str:
    """What the training is about to run on."""
    if testbed.fallback is not None:
        return f"No emulated link here, and maybe nothing to gain: {testbed.fallback}."
    if testbed.ranks_per_node == 2:
        hosts = "two hosts of two ranks on this machine"
    elif torch.cuda.device_count() == 1:
        hosts = "two hosts of one rank on this machine, which share its GPU"
    else:
        hosts = "two hosts of one rank on this machine, each with a GPU"
    rate = (testbed.network.rate_bits_per_second or 0) / 1e6
    said = f"{rate:g} Mbit/s" if rate < 1000 else f"{rate / 1000:g} Gbit/s"
    return f"Emulated link of {said} between {hosts}."


def command(*words: str, database: Path) -> list[str]:
    """One of the terminal, which reads the database of the service."""
    return [sys.executable, "-m", "bagua_autotune", *words, "--database", f"sqlite:///{database}"]


def tune(testbed: Testbed, page: socket.socket) -> int:
    """Train until the tuning ends, and show it; the training's exit code."""
    folder, token = testbed.folder, secrets.token_urlsafe()
    database, log = folder / "demo.db", folder / "training.log"
    url = testbed.serve(database, token, folder / "service.log")
    print(f"Watch it in a browser: {testbed.publish(url, page)}/#token={token}", flush=True)
    tuned = {"BAGUA_AUTOTUNE": "1", "BAGUA_AUTOTUNE_URL": url, "BAGUA_AUTOTUNE_TOKEN": token}
    training = testbed.start(TRAINING, {**LIMITS, **tuned, "BAGUA_AUTOTUNE_JOB": JOB}, log)
    watching = subprocess.Popen(command("watch", JOB, "--wait", database=database))
    try:
        if code := training.wait():
            print(log.read_text(), file=sys.stderr)
            return code
        watching.wait(LAST_LOOK_SECONDS)
    finally:
        watching.kill()
        watching.wait()
    print(flush=True)
    return subprocess.run(command("show", JOB, database=database)).returncode


def main() -> None:
    argparse.ArgumentParser(
        prog="python -m examples.demo",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    ).parse_args()
    page = relay.listener()
    rootless.enter(page)
    with made() as testbed:
        print(introduction(testbed), flush=True)
        code = tune(testbed, page)
    sys.exit(code)


if __name__ == "__main__":
    main()
