"""How alike the ranks are, what communication costs, and how step times are spread."""

from __future__ import annotations

from typing import Any

from grafana_foundation_sdk.builders import common, heatmap
from grafana_foundation_sdk.models.common import ScaleDistribution, TooltipDisplayMode
from grafana_foundation_sdk.models.heatmap import HeatmapColorMode
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

from dashboards.grafana.panels import (
    BASELINE,
    NOW,
    WARNING,
    described,
    fixed,
    limits,
    lines,
    properties,
    sized,
    value,
)
from dashboards.grafana.queries import JOB, of_job, over_time


def panels() -> list[Any]:
    return [
        sized(_exposed(), 12, 8),
        sized(_step_times(), 12, 8),
        sized(_spread(), 12, 6),
        sized(_slowest(), 4, 6),
        sized(_share(), 4, 6),
        sized(_ranks(), 4, 6),
    ]


def _exposed() -> Any:
    panel = lines(
        "Communication that computing does not hide",
        "What remains of a step after the computing of its slowest rank. No setting can save "
        "more than this.",
        "s",
        over_time(of_job("exposed_communication_seconds"), "exposed communication"),
        over_time(of_job("current_step_seconds"), "whole step"),
    ).min(0)
    panel.override_by_name(
        "exposed communication", properties(color=fixed(WARNING), custom_fillOpacity=15)
    )
    panel.override_by_name("whole step", properties(color=fixed(BASELINE)))
    return panel


def _spread() -> Any:
    panel = lines(
        "Spread between the ranks",
        "How much longer the slowest rank computes than the median rank, as a share of the step. "
        "All others wait for it.",
        "percentunit",
        over_time(of_job("rank_spread_ratio"), "spread"),
    ).min(0)
    panel.override_by_name("spread", properties(color=fixed(NOW), custom_fillOpacity=10))
    return panel


def _ranks() -> Any:
    return value("Ranks", "Processes of the training.", "none", over_time(of_job("job_ranks")))


def _slowest() -> Any:
    return value(
        "Slowest rank",
        "The rank that was most often the slowest in the latest steps.",
        "none",
        over_time(of_job("slowest_rank")),
    )


def _share() -> Any:
    panel = value(
        "How often slowest",
        "The share of the latest steps in which that rank was the slowest. Equal ranks take turns.",
        "percentunit",
        over_time(of_job("slowest_rank_share_ratio")),
    ).decimals(0)
    limits(panel, {0.9: WARNING})
    return panel


def _step_times() -> Any:
    counts = (
        f"sum by (le) (increase(bagua_autotune_step_seconds_bucket{{{JOB}}}[$__rate_interval]))"
    )
    panel = (
        heatmap.Panel()
        .calculate(False)
        .color(
            heatmap.HeatmapColorOptions()
            .mode(HeatmapColorMode.SCHEME)
            .scheme("Blues")
            .steps(32)
            .fill("blue")
        )
        .y_axis(heatmap.YAxisConfig().unit("s"))
        .cell_values(heatmap.CellValues().unit("suffix: steps").decimals(0))
        .cell_gap(1)
        .hide_legend()
        .mode(TooltipDisplayMode.SINGLE)
        .scale_distribution(common.ScaleDistributionConfig().type(ScaleDistribution.LINEAR))
    )
    return described(
        panel,
        "Step times",
        "How many of the reported steps took how long. A steady job has one dark band; slow "
        "steps show above it.",
        "s",
        [over_time(counts, "{{le}}").format(PromQueryFormat.HEATMAP)],
    )
