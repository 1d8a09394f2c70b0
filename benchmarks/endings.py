"""Trainings that end, beside torch's class in turns, on a machine that is busy: is one that has
finished reported as failed, and does a process keep what was made for a life that is over?

Short trainings of two ranks under torchrun end about when rank 0's service begins to answer; their
exit statuses are counted. Then one process for each rank goes through many lives of
torch.distributed, each ending in the middle of its tuning; after each it is counted what is left.
The exit status is 1 if more trainings failed than with torch's class, or if the lives leave more
threads, or descriptors that grow.

    python benchmarks/endings.py
    python benchmarks/endings.py --trainings 20 --lives 5 --busy 2
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PROGRAM = Path(__file__).parents[1] / "tests" / "e2e" / "programs" / "lives.py"
KINDS = "stock", "ours"
SERVICES_DESCRIPTORS = 1
"""The pipe of the service, which rank 0 starts once for all lives."""


def run(kind: str, lives: int, seconds: float) -> subprocess.CompletedProcess[str]:
    """One training."""
    tuned = {"BAGUA_AUTOTUNE": str(int(kind == "ours")), "BAGUA_AUTOTUNE_WARMUP_TIME_S": "0.2"}
    with tempfile.TemporaryDirectory() as folder:
        quiet = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "XDG_DATA_HOME": folder}
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        asked = [PROGRAM, kind, str(lives), str(seconds), folder]
        return subprocess.run(
            [*torchrun, "--nproc-per-node", "2", *asked],
            capture_output=True,
            text=True,
            env={**os.environ, **tuned, **quiet},
        )


@contextmanager
def busy(count: int) -> Iterator[None]:
    """So many processes that want a core each."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def left(printed: str) -> list[tuple[int, int]]:
    """What rank 0 has left after each life: descriptors and threads."""
    words = [line.split() for line in printed.splitlines() if line.startswith("life ")]
    return [(int(each[5]), int(each[6])) for each in words if each[3] == "0"]


def trainings(count: int, seconds: float) -> bool:
    """Whether no more of ours failed than of torch's."""
    ends: dict[str, Counter[int]] = {kind: Counter() for kind in KINDS}
    aborts: Counter[str] = Counter()
    for _ in range(count):
        for kind in KINDS:
            done = run(kind, 1, seconds)
            ends[kind][done.returncode] += 1
            aborts[kind] += "terminate called" in done.stderr
            print(f"{kind}: exit statuses {dict(ends[kind])}, {aborts[kind]} aborted", flush=True)
    return ends["ours"][0] >= ends["stock"][0]


def lives(count: int, seconds: float) -> bool:
    """Whether ours leave no more threads than torch's, and no descriptors."""
    found = {}
    for kind in KINDS:
        done = run(kind, count, seconds)
        found[kind] = each = left(done.stdout)
        print(f"{kind}: descriptors and threads after {len(each)} lives: {Counter(each)}")
        if done.returncode:
            print(done.stderr, file=sys.stderr)
    if [len(each) for each in found.values()] != [count, count]:
        return False
    descriptors, threads = (max(each) for each in zip(*found["stock"], strict=True))
    most = descriptors + SERVICES_DESCRIPTORS, threads
    return all(a <= most[0] and b <= most[1] for a, b in found["ours"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--trainings", type=int, default=100, help="of each kind (default: 100)")
    parser.add_argument("--lives", type=int, default=50, help="of each kind (default: 50)")
    parser.add_argument("--seconds", type=float, default=3.0, help="of each training (default: 3)")
    parser.add_argument("--busy", type=int, default=6, help="loops beside them (default: 6)")
    args = parser.parse_args()
    with busy(args.busy):
        is_well = trainings(args.trainings, args.seconds)
        if args.lives:
            is_well &= lives(args.lives, args.seconds)
    return 0 if is_well else 1


if __name__ == "__main__":
    sys.exit(main())
