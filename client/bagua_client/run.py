"""``bagua-run``, or ``python -m bagua_client.run``: torchrun, with the flags of Bagua's launchers.

Takes the command lines of ``bagua.distributed.run`` and ``bagua.distributed.launch``; torchrun does
the rest, with its own defaults. In the processes that it starts, our class replaces torch's
DistributedDataParallel.
"""

from __future__ import annotations

import os
import sys
from argparse import SUPPRESS, ArgumentParser, Namespace
from collections.abc import Sequence

from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.elastic.utils.api import macros

from bagua_client.environment import Environment
from bagua_client.launcher import (
    add_as_bagua,
    add_flags,
    add_gone_flags,
    farewells,
    inherited,
    notice,
    obstacle,
    spellings,
    variables,
)


def parser() -> ArgumentParser:
    """Return a parser of torchrun's options and ours."""
    found: ArgumentParser = torchrun.get_args_parser()
    found.description = __doc__
    found.prog = "bagua-run"
    found.allow_abbrev = False  # What the script takes must not be taken for a flag of ours.
    add_flags(found)
    add_as_bagua(found)
    add_gone_flags(found)
    found.add_argument("--logdir", default=SUPPRESS, help="--log-dir, and --redirects 3")
    found.add_argument(*spellings("set_additional_flag"), action="store_true", default=SUPPRESS,
                       help="pass --local_rank=K to the script")  # fmt: skip
    found.add_argument("-x", dest="exported", action="append", default=[], metavar="NAME=VALUE",
                       help="a variable for all processes")  # fmt: skip
    found.add_argument(*spellings("host_list"), default=SUPPRESS, help=SUPPRESS)
    return found


@record
def main(arguments: Sequence[str] | None = None) -> None:
    """Run the job of the command line."""
    known = parser()
    options = known.parse_args(arguments)
    for problem in (obstacle(options.as_bagua), _several_hosts(options)):
        if problem:
            known.error(problem)
    lines = farewells(options)
    if options.as_bagua and notice():
        lines.append(notice())
    for line in lines:
        print(f"bagua-run: {line}", file=sys.stderr)
    for exported in options.exported:
        name, equals, value = exported.partition("=")
        if equals:  # else it is inherited
            os.environ[name] = value
    os.environ.update(inherited(as_bagua=options.as_bagua) | variables(options))
    try:
        Environment.read()
    except ValueError as error:
        known.exit(2, f"{known.prog}: error: {error}\n")
    _translate(options)
    torchrun.run(options)  # type: ignore[no-untyped-call]


def _translate(options: Namespace) -> None:
    """Translate options that torchrun has under another name."""
    if "logdir" in options:
        options.log_dir, options.redirects = options.logdir, "3"
    if "set_additional_flag" in options:
        options.training_script_args.insert(0, f"--local_rank={macros.local_rank}")


def _several_hosts(options: Namespace) -> str:
    """Bagua started the ranks of all hosts of a list over ssh; empty: nobody expects that here."""
    hosts = [host.partition(":")[0] for host in getattr(options, "host_list", "").split(",")]
    if len(hosts) < 2 or options.nnodes != "1:1":
        return ""
    return (
        "--host_list does not start anything over ssh; run this on each of the hosts, where K is 0 "
        f"on {hosts[0]}, 1 on {hosts[1]} and so on: bagua-run --nnodes {len(hosts)} "
        f"--node-rank K --master-addr {hosts[0]} ... (or by srun, mpirun, parallel-ssh)"
    )


if __name__ == "__main__":
    main()
