"""Whether the job is tuned, what it gained, how sure that is, and what it cost."""

from __future__ import annotations

from typing import Any

from grafana_foundation_sdk.models.common import BigValueTextMode, VizOrientation

from dashboards.grafana.panels import (
    BASELINE,
    BEST,
    NO_GAIN,
    NOW,
    STEPS_UNIT,
    TIMES_UNIT,
    fixed,
    lanes,
    limits,
    mapping,
    properties,
    rows,
    sized,
    state_mapping,
    transformed,
    value,
)
from dashboards.grafana.queries import (
    at_the_end,
    confirmed,
    of_job,
    over_time,
    payback,
    state_number,
    table,
)

REASONS = {
    "winner": "a faster one was found",
    "nothing_faster": "nothing is faster",
    "only_default": "only the default was measured",
    "earlier_best": "an earlier best",
    "nothing_to_try": "nothing to try",
    "too_few_steps": "too few steps",
    "disagreement": "ranks disagreed",
    "diverged": "the training suffered",
    "infeasible": "not enough memory",
    "other": "another reason",
}


def state() -> list[Any]:
    number = state_number(of_job("job_state", "state"))
    now = value(
        "State",
        "Tuning: trials run. Confirming: the winner and the default are measured again. "
        "Finished: the job keeps its result, and its step times are watched. Ended: the "
        "training is over. Lost: the job stopped reporting.",
        "none",
        over_time(number, "state"),
    ).mappings([state_mapping()])
    history = lanes(
        "State over time",
        "A job whose step time changes for good is tuned again, so it goes back to tuning.",
        "none",
        over_time(number, "state"),
    ).mappings([state_mapping()])
    running = rows(
        "What runs now",
        "The configuration that the ranks run now: that of a trial, or the result.",
        "none",
        table(f"{of_job('configuration_info', 'knob', 'state')} == 1"),
    )
    transformed(
        running,
        "organize",
        excludeByName={"Time": True, "Value": True, "job_name": True},
        indexByName={"knob": 0, "state": 1},
        renameByName={"knob": "Knob", "state": "Value now"},
    )
    return [sized(now, 4, 6), sized(history, 12, 6), sized(running, 8, 6)]


def gain() -> list[Any]:
    """What is of one round is shown as it is at the end of the time shown: not the last known
    value, which a job that is tuned again has from the round before."""
    cost = value(
        "Cost of the search",
        "Time that the trials of this round took longer than the default would have.",
        "s",
        at_the_end(of_job("search_cost_seconds"), "cost"),
    ).decimals(1)
    paid_back = (
        value(
            "Paid back after",
            "After so many steps with the result, it has saved as much time as the search cost.",
            STEPS_UNIT,
            at_the_end(payback(of_job), "payback"),
        )
        .decimals(0)
        .mappings([mapping(NO_GAIN)])
    )
    searching = value(
        "Time of the search",
        "Wall time from the first trial of a round to the end of its last, over all rounds.",
        "dtdurations",
        over_time(of_job("search_seconds_total"), "time"),
    )
    steps = value(
        "Steps of the search",
        "Steps of the training from the first trial of a round to the end of its last, over all "
        "rounds. The model is trained in them as in any other step.",
        STEPS_UNIT,
        over_time(of_job("search_steps_total"), "steps"),
    )
    return [
        sized(_speedup(), 4, 5),
        sized(_bounds(), 6, 5),
        sized(_step_times(), 9, 5),
        sized(_why(), 5, 5),
        *(sized(panel, 6, 4) for panel in (cost, paid_back, steps, searching)),
    ]


def _speedup() -> Any:
    panel = value(
        "Speed-up",
        "Step time of the default divided by that of the result, once that is confirmed. 1 is as "
        "fast as the default.",
        TIMES_UNIT,
        at_the_end(confirmed(of_job, "speedup_ratio"), "speed-up"),
    ).decimals(2)
    panel.no_value("not confirmed yet")
    limits(panel, {1.01: BEST})
    return panel


def _bounds() -> Any:
    return (
        value(
            "95 % interval",
            "Interval of the confirmed speed-up. If its lower end is above 1, the job is really "
            "faster.",
            TIMES_UNIT,
            at_the_end(confirmed(of_job, "speedup_lower_ratio"), "at least"),
            at_the_end(confirmed(of_job, "speedup_upper_ratio"), "at most"),
            named=True,
        )
        .no_value("not confirmed yet")
        .decimals(2)
        .orientation(VizOrientation.VERTICAL)
    )


def _step_times() -> Any:
    panel = value(
        "Time of a step",
        "Under the best configuration, under the default, and of the latest steps. Each step "
        "counts with its slowest rank, for which all others wait.",
        "s",
        at_the_end(of_job("incumbent_step_seconds"), "best"),
        at_the_end(of_job("baseline_step_seconds"), "default"),
        over_time(of_job("current_step_seconds"), "now"),
        named=True,
    ).orientation(VizOrientation.VERTICAL)
    for name, colour in (("now", NOW), ("best", BEST), ("default", BASELINE)):
        panel.override_by_name(name, properties(color=fixed(colour)))
    return panel


def _why() -> Any:
    panel = value(
        "Why the tuning ended",
        "How the latest tuning ended. Empty while the job is being tuned.",
        "none",
        at_the_end(f"{of_job('job_result', 'reason')} == 1", "{{reason}}"),
    )
    panel.text_mode(BigValueTextMode.NAME).no_value("still searching")
    for reason, text in REASONS.items():
        panel.override_by_name(reason, properties(displayName=text))
    return panel
