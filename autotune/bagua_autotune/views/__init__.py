"""A job at a glance: what every view (list, page, terminal, metrics) shows of it. Reads only."""

from __future__ import annotations

from bagua_autotune.views.curve import Curve
from bagua_autotune.views.figures import Figures
from bagua_autotune.views.layouts import JobLayouts
from bagua_autotune.views.overviews import Overview, Overviews
from bagua_autotune.views.summary import JobSum, Summaries, Summary

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
