"""The few lines that every user sees, also one who configured no logging."""

from __future__ import annotations

import ipaddress
import logging
import shlex
import socket
from collections.abc import Sequence
from urllib.parse import urlsplit

ENDED_FIRST = "the training ended before its tuning did"

_package = logging.getLogger("bagua_client")


def announce(logger: logging.Logger, message: str, *arguments: object) -> None:
    """Log at INFO; where logging has no handler at all, write to standard error.

    Python's handler of last resort does the same for warnings only. The root logger stays as it
    is, so whoever configures logging gets the line once, or not at all if INFO is below their
    level. A level of the logger ``bagua_client`` counts without a handler, too.
    """
    if logger.hasHandlers():
        logger.info(message, *arguments)
        return
    least = max(logger.level or _package.level, logging.root.manager.disable + 1)
    if least <= logging.INFO and not logger.disabled:
        record = logger.makeRecord(logger.name, logging.INFO, __file__, 0, message, arguments, None)
        # Made anew: standard error may have been redirected since the last one.
        logging.StreamHandler().handle(record)


def before_that(number: int, summary: str) -> str:
    """The result of that round, behind why the one after it has none."""
    return f"; before that (round {number}): {summary}"


def announce_page(logger: logging.Logger, job_name: str, page: str) -> None:
    """Say where the job's page is; if only this host reaches it, how other machines do."""
    announce(logger, "autotune: job %s is being tuned, see %s", job_name, page)
    place = urlsplit(page)
    if is_loopback(place.hostname or "") and place.port is not None:
        # The same port on both sides: so the page has the same address there.
        tunnel = f"{place.port}:{place.netloc.rpartition('@')[2]}"
        announce(
            logger,
            "autotune: to see it from another machine, run there first: ssh -L %s %s",
            *(tunnel, socket.gethostname()),
        )


def announce_end(logger: logging.Logger, job_names: Sequence[str]) -> None:
    """Say how to see these jobs again once the service that showed them has ended."""
    for name in job_names:
        announce(
            logger,
            "autotune: the page ends with the training; to see the job again, on %s: "
            "bagua-autotune show %s, or bagua-autotune serve for its page",
            *(socket.gethostname(), shlex.quote(name)),
        )


class TrialLines:
    """A line after every tenth trial of a search."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._tenths = 0

    def tell(self, measured: int, most: int, speedup: float | None) -> None:
        """Tell how many trials are measured, and the best speed-up so far."""
        # The trials that confirm the winner come on top of the limit.
        if measured // 10 > self._tenths and measured <= most:
            self._tenths = measured // 10
            faster = f", best so far {speedup:.2f}x, not confirmed" if speedup is not None else ""
            announce(self._logger, "autotune: trial %d of at most %d%s", measured, most, faster)


def is_loopback(host: str) -> bool:
    """Whether only programs of the same host reach this name or address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
