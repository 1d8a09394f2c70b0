"""All jobs: how many are in which state, what each gained, and which are in trouble."""

from __future__ import annotations

from typing import Any

from grafana_foundation_sdk.builders import bargauge, common
from grafana_foundation_sdk.models.common import (
    BarGaugeDisplayMode,
    BarGaugeValueMode,
    StackingMode,
    VizOrientation,
)

from dashboards.grafana.panels import (
    BAD,
    BASELINE,
    BEST,
    HOURS_UNIT,
    NO_GAIN,
    NOW,
    STATE_COLOURS,
    STEPS_UNIT,
    TIMES_UNIT,
    WARNING,
    described,
    fixed,
    lanes,
    limits,
    lines,
    mapping,
    properties,
    rows,
    sized,
    state_mapping,
    transformed,
    value,
)
from dashboards.grafana.queries import (
    STATES,
    at_the_end,
    confirmed,
    of_jobs,
    or_none,
    over_time,
    payback,
    state_number,
    table,
    while_tuned,
)
from dashboards.grafana.trials.outcome import REASONS
from dashboards.grafana.trials.trouble import ALERTS

TRIALS = (
    "/d/bagua-autotune-trials?var-job=${__value.raw:percentencode}"
    "&var-datasource=${datasource}&${__url_time_range}"
)
# The table's columns after job and state: title, metric, unit.
COLUMNS = (
    ("Speed-up", "speedup_ratio", TIMES_UNIT),
    ("At least", "speedup_lower_ratio", TIMES_UNIT),
    ("At most", "speedup_upper_ratio", TIMES_UNIT),
    ("Default", "baseline_step_seconds", "s"),
    ("Best", "incumbent_step_seconds", "s"),
    ("Cost", "search_cost_seconds", "s"),
    ("Ranks", "job_ranks", "none"),
)


def overview() -> list[Any]:
    counts = value(
        "Jobs by state",
        "A job disappears 15 minutes after its end. A finished one that says nothing disappears "
        "after a day.",
        "none",
        *(over_time(_in_state(state), state) for state in STATES),
        named=True,
    ).orientation(VizOrientation.VERTICAL)
    history = (
        lines(
            "Jobs over time",
            "How many jobs were in which state.",
            "none",
            *(over_time(_in_state(state), state) for state in STATES),
        )
        .fill_opacity(40)
        .line_width(1)
        .decimals(0)
        .stacking(common.StackingConfig().mode(StackingMode.NORMAL).group("A"))
    )
    for state in STATES:
        for panel in (counts, history):
            panel.override_by_name(state, properties(color=fixed(STATE_COLOURS[state])))
    return [
        sized(counts, 8, 7),
        sized(_saved(), 4, 7),
        sized(history, 12, 7),
        sized(_jobs(), 24, 11),
    ]


def _saved() -> Any:
    panel = value(
        "Rank-hours saved",
        "In the time shown, over all jobs: what confirmed speed-ups saved, less what the searches "
        "cost. One hour of 8 ranks is 8 rank-hours, which are GPU-hours where each rank has a GPU. "
        "Negative: the searches have cost more than was saved so far.",
        HOURS_UNIT,
        at_the_end(
            "(sum(increase(bagua_autotune_saved_rank_seconds_total[$__range])) "
            "- sum(increase(bagua_autotune_search_cost_rank_seconds_total[$__range]))) / 3600",
            "saved",
        ),
    ).decimals(1)
    limits(panel, {0: BEST}, first=WARNING)
    return panel


def _in_state(state: str) -> str:
    selector = f'state="{state}"'
    return f"sum({of_jobs('job_state', where=selector)})"


def _jobs() -> Any:
    queries = [
        state_number(of_jobs("job_state", "state")),
        *(
            confirmed(of_jobs, metric) if unit == TIMES_UNIT else of_jobs(metric)
            for _, metric, unit in COLUMNS
        ),
        payback(of_jobs),
        f"{of_jobs('job_saved_rank_seconds')} / 3600",
        f"sum by (job_name) ({of_jobs('trials', 'state')})",
        f"{of_jobs('job_last_contact_timestamp_seconds')} * 1000",
    ]
    titles = ["State", *(title for title, _, _ in COLUMNS), "Paid back after"]
    titles += ["Rank-hours saved", "Trials", "Last report"]
    panel = rows(
        "Jobs",
        "A click on a job opens its own dashboard. Step times are those of the slowest rank; the "
        "speed-up is that over the default, with its 95 % interval, once it is confirmed.",
        "none",
        *(table(query) for query in queries),
    )
    fields = [f"Value #{chr(ord('A') + number)}" for number in range(len(queries))]
    transformed(panel, "joinByField", byField="job_name", mode="outer")
    transformed(
        panel,
        "organize",
        excludeByName={
            "Time": True,
            **{f"Time {number}": True for number in range(1, len(queries) + 1)},
        },
        indexByName={name: number for number, name in enumerate(["job_name", *fields])},
        renameByName={"job_name": "Job", **dict(zip(fields, titles, strict=True))},
    )
    for title, _, unit in COLUMNS:
        decimals = {"decimals": 2} if unit == TIMES_UNIT else {}
        panel.override_by_name(title, properties(unit=unit, **decimals))
    link = {"title": "Tuning trials of ${__value.raw}", "url": TRIALS}
    panel.override_by_name("Job", properties(links=[link], custom_width=220))
    text = {"type": "color-text"}
    panel.override_by_name("State", properties(mappings=[state_mapping()], custom_cellOptions=text))
    panel.override_by_name(
        "Paid back after",
        properties(unit=STEPS_UNIT, mappings=[mapping(NO_GAIN)], custom_width=130),
    )
    panel.override_by_name(
        "Rank-hours saved", properties(unit=HOURS_UNIT, decimals=1, custom_width=130)
    )
    for title in ("Ranks", "Trials"):
        panel.override_by_name(title, properties(custom_width=70))
    panel.override_by_name("Last report", properties(unit="dateTimeFromNow", custom_width=150))
    panel.sort_by([common.TableSortByFieldState().display_name("Speed-up").desc(True)])
    return panel


def gains() -> list[Any]:
    ratio = confirmed(of_jobs, "speedup_ratio")
    gained = lines(
        "Speed-up",
        "Median, best and worst of the confirmed speed-ups of all jobs.",
        TIMES_UNIT,
        over_time(f"max({ratio})", "best"),
        over_time(f"quantile(0.5, {ratio})", "middle"),
        over_time(f"min({ratio})", "worst"),
    ).decimals(2)
    for name, colour in (("best", BEST), ("middle", NOW), ("worst", BASELINE)):
        gained.override_by_name(name, properties(color=fixed(colour)))
    results = value(
        "Results",
        "How finished tunings ended. Nothing faster: no setting was really faster than the "
        "default.",
        "none",
        at_the_end(
            or_none(f"sum by (reason) ({of_jobs('job_result', 'reason')})", "reason"), "{{reason}}"
        ),
        named=True,
    )
    for reason, text in REASONS.items():
        results.override_by_name(reason, properties(displayName=text))
    most = _ranking("Gained most", "The five jobs with the largest confirmed speed-up.", "topk")
    least = _ranking(
        "Gained least",
        "The five jobs with the smallest confirmed speed-up. Their default is good, or the network "
        "does not hold them up.",
        "bottomk",
    )
    return [
        sized(most, 8, 8),
        sized(least, 8, 8),
        sized(results, 8, 8),
        sized(gained, 12, 8),
        sized(_spread(), 12, 8),
    ]


def _spread() -> Any:
    return lines(
        "Spread between the ranks",
        "For each job being tuned: how much longer its slowest rank computes than the median "
        "rank, as a share of the step.",
        "percentunit",
        over_time(while_tuned(of_jobs("rank_spread_ratio")), "{{job_name}}"),
    ).min(0)


def _ranking(title: str, description: str, choice: str) -> Any:
    panel = (
        bargauge.Panel()
        .orientation(VizOrientation.HORIZONTAL)
        .display_mode(BarGaugeDisplayMode.BASIC)
        .value_mode(BarGaugeValueMode.TEXT)
        .show_unfilled(True)
        .min_viz_height(16)
        .max_viz_height(40)
        .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
        .min(0)
        .decimals(2)
    )
    limits(panel, {1.01: BEST}, first=BASELINE)
    query = at_the_end(f"{choice}(5, {confirmed(of_jobs, 'speedup_ratio')})", "{{job_name}}")
    return described(panel, title, description, TIMES_UNIT, [query])


def trouble() -> list[Any]:
    silent = lines(
        "Silence of jobs being tuned",
        "Time since the last report of each job being tuned. Five minutes raise an alert.",
        "s",
        over_time(
            while_tuned(f"time() - {of_jobs('job_last_contact_timestamp_seconds')}"),
            "{{job_name}}",
        ),
    ).min(0)
    failures = lines(
        "Failed trials",
        "Per minute, by reason.",
        "none",
        over_time(
            "sum by (reason) (max by (job_name, reason) "
            "(rate(bagua_autotune_trial_failures_total[$__rate_interval]))) * 60",
            "{{reason}}",
        ),
    )
    failures.min(0).axis_soft_max(1)
    alerts = lanes(
        "Jobs with an alert",
        "How many alerts fire, by rule. Prometheus must have loaded the rules of "
        "dashboards/prometheus.",
        "none",
        *(
            over_time(or_none(f'count(ALERTS{{alertname="{name}",alertstate="firing"}})'), name)
            for name in ALERTS
        ),
    ).mappings([mapping({"0": ("quiet", "rgba(115, 191, 105, 0.35)")})])
    limits(alerts, {1: BAD}, first=BEST)
    return [sized(panel, 8, 8) for panel in (alerts, silent, failures)]
