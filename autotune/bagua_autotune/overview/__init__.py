"""A job at a glance: what every view (list, page, terminal, metrics) shows of it. Reads only."""

from __future__ import annotations

from bagua_autotune.overview.curve import Curve
from bagua_autotune.overview.figures import Figures
from bagua_autotune.overview.layouts import JobLayouts
from bagua_autotune.overview.overviews import Overview, Overviews
from bagua_autotune.overview.summary import JobSum, Summaries, Summary

__all__ = [
    "Curve",
    "Figures",
    "JobLayouts",
    "JobSum",
    "Overview",
    "Overviews",
    "Summaries",
    "Summary",
]
