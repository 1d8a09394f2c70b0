"""Panels as all dashboards draw them: each has a title, a description, a unit, and its queries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeVar

from grafana_foundation_sdk.builders import common, prometheus, stat, statetimeline, timeseries
from grafana_foundation_sdk.builders import dashboard as boards
from grafana_foundation_sdk.builders import table as tables
from grafana_foundation_sdk.models import common as options
from grafana_foundation_sdk.models.dashboard import (
    DataTransformerConfig,
    DynamicConfigValue,
    FieldColorModeId,
    Threshold,
    ThresholdsMode,
    ValueMap,
    ValueMapping,
    ValueMappingResult,
)

from dashboards.grafana.queries import SOURCE, STATES

# What belongs together has one colour on all panels.
NOW, BEST, BASELINE, WARNING, BAD, CALM = "blue", "green", "#8e8e8e", "orange", "red", "text"
STATE_COLOURS = {
    "tuning": "blue",
    "confirming": "purple",
    "finished": "green",
    "ended": "#8e8e8e",
    "lost": "red",
}
TIMES_UNIT = "suffix:×"  # noqa: RUF001
STEPS_UNIT = "suffix: steps"
HOURS_UNIT = "suffix: h"
# As a mapping, of a payback that is none.
NO_GAIN = {"-1": ("nothing gained", BASELINE)}
Queries = Sequence[prometheus.Dataquery]


class _Panel(Protocol):
    def title(self, title: str) -> Any: ...
    def description(self, description: str) -> Any: ...
    def unit(self, unit: str) -> Any: ...
    def datasource(self, datasource: Any) -> Any: ...
    def with_target(self, target: Any) -> Any: ...
    def span(self, w: int) -> Any: ...
    def height(self, h: int) -> Any: ...
    def override_by_name(self, name: str, properties: list[DynamicConfigValue]) -> Any: ...


P = TypeVar("P", bound=_Panel)


def described(panel: P, title: str, description: str, unit: str, queries: Queries) -> P:
    """What every panel has; queries are called A, B, C and so on."""
    panel.title(title)
    panel.description(description)
    panel.unit(unit)
    panel.datasource(SOURCE)
    for number, query in enumerate(queries):
        panel.with_target(query.ref_id(chr(ord("A") + number)))
    return panel


def sized(panel: P, width: int, height: int) -> P:
    """``width`` of 24 columns, ``height`` in rows of 30 pixels."""
    panel.span(width)
    panel.height(height)
    return panel


def value(
    title: str, description: str, unit: str, *queries: prometheus.Dataquery, named: bool = False
) -> stat.Panel:
    """Large numbers: the last that each query gives; ``named`` where there are several."""
    mode = options.BigValueTextMode.VALUE_AND_NAME if named else options.BigValueTextMode.VALUE
    panel = (
        stat.Panel()
        .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
        .text_mode(mode)
        .color_mode(options.BigValueColorMode.VALUE)
        .graph_mode(options.BigValueGraphMode.NONE)
        .justify_mode(options.BigValueJustifyMode.AUTO)
        .wide_layout(False)
        .no_value("not known yet")
    )
    plain(panel)
    return described(panel, title, description, unit, queries)


def lines(
    title: str, description: str, unit: str, *queries: prometheus.Dataquery
) -> timeseries.Panel:
    """Values over time."""
    panel = (
        timeseries.Panel()
        .draw_style(options.GraphDrawStyle.LINE)
        .line_width(2)
        .fill_opacity(0)
        .show_points(options.VisibilityMode.AUTO)
        .point_size(5)
        .span_nulls(30_000)  # a missed scrape is no gap
        .axis_border_show(False)
        .legend(
            common.VizLegendOptions()
            .show_legend(True)
            .display_mode(options.LegendDisplayMode.LIST)
            .placement(options.LegendPlacement.BOTTOM)
            .calcs([])
        )
        .tooltip(
            common.VizTooltipOptions()
            .mode(options.TooltipDisplayMode.MULTI)
            .sort(options.SortOrder.NONE)
        )
        .color_scheme(boards.FieldColor().mode(FieldColorModeId.PALETTE_CLASSIC))
    )
    return described(panel, title, description, unit, queries)


def lanes(
    title: str, description: str, unit: str, *queries: prometheus.Dataquery
) -> statetimeline.Panel:
    """States over time, a lane for each series."""
    panel = (
        statetimeline.Panel()
        .show_value(options.VisibilityMode.AUTO)
        .merge_values(True)
        .row_height(0.8)
        .fill_opacity(75)
        .line_width(0)
        .legend(
            common.VizLegendOptions()
            .show_legend(False)
            .display_mode(options.LegendDisplayMode.LIST)
            .placement(options.LegendPlacement.BOTTOM)
            .calcs([])
        )
        .color_scheme(boards.FieldColor().mode(FieldColorModeId.THRESHOLDS))
    )
    return described(panel, title, description, unit, queries)


def rows(title: str, description: str, unit: str, *queries: prometheus.Dataquery) -> tables.Panel:
    """A table."""
    panel = (
        tables.Panel()
        .show_header(True)
        .cell_height(options.TableCellHeight.SM)
        .filterable(False)
        .min_width(60)
        .no_value("-")
    )
    plain(panel)
    return described(panel, title, description, unit, queries)


def plain(panel: Any) -> None:
    """One quiet colour, as long as nothing is said of what is good and what bad."""
    limits(panel, {})


def limits(panel: Any, steps: Mapping[float, str], first: str = CALM) -> None:
    """Colours from certain values on."""
    found = [Threshold(color=first, value=None)]
    found += [Threshold(color=colour, value=value) for value, colour in steps.items()]
    panel.thresholds(
        boards.ThresholdsConfig().mode(ThresholdsMode.ABSOLUTE).steps(found)
    ).color_scheme(boards.FieldColor().mode(FieldColorModeId.THRESHOLDS))


def mapping(texts: Mapping[str, tuple[str, str]]) -> ValueMapping:
    """Values with a text and a colour of their own."""
    return ValueMap(
        options={
            value: ValueMappingResult(text=text, color=colour, index=index)
            for index, (value, (text, colour)) in enumerate(texts.items())
        }
    )


def state_mapping() -> ValueMapping:
    """Numbers of states as words."""
    return mapping({str(number): (state, STATE_COLOURS[state]) for state, number in STATES.items()})


def properties(**values: object) -> list[DynamicConfigValue]:
    """Of an override; ``custom_`` in a name is ``custom.``."""
    return [
        DynamicConfigValue(id_val=name.replace("custom_", "custom.", 1), value=value)
        for name, value in values.items()
    ]


def fixed(colour: str) -> dict[str, str]:
    """The override ``color`` of a series that always has one colour."""
    return {"mode": "fixed", "fixedColor": colour}


def transformed(panel: Any, name: str, **settings: object) -> None:
    """One more transformation of what the queries gave."""
    panel.with_transformation(DataTransformerConfig(id_val=name, options=settings))
