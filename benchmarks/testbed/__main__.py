"""Emulates hosts with a network between them on this machine, for any training script.

python -m benchmarks.testbed run --network 1gbit-2ms --serve -- train.py --epochs 3
python -m benchmarks.testbed probe --network 1gbit-2ms
python -m benchmarks.testbed list
python -m benchmarks.testbed clean
"""

from __future__ import annotations

import argparse
import json
import secrets
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import records, rootless
from .network import Network
from .testbed import Testbed
from .tools import ToolError

RESULTS = "BAGUA_TESTBED_RESULTS"


def run(arguments: argparse.Namespace) -> int:
    """Run the script on the testbed; its exit code."""
    # Its way out is that of Ctrl-C: everything is ended and removed.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    size = (arguments.nodes, arguments.ranks_per_node)
    with Testbed(arguments.network, *size, arguments.ordinary_priority, arguments.gpus) as testbed:
        print(f"testbed: {testbed}", file=sys.stderr, flush=True)
        results = (arguments.results or testbed.folder / "results").resolve()
        results.mkdir(parents=True, exist_ok=True)
        before = written(results)
        environment = {RESULTS: str(results)}
        if arguments.serve:
            token = secrets.token_urlsafe()
            database = (arguments.database or testbed.folder / "tuning.db").resolve()
            url = testbed.serve(database, token)
            print(f"testbed: the service is {url}", file=sys.stderr, flush=True)
            environment |= {
                "BAGUA_AUTOTUNE": "1",
                "BAGUA_AUTOTUNE_URL": url,
                "BAGUA_AUTOTUNE_TOKEN": token,
            }
        code = testbed.start(arguments.script, environment).wait(arguments.timeout)
        found, problems = read_since(results, before)
        if found:
            print(json.dumps(found, indent=2))
        complain(problems)
    return code


def probe(arguments: argparse.Namespace) -> int:
    """Measure the network itself."""
    with Testbed(arguments.network) as testbed:
        round_trip_seconds, bits_per_second = testbed.probe()
        rate = f"{bits_per_second / 1e6:.0f} Mbit/s of TCP"
        print(f"{testbed}: round trip {round_trip_seconds * 1e3:.2f} ms, {rate}")
    return 0


def clean(arguments: argparse.Namespace) -> int:
    """Remove what runs left."""
    removed, problems = records.clean(also_of_the_living=arguments.all)
    for record in removed:
        print(f"removed {record.run} ({record.network}, of process {record.owner})")
    return searched(problems)


def show(arguments: argparse.Namespace) -> int:
    """List the runs that have not been removed."""
    found, problems = records.read()
    for record in found:
        state = "alive" if record.owner_alive else "gone"
        count = len(record.processes())
        of_it = f"process {record.owner} {state}, {count} started by it"
        print(f"{record.run}  {record.network}  {of_it}")
    return searched(problems)


def searched(problems: Sequence[str]) -> int:
    """Say what was in the way, and where else something may be; the exit code."""
    complain(problems)
    if rootless.user() != 0:
        complain([f"searched {records.folder()}; runs that root started are found with sudo"])
    return 1 if problems else 0


def written(folder: Path) -> dict[Path, int]:
    """The JSON files that are there, and when each was written, in nanoseconds."""
    return {path: path.stat().st_mtime_ns for path in sorted(folder.glob("*.json"))}


def read_since(folder: Path, before: dict[Path, int]) -> tuple[dict[str, Any], list[str]]:
    """What the files that are new or changed hold, by name, and a sentence for each unreadable one.

    Args:
        before: what ``written`` said then.
    """
    found: dict[str, Any] = {}
    problems = []
    for path, time_ns in written(folder).items():
        if time_ns == before.get(path):
            continue
        try:
            found[path.name] = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            problems.append(f"{path} cannot be read: {error}")
    return found, problems


def complain(problems: Sequence[str]) -> None:
    for problem in problems:
        print(f"testbed: {problem}", file=sys.stderr)


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="python -m benchmarks.testbed",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = top.add_subparsers(required=True, metavar="run|probe|list|clean")

    network = argparse.ArgumentParser(add_help=False)
    network.add_argument(
        "--network", type=Network.parse, default=Network(1e9), metavar="NETWORK",
        help="such as 300mbit, 1gbit, 1gbit-2ms (round trip), unshaped  [default: 1gbit]",
    )  # fmt: skip

    one = commands.add_parser(
        "run", parents=[network], help="run a script with torchrun on several hosts"
    )
    one.add_argument("--nodes", type=int, default=2)
    one.add_argument("--ranks-per-node", type=int, default=2)
    one.add_argument("--serve", action="store_true", help="start the service too, and tune the job")
    one.add_argument(
        "--database", type=Path, help="database of the service  [default: a temporary one]"
    )
    one.add_argument(
        "--ordinary-priority", action="store_true",
        help="run ranks at ordinary priority, for ranks that really compute; by default they run "
        "before everything else on the machine",
    )  # fmt: skip
    one.add_argument(
        "--gpus", action="store_true",
        help="give each rank a GPU; NCCL uses the link between the hosts",
    )  # fmt: skip
    one.add_argument("--timeout", type=float, metavar="SECONDS", help="end the job after this time")
    one.add_argument(
        "--results", type=Path, metavar="FOLDER",
        help=f"the script's ${RESULTS}; JSON files that it writes there are printed on stdout at "
        "the end  [default: a temporary folder]",
    )  # fmt: skip
    one.add_argument("script", nargs="+", help="a training script and its arguments, after --")
    one.set_defaults(action=run)

    probing = commands.add_parser("probe", parents=[network], help="measure the network itself")
    probing.set_defaults(action=probe)

    commands.add_parser("list", help="list runs that have not been removed").set_defaults(
        action=show
    )
    cleaning = commands.add_parser(
        "clean", help="remove what is left of runs whose process is gone"
    )
    cleaning.add_argument("--all", action="store_true", help="also remove runs that still go on")
    cleaning.set_defaults(action=clean)
    return top


def main() -> None:
    arguments = parser().parse_args()
    if arguments.action in (run, probe):
        rootless.enter()
    try:
        sys.exit(arguments.action(arguments))
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    except (ToolError, TimeoutError, RuntimeError, ValueError) as error:
        sys.exit(f"testbed: {error}")


if __name__ == "__main__":
    main()
