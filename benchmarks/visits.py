"""Whether a setting is as fast at one visit as at another, in one job and in the next.

A tuning sees a setting for a few steps, and leaves the job at it for thousands. This visits a few
settings in turns, as a tuning does but for longer, in several jobs, and says by what steps of a
visit, visits and jobs differ. With ``--under`` it also runs each job with variables of its
environment set, in turns with one as it is.

    python benchmarks/visits.py --settings 1 1:2 --gradient-megabytes 4 --compute-seconds 0.02
    python benchmarks/visits.py --model vgg16 --device cuda --settings 25:4 25:8 \
        --under CUDA_DEVICE_MAX_CONNECTIONS=32
    python benchmarks/visits.py --model vgg16 --device cuda --ranks-per-node 2 \
        --settings 64:2:shards 25:4:leaders 25:8
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median, pstdev
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))  # where benchmarks and tests are

from bagua_client import Configuration
from benchmarks.support.cells.arms import FULL, MIB, Arm, ours
from benchmarks.support.cells.cell import (
    DEFAULT_COMPUTE_SECONDS,
    DEFAULT_GRADIENT_BYTES,
    MODELS,
    Cell,
)
from benchmarks.support.cells.conditions import conditions
from benchmarks.support.cells.run import Parts
from benchmarks.support.harness import print_table, write_json
from benchmarks.testbed import Network, Testbed

AS_IT_IS = "as it is"
Visit = list[float]
"""Seconds of the steps of one visit, in their order."""


@dataclass(frozen=True)
class Steadiness:
    """By what the steps under one setting differ.

    Attributes:
        seconds: of a step: the median of the visits' medians.
        fastest_seconds, slowest_seconds: of the visits' medians.
        inside: standard deviation of the steps of a visit over their mean; the visits' median.
        between: standard deviation of the visits' medians over their mean, in one job; the jobs'
            median. Far above what ``inside`` explains, a visit says little of the next one.
        jobs: slowest over fastest of the jobs' medians.
        neighbours: correlation of a step with the one after it in its visit, the visits' median.
            Below zero: slow and fast steps take turns, and a median of few steps is one or the
            other.
    """

    seconds: float
    fastest_seconds: float
    slowest_seconds: float
    inside: float
    between: float
    jobs: float
    neighbours: float


def steadiness(jobs: Sequence[Sequence[Visit]]) -> Steadiness:
    """From the visits of each job to one setting, at least two steps each."""
    medians = [[median(visit) for visit in visits] for visits in jobs]
    every = [each for of_job in medians for each in of_job]
    of_jobs = [median(of_job) for of_job in medians]
    visits = [visit for of_job in jobs for visit in of_job]
    return Steadiness(
        median(every),
        min(every),
        max(every),
        median(_deviation(visit) for visit in visits),
        median(_deviation(of_job) for of_job in medians),
        max(of_jobs) / min(of_jobs),
        median(_correlation(visit) for visit in visits),
    )


def _deviation(values: Sequence[float]) -> float:
    return pstdev(values) / fmean(values)


def _correlation(visit: Visit) -> float:
    """Of neighbours; 0 where all steps are alike."""
    mean = fmean(visit)
    squares = sum((each - mean) ** 2 for each in visit)
    products = sum((one - mean) * (other - mean) for one, other in pairwise(visit))
    return products / squares if squares else 0.0


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--model", choices=MODELS, default="vgg16")
    parser.add_argument("--network", default="unshaped")
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--ranks-per-node", type=int, default=1)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--settings", type=setting, nargs="+", metavar="MIB[:CHANNELS[:WAY]]",
                        default=[setting("25"), setting("25:4")],
                        help="two at least, such as 64:2:shards (default: 25 25:4)")  # fmt: skip
    parser.add_argument("--under", type=variables, nargs="+", default=[],
                        metavar="NAME=VALUE[,...]",
                        help="also run each job with these variables set")  # fmt: skip
    parser.add_argument("--jobs", type=int, default=2, help="of each kind")
    parser.add_argument("--visits", type=int, default=5, help="to each setting in each job")
    parser.add_argument("--steps", type=int, default=10, help="measured in each visit")
    parser.add_argument("--gradient-megabytes", type=float, default=DEFAULT_GRADIENT_BYTES / 1e6,
                        help="on the CPU")  # fmt: skip
    parser.add_argument("--compute-seconds", type=float, default=DEFAULT_COMPUTE_SECONDS,
                        help="of a step on the CPU")  # fmt: skip
    parser.add_argument("--output", type=Path, default=Path("build/visits"), metavar="FOLDER")
    options = parser.parse_args(argv)
    for name, least in (("jobs", 1), ("visits", 1), ("steps", 2)):
        if getattr(options, name) < least:
            parser.error(f"--{name} must be {least} at least")
    if len({arm["name"] for arm in options.settings}) < max(2, len(options.settings)):
        parser.error("--settings needs two at least, each once: one alone is never left")
    return options


def setting(text: str) -> Arm:
    """A setting from its text; raises ValueError for another one."""
    size, _, rest = text.partition(":")
    channels, _, way = rest.partition(":")
    configuration = Configuration(int(float(size) * MIB), way or "off", int(channels or 1))
    return ours(text, configuration.to_json())


def variables(text: str) -> dict[str, str]:
    """Raises ValueError for a text of another form."""
    return dict(each.split("=", 1) for each in text.split(","))


def run(options: argparse.Namespace) -> dict[str, Any]:
    """What was measured: by kind of job and by setting, the visits of each job."""
    network = Network.parse(options.network)
    cell = Cell(
        options.model,
        str(network),
        options.nodes,
        options.ranks_per_node,
        round(1e6 * options.gradient_megabytes),
        options.compute_seconds,
        options.device,
    )
    kinds = {AS_IT_IS: {}, **{_said(each): each for each in options.under}}
    folder = options.output.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    found: dict[str, dict[str, list[list[Visit]]]] = {}
    gpus = options.device == "cuda"
    with Testbed(network, options.nodes, options.ranks_per_node, gpus=gpus) as testbed:
        if testbed.fallback:
            print(f"over loopback: {testbed.fallback}", flush=True)
        parts = Parts(cell, FULL, folder, testbed, {})
        for number in range(options.jobs):
            # A B, B A: what the machine becomes slower by falls on both.
            for place, kind in enumerate(kinds if number % 2 == 0 else reversed(kinds)):
                name = f"job {number + 1}-{place + 1}"
                sizes = (options.visits, options.steps)
                job = parts.measure(name, options.settings, *sizes, variables=kinds[kind])
                for arm, visits in job["arms"].items():
                    found.setdefault(kind, {}).setdefault(arm, []).append(visits)
        return {
            "cell": cell.to_json(),
            "conditions": {**conditions(testbed), "load_after": os.getloadavg()},
            "fallback": testbed.fallback,
            "kinds": kinds,
            "visits": found,
        }


def _said(given: Mapping[str, str]) -> str:
    return ", ".join(f"{name}={value}" for name, value in given.items())


def show(found: Mapping[str, Mapping[str, Sequence[Sequence[Visit]]]]) -> None:
    """Print a line for each setting and kind of job."""
    rows = []
    for kind, settings in found.items():
        for name, jobs in settings.items():
            each = steadiness(jobs)
            span = f"{1e3 * each.fastest_seconds:.1f} to {1e3 * each.slowest_seconds:.1f}"
            shares = (f"{100 * share:.0f} %" for share in (each.inside, each.between))
            more = (f"{each.jobs:.2f}", f"{each.neighbours:+.2f}")
            rows.append([name, kind, f"{1e3 * each.seconds:.1f}", span, *shares, *more])
    header = ["setting", "job", "ms per step", "visits", "inside a visit", "between visits",
              "slowest job over fastest", "neighbours"]  # fmt: skip
    print_table(header, sorted(rows))


def main() -> None:
    options = arguments()
    for name in [name for name in os.environ if name.startswith("BAGUA_")]:
        del os.environ[name]
    began = time.monotonic()
    result = run(options)
    write_json(options.output / f"{result['cell']['name']}.json", result)
    show(result["visits"])
    print(f"{time.monotonic() - began:.0f} s in all")


if __name__ == "__main__":
    main()
