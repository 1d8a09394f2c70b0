"""The flags of our commands: those of Bagua's launchers, and which of them have no use now."""

from __future__ import annotations

from argparse import SUPPRESS, ArgumentParser, Namespace
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


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
