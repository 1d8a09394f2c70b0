"""What was tried: step times and settings over time, against each other, and as a table."""

from __future__ import annotations

from typing import Any

from grafana_foundation_sdk.builders import common, xychart
from grafana_foundation_sdk.builders import dashboard as boards
from grafana_foundation_sdk.models.common import LineInterpolation, ScaleDistribution
from grafana_foundation_sdk.models.dashboard import FieldColorModeId
from grafana_foundation_sdk.models.xychart import SeriesMapping, XYShowMode

from dashboards.grafana.panels import (
    BASELINE,
    BEST,
    CALM,
    NOW,
    TIMES_UNIT,
    WARNING,
    described,
    fixed,
    lanes,
    lines,
    mapping,
    properties,
    rows,
    sized,
    transformed,
)
from dashboards.grafana.queries import PAST, by_round, by_trial, of_job, over_time, table

STEP_SECONDS = by_trial(of_job("current_step_seconds"))
BUCKET = 'knob="bucket_bytes"'
# Bucket sizes have a panel of their own.
OTHER_KNOBS = 'knob!~".*buckets?(_bytes)?"'


def panels() -> list[Any]:
    return [
        sized(_step_times(), 12, 9),
        sized(_bucket_sizes(), 12, 9),
        sized(_sizes_and_times(), 12, 9),
        sized(_best_so_far(), 12, 9),
        sized(_other_knobs(), 12, 9),
        sized(_speedups(), 12, 9),
        sized(_trials(), 24, 10),
    ]


def _step_times() -> Any:
    panel = lines(
        "Time of a step over time",
        "The latest steps, the best trial so far and the default, each of the slowest rank. "
        "After the tuning a job reports step times only if they change for good.",
        "s",
        over_time(of_job("current_step_seconds"), "now"),
        over_time(of_job("incumbent_step_seconds"), "best so far"),
        over_time(of_job("baseline_step_seconds"), "default"),
    ).min(0)
    panel.override_by_name("now", properties(color=fixed(NOW)))
    _reference(panel, "best so far", BEST)
    _reference(panel, "default", BASELINE)
    return panel


def _bucket_sizes() -> Any:
    panel = (
        lines(
            "Bucket size over time",
            "What the ranks run, and the best so far. The axis is logarithmic.",
            "bytes",
            over_time(of_job("knob_value", where=BUCKET), "now"),
            over_time(of_job("incumbent_knob_value", where=BUCKET), "best so far"),
        )
        .line_interpolation(LineInterpolation.STEP_AFTER)
        .scale_distribution(_logarithmic())
    )
    panel.override_by_name("now", properties(color=fixed(NOW)))
    _reference(panel, "best so far", BEST)
    return panel


def _sizes_and_times() -> Any:
    series = (
        xychart.XYSeriesConfig()
        .name(xychart.XychartXYSeriesConfigName().fixed("Trials"))
        .frame(
            xychart.XychartXYSeriesConfigFrame().matcher(
                xychart.MatcherConfig().id("byIndex").options(0)
            )
        )
        .x(_column(xychart.XychartXYSeriesConfigX(), "Bucket size"))
        .y(_column(xychart.XychartXYSeriesConfigY(), "Time of a step"))
        .color(_column(xychart.XychartXYSeriesConfigColor(), "Trial"))
    )
    panel = described(
        xychart.Panel()
        .mapping(SeriesMapping.MANUAL)
        .series([series])
        .show(XYShowMode.POINTS)
        .point_size(xychart.XychartFieldConfigPointSize().fixed(9))
        .fill_opacity(60)
        .legend(common.VizLegendOptions().show_legend(False).calcs([]))
        .color_scheme(boards.FieldColor().mode(FieldColorModeId.CONTINUOUS_BL_PU)),
        "Bucket size against time of a step",
        "A point for each trial in the time shown; later trials are darker. Trials of one bucket "
        "size can differ in other knobs, which the table below names.",
        "s",
        [table(_median(STEP_SECONDS)), table(_setting("bucket_bytes"))],
    )
    transformed(panel, "joinByField", byField="trial", mode="inner")
    transformed(panel, "convertFieldType", fields={}, conversions=[_number("trial")])
    transformed(
        panel,
        "organize",
        excludeByName=_without("Time", "job_name", copies=2),
        renameByName={"trial": "Trial", "Value #A": "Time of a step", "Value #B": "Bucket size"},
    )
    panel.override_by_name(
        "Bucket size",
        properties(
            unit="bytes",
            custom_scaleDistribution={"type": "log", "log": 2},
            custom_axisLabel="Bucket size",
        ),
    )
    panel.override_by_name("Time of a step", properties(custom_axisLabel="Time of a step"))
    panel.override_by_name("Trial", properties(unit="none"))
    return panel


def _best_so_far() -> Any:
    panel = lines(
        "Best so far",
        "Time of a step under the best trial so far, and under the default. While the best still "
        "falls, the search gets somewhere.",
        "s",
        over_time(of_job("incumbent_step_seconds"), "best so far"),
        over_time(of_job("baseline_step_seconds"), "default"),
    ).line_interpolation(LineInterpolation.STEP_AFTER)
    panel.override_by_name("best so far", properties(color=fixed(BEST), custom_lineWidth=2))
    _reference(panel, "default", BASELINE)
    return panel


def _other_knobs() -> Any:
    panel = lanes(
        "Other settings",
        "Which value was in use when.",
        "none",
        over_time(
            of_job("configuration_info", "knob", "state", where=OTHER_KNOBS), "{{knob}}: {{state}}"
        ),
    )
    return panel.mappings([mapping({"1": ("in use", NOW), "0": ("", "transparent")})])


def _speedups() -> Any:
    panel = lines(
        "Speed-up and its interval",
        "Speed-up over the default with its 95 % interval. Where the whole band is above 1, the "
        "job is really faster.",
        TIMES_UNIT,
        over_time(of_job("speedup_lower_ratio"), "at least"),
        over_time(of_job("speedup_ratio"), "speed-up"),
        over_time(of_job("speedup_upper_ratio"), "at most"),
    ).decimals(2)
    panel.override_by_name("speed-up", properties(color=fixed(BEST)))
    quiet = properties(color=fixed(BEST), custom_lineWidth=0, custom_showPoints="never")
    panel.override_by_name("at least", quiet)
    band = properties(custom_fillBelowTo="at least", custom_fillOpacity=15)
    panel.override_by_name("at most", quiet + band)
    return panel


def _trials() -> Any:
    panel = rows(
        "Trials",
        "Each trial that Prometheus saw in the time shown, with the median of its step times and "
        "its gain over the default of its round. A trial that is shorter than the scrape "
        "interval can be missing here; the service's own page and `bagua-autotune show` have "
        "all. A training of one process has no bucket size, channels or reduction.",
        "none",
        table(_median(STEP_SECONDS)),
        table(_setting("bucket_bytes")),
        table(_setting("channels")),
        table(_words("hierarchical")),
        table(_speedup_of_trials()),
        table(_setting("recomputed_blocks")),
    )
    transformed(panel, "joinByField", byField="trial", mode="outer")
    transformed(panel, "convertFieldType", fields={}, conversions=[_number("trial")])
    transformed(
        panel,
        "organize",
        excludeByName={
            **_without("Time", "job_name", copies=6),
            "Value #D": True,
            "round": True,
        },
        indexByName={
            name: place
            for place, name in enumerate(
                ("trial", "Value #B", "state", "Value #C", "Value #F", "Value #A")
            )
        },
        renameByName={
            "trial": "Trial",
            "state": "Reduction",
            "Value #A": "Time of a step",
            "Value #B": "Bucket size",
            "Value #C": "Channels",
            "Value #E": "Against the default",
            "Value #F": "Recomputed blocks",
        },
    )
    panel.override_by_name("Time of a step", properties(unit="s"))
    panel.override_by_name("Bucket size", properties(unit="bytes"))
    steps = [{"color": WARNING, "value": None}, {"color": CALM, "value": 0.99}]
    panel.override_by_name(
        "Against the default",
        properties(
            unit=TIMES_UNIT,
            decimals=2,
            custom_cellOptions={"type": "color-text"},
            thresholds={"mode": "absolute", "steps": [*steps, {"color": BEST, "value": 1.01}]},
        ),
    )
    panel.sort_by([common.TableSortByFieldState().display_name("Trial").desc(True)])
    return panel


def _median(expression: str) -> str:
    """Over the time shown, at which trials are told apart."""
    return f"quantile_over_time(0.5, ({expression}){PAST})"


def _speedup_of_trials() -> str:
    """The step time of the default, as its trial of the same round had it, over each trial's.

    A later round begins with what was kept, so that its default is not known from its start on.
    """
    defaults = f"last_over_time(({by_round(of_job('baseline_step_seconds'))}){PAST})"
    return f"{defaults} / on (job_name, round) group_right () {_median(by_round(STEP_SECONDS))}"


def _setting(knob: str) -> str:
    """The value of a numeric knob under each trial of the time shown."""
    found = of_job("knob_value", where=f'knob="{knob}"')
    return f"last_over_time(({by_trial(found)}){PAST})"


def _words(knob: str) -> str:
    """1 for the value, as ``state``, of a knob under each trial of the time shown."""
    found = of_job("configuration_info", "state", where=f'knob="{knob}"')
    return f"last_over_time(({by_trial(found)}){PAST})"


def _without(*names: str, copies: int) -> dict[str, bool]:
    """Columns that joined tables all have, numbered from the second on."""
    numbered = [f"{name} {copy}" for name in names for copy in range(1, copies + 1)]
    return dict.fromkeys([*names, *numbered], True)


def _number(field: str) -> dict[str, object]:
    """Labels are text, which sorts 10 before 2."""
    return {"targetField": field, "destinationType": "number"}


def _column(axis: Any, name: str) -> Any:
    return axis.matcher(xychart.MatcherConfig().id("byName").options(name))


def _logarithmic() -> common.ScaleDistributionConfig:
    return common.ScaleDistributionConfig().type(ScaleDistribution.LOG).log(2)


def _reference(panel: Any, name: str, colour: str) -> None:
    """A dashed line in the background."""
    dashes = {"fill": "dash", "dash": [8, 6]}
    panel.override_by_name(
        name, properties(color=fixed(colour), custom_lineStyle=dashes, custom_showPoints="never")
    )
