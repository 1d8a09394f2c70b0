"""``python -m bagua_client SCRIPT``: starts a training script with our class under torch's name.

Python itself runs the script, in this same process: its command line, exit code, signals and
tracebacks are those of ``python SCRIPT``.
"""

from __future__ import annotations

import os
import sys
from argparse import REMAINDER, ArgumentParser
from collections.abc import Sequence

from bagua_client.environment import Environment
from bagua_client.launcher.flags import add_as_bagua, add_flags, variables
from bagua_client.launcher.job_environment import inherited, notice, obstacle


def main(arguments: Sequence[str] | None = None, module: str = "bagua_client") -> None:
    """Become the script; returns only by raising.

    Args:
        module: that was started by ``python -m``.
    """
    parser = ArgumentParser(
        prog=f"python -m {module}",
        description="Start a training script with bagua_client's DistributedDataParallel in the "
        "place of torch's. It is tuned with --autotune or BAGUA_AUTOTUNE=1; else nothing changes.",
        allow_abbrev=False,  # What the script takes must not be taken for a flag of ours.
    )
    parser.add_argument("-m", dest="is_module", action="store_true",
                        help="SCRIPT is the name of a module, as with python -m")  # fmt: skip
    add_flags(parser)
    add_as_bagua(parser)
    parser.add_argument("program", nargs=REMAINDER, metavar="SCRIPT ...",
                        help="a Python file or a module's name, and its arguments")  # fmt: skip
    options = parser.parse_args(arguments)
    if not options.program:
        parser.error("SCRIPT is missing")
    if problem := obstacle(options.as_bagua):
        parser.error(problem)
    if options.as_bagua and notice():
        print(f"bagua_client: {notice()}", file=sys.stderr)
    environment = {**os.environ, **inherited(as_bagua=options.as_bagua), **variables(options)}
    try:
        Environment.read(environment)
    except ValueError as error:
        parser.exit(2, f"{parser.prog}: error: {error}\n")
    program = ["-m", *options.program] if options.is_module else options.program
    command = [sys.executable, *_interpreter_options(module), *program]
    os.execve(sys.executable, command, environment)


def _interpreter_options(module: str) -> list[str]:
    """Return the options before ``-m MODULE``, such as ``-u``."""
    given = sys.orig_argv[1 : len(sys.orig_argv) - len(sys.argv) + 1]
    if not given or not given[-1].endswith(module):
        return []
    last = given.pop().removesuffix(module) or (given.pop() if given else "")
    # "-m" may stand alone, or at the end of other letters as in "-um".
    rest = last.removesuffix("m")
    return [*given, *([] if rest in ("", "-") else [rest])]
