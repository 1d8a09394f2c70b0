"""Bagua itself, release 0.9.2 from PyPI: its optimiser and its service run as they are."""

from __future__ import annotations

RELEASED_REPORT_EVERY = 100
"""Steps between two reports of a worker of Bagua's."""
REPORT_EVERY = 10
"""The same here, so that a tuning is over in minutes."""
