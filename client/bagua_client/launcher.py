"""``python -m bagua_client SCRIPT``: starts an unmodified training script, in which our class
stands under the name of torch's. ``bagua-run`` (:mod:`bagua_client.run`) has the same flags.

Python itself runs the script, in this same process: its command line, exit code, signals and
tracebacks are those of ``python SCRIPT``. Each process of the job replaces torch's class when it
imports torch. It does not matter what starts the processes (torchrun, Accelerate, Lightning,
``multiprocessing``, a shell script): they inherit two environment variables, and their command
lines stay as they are.
"""

from __future__ import annotations

import os
import sys
from argparse import REMAINDER, SUPPRESS, ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from bagua_client.environment import Environment
from bagua_client.integrations.replacement import replace_torchs_class
from bagua_client.startup import REPLACES_VARIABLE

__all__ = ["main", "replace_torchs_class"]


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


_PACKAGE = Path(__file__).resolve().parent
STARTUP = str(_PACKAGE / "startup")
AS_BAGUA = str(_PACKAGE.parent / "bagua_compat" / "as_bagua")
"""The folder that holds the package ``bagua``; whoever has it on PYTHONPATH imports ours. It is
part of ``bagua_compat``, which may have been left out."""


def inherited(as_bagua: bool = False) -> dict[str, str]:
    """The variables, beside those that are there already, of a job whose torch has our class.

    Args:
        as_bagua: whether ``import bagua`` finds ours in it; it goes on doing so in a job that is
            started in such a job.
    """
    given = os.environ.get("PYTHONPATH")
    # An empty path stands for the working directory, but nothing for no path.
    paths = [path for path in given.split(os.pathsep) if path != STARTUP] if given else []
    if as_bagua and AS_BAGUA not in paths:
        paths.insert(0, AS_BAGUA)
    root = str(_PACKAGE.parent)
    # "python -m" finds modules in the working directory, where a script does not.
    first, *others = map(os.path.abspath, sys.path)
    if first == root and root not in others:
        paths.append(root)
    return {REPLACES_VARIABLE: "1", "PYTHONPATH": os.pathsep.join([STARTUP, *paths])}


def obstacle(as_bagua: bool) -> str:
    """Why this Python's children would not inherit it; empty: they do."""
    if as_bagua and not os.path.isdir(AS_BAGUA):
        return "--as-bagua needs the package bagua_compat, which is not installed"
    if sys.flags.ignore_environment or sys.flags.no_site:
        return (
            "an unmodified script cannot be tuned with Python's options -E, -I and -S, which "
            "disable PYTHONPATH or sitecustomize; start it without them, or wrap the model in "
            "bagua_client.DistributedDataParallel"
        )
    return ""


def notice() -> str:
    """Return what to tell who runs a script as Bagua's beside Bagua itself; empty: it is not
    installed.
    """
    place = _installed_bagua()
    if place is None:
        return ""
    return (
        f"Bagua itself is installed ({place}); this job uses bagua_client in its place, and "
        "nothing of it is changed"
    )


def _installed_bagua() -> str | None:
    """Return where ``import bagua`` would find Bagua itself; None: it is not installed."""
    places = [place for place in sys.path if os.path.abspath(place) != AS_BAGUA]
    spec = PathFinder.find_spec("bagua", places)
    return spec.origin if spec is not None and spec.has_location else None


@dataclass(frozen=True)
class Flag:
    """A flag that sets a variable.

    Attributes:
        name: Bagua's, with underscores; hyphens do as well.
        kind: of its value; None: it has none, and means 1.
    """

    name: str
    variable: str
    kind: Callable[[str], int | float] | None
    help: str


@dataclass(frozen=True)
class Gone:
    """A flag of Bagua's launchers that is accepted and ignored.

    Attributes:
        name: as above.
        takes_value: whether one follows it.
        instead: the sentence that says what replaces it; empty: nothing has to.
    """

    name: str
    takes_value: bool
    instead: str


FLAGS = (
    Flag("autotune", "BAGUA_AUTOTUNE", None, "tune the job while it trains"),
    Flag("autotune_level", "BAGUA_AUTOTUNE", int, "the same: 0 off, 1 on"),
    Flag("autotune_max_samples", "BAGUA_AUTOTUNE_MAX_SAMPLES", int, "most trials"),
    Flag("autotune_fresh", "BAGUA_AUTOTUNE_FRESH", None, "use nothing that earlier runs found"),
    Flag("autotune_memory", "BAGUA_AUTOTUNE_MEMORY", float, "largest share of a GPU's memory"),
    Flag("autotune_max_minutes", "BAGUA_AUTOTUNE_MAX_MINUTES", float, "most minutes of a search"),
    Flag("autotune_max_rounds", "BAGUA_AUTOTUNE_MAX_ROUNDS", int, "most tunings of the job"),
    Flag(
        "autotune_sampling_confidence_time",
        "BAGUA_AUTOTUNE_SAMPLING_CONFIDENCE_TIME_S",
        float,
        "most seconds of a trial",
    ),
    Flag(
        "autotune_warmup_time",
        "BAGUA_AUTOTUNE_WARMUP_TIME_S",
        float,
        "most seconds before the first trial",
    ),
    Flag(
        "is_output_autotune_log",
        "BAGUA_IS_OUTPUT_AUTOTUNE_LOG",
        None,
        "write a CSV line for each trial",
    ),
    Flag("bagua_service_port", "BAGUA_SERVICE_PORT", int, "port of the service that rank 0 starts"),
    Flag(
        "default_bucket_size",
        "BAGUA_DEFAULT_BUCKET_SIZE",
        int,
        "bytes of a bucket at the start, where the script gives no bucket_cap_mb",
    ),
)

_NET = "is not needed: tuning tries sending each bucket over several connections (channels)"
_LOG = "is not used: --is_output_autotune_log writes the log where the service runs"
_SSH = "is not used: bagua-run does not start anything over ssh"
GONE = (
    Gone("enable_bagua_net", False, _NET),
    Gone("bagua-net_switch_on", False, _NET),
    Gone("report_metrics", False, "is not used: the service always has metrics at /metrics"),
    Gone("autotune_log_file", True, _LOG),
    Gone("ssh_port", True, _SSH),
    Gone("use_env", False, ""),  # torchrun knows no other way
)


def add_flags(parser: ArgumentParser) -> None:
    """Add the flags that set variables; one that is not given sets nothing."""
    group = parser.add_argument_group("tuning", "the same as the variables, in all processes")
    for flag in FLAGS:
        how: dict[str, Any] = {"type": flag.kind, "metavar": "N"}
        if flag.kind is None:
            how = {"action": "store_true"}
        group.add_argument(
            *spellings(flag.name),
            dest=flag.name,
            default=SUPPRESS,
            help=f"{flag.help} ({flag.variable})",
            **how,
        )


def add_as_bagua(parser: ArgumentParser) -> None:
    """The flag for scripts that import Bagua."""
    parser.add_argument(
        *spellings("as_bagua"),
        action="store_true",
        help="run a script that imports bagua: it gets bagua_compat under that name",
    )


def add_gone_flags(parser: ArgumentParser) -> None:
    """Add the flags that are understood and do nothing."""
    for gone in GONE:
        action = "store" if gone.takes_value else "store_true"
        parser.add_argument(
            *spellings(gone.name), dest=gone.name, action=action, default=SUPPRESS, help=SUPPRESS
        )


def variables(options: Namespace) -> dict[str, str]:
    """The variables that the given flags set."""
    return {
        flag.variable: "1" if flag.kind is None else str(getattr(options, flag.name))
        for flag in FLAGS
        if flag.name in options
    }


def farewells(options: Namespace) -> list[str]:
    """A line for each flag that is given and gone."""
    given = vars(options)
    spoken = (gone for gone in GONE if gone.name in given and gone.instead)
    return [f"--{gone.name} {gone.instead}" for gone in spoken]


def spellings(name: str) -> list[str]:
    """``--a-b`` and ``--a_b``."""
    return list(dict.fromkeys([f"--{name.replace('_', '-')}", f"--{name}"]))
