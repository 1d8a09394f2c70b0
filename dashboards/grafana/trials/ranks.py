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
        "Per step, of the slowest rank: what remains of a step beyond its computing. No setting "
        "can save more than this.",
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
        "By how much the slowest rank computes longer than the median rank, as a share of the "
        "step: time that all others wait for it.",
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
        "The rank that was most often the last to finish computing in the latest steps.",
        "none",
        over_time(of_job("slowest_rank")),
    )


def _share() -> Any:
    panel = value(
        "Slowest in",
        "The share of the latest steps in which that rank was the slowest. Alike ranks take turns.",
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
        "How many steps took how long, of all steps that were reported: a job that is steady has "
        "one dark band, and stragglers show above it.",
        "s",
        [over_time(counts, "{{le}}").format(PromQueryFormat.HEATMAP)],
    )
