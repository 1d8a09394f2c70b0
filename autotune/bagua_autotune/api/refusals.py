"""Tells of requests whose token is refused, in few lines, however many there are."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from http import HTTPStatus

from flask import Flask, Response, request

logger = logging.getLogger(__name__)

# Between two lines.
QUIET_SECONDS = 60.0
# Of so many addresses the count is kept, and so many are named.
MOST_ADDRESSES = 1000
MOST_NAMED = 5
OTHERS = "further addresses"


class Refusals:
    """Logs the first at once, and then once in a while how many there were since, and from where.

    Args:
        quiet_seconds: between two lines.
    """

    def __init__(self, quiet_seconds: float = QUIET_SECONDS) -> None:
        self._quiet_seconds = quiet_seconds
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._is_quiet = False

    def count(self, address: str) -> None:
        """Count a refusal of a request from this address."""
        with self._lock:
            if address not in self._counts and len(self._counts) >= MOST_ADDRESSES:
                address = OTHERS
            self._counts[address] += 1
            if not self._is_quiet:
                self._tell()

    def _after_a_while(self) -> None:
        with self._lock:
            self._is_quiet = False
            if self._counts:
                self._tell()

    def _tell(self) -> None:
        named = self._counts.most_common(MOST_NAMED)
        rest = self._counts.total() - sum(count for _, count in named)
        told = [f"{count} from {address}" for address, count in named]
        told += [f"{rest} from others"] if rest else []
        logger.warning(
            "refused requests without a token that this service takes: %s", ", ".join(told)
        )
        self._counts.clear()
        self._is_quiet = True
        later = threading.Timer(self._quiet_seconds, self._after_a_while)
        later.daemon = True
        later.start()


def install(app: Flask) -> None:
    """Tell of the refusals of the app."""
    refusals = Refusals()

    @app.after_request
    def _count(response: Response) -> Response:
        if response.status_code == HTTPStatus.UNAUTHORIZED:
            refusals.count(request.remote_addr or "?")
        return response
