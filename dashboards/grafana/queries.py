"""PromQL that several panels share, and the queries of panels.

Of a service with several replicas each shows the gauges of all jobs, read from the one store, so
that every expression takes the largest over the replicas.
"""

from __future__ import annotations

from collections.abc import Callable

from grafana_foundation_sdk.builders import prometheus
from grafana_foundation_sdk.models.dashboard import DataSourceRef
from grafana_foundation_sdk.models.prometheus import PromQueryFormat, QueryEditorMode

SOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")
# Grafana escapes a variable for neither kind of PromQL's quoted strings; a raw string needs none.
JOB = "job_name=`${job:raw}`"
SERVICE = '{job="bagua-autotune"}'
STATES = {"tuning": 1, "confirming": 2, "finished": 3, "ended": 4, "lost": 5}
# How finely the past is looked at where trials are told apart: the interval of scraping.
PAST = "[$__range:5s]"


def of_job(name: str, *labels: str, where: str = "") -> str:
    """The metric ``bagua_autotune_<name>`` of the chosen job, by ``labels``."""
    selector = f"{JOB},{where}" if where else JOB
    return of_jobs(name, *labels, where=selector)


def of_jobs(name: str, *labels: str, where: str = "") -> str:
    """The metric ``bagua_autotune_<name>`` of all jobs, by job and ``labels``."""
    selector = f"{{{where}}}" if where else ""
    return f"max by ({', '.join(('job_name', *labels))}) (bagua_autotune_{name}{selector})"


def while_tuned(expression: str) -> str:
    """As long as the ranks report: what they said last is no news of a job that is tuned."""
    tuned = of_jobs("job_state", where='state=~"tuning|confirming"')
    return f"{expression} and on (job_name) {tuned} == 1"


def confirmed(of: Callable[..., str], name: str) -> str:
    """A speed-up or an end of its interval, of a job or of all, once it is confirmed: while
    searching, the best trial is partly luck."""
    finished = of("job_state", where='state="finished"')
    return f"{of(name)} and on (job_name) {finished} == 1"


def by_trial(expression: str) -> str:
    """The job's expression with a label more: the number of the trial that ran then.

    The number is a value in Prometheus, so that its series do not grow with the trials.
    """
    numbers = f'count_values by (job_name) ("trial", {of_job("current_trial")})'
    return f"{expression} * on (job_name) group_left (trial) {numbers}"


def by_round(expression: str) -> str:
    """The job's expression with a label more: the number of the round of tuning, 1 or more."""
    numbers = f'count_values by (job_name) ("round", {of_job("rounds_total")})'
    return f"{expression} * on (job_name) group_left (round) {numbers}"


def state_number(expression: str) -> str:
    """One number for the state, 1 to 5, of ``max by (job_name, state)``: a lane, or a cell."""
    alike = f"{expression} == 1"
    numbers = " or ".join(
        f'label_replace(vector({number}), "state", "{state}", "", "")'
        for state, number in STATES.items()
    )
    return f"sum by (job_name) (({alike}) * on (state) group_left () ({numbers}))"


def payback(metric: Callable[[str], str]) -> str:
    """Steps until the search is paid back, of a job or of all; -1 where nothing was gained."""
    return f"{metric('payback_steps')} or 0 * {metric('search_cost_seconds')} - 1"


def or_none(expression: str, label: str = "") -> str:
    """0 where there is nothing to count; with a ``label`` of the expression, as its ``none``."""
    zero = f'label_replace(vector(0), "{label}", "none", "", "")' if label else "vector(0)"
    return f"{expression} or on () {zero}"


def over_time(expression: str, legend: str = "__auto") -> prometheus.Dataquery:
    """Values over the time shown."""
    return _query(expression, legend).range()


def at_the_end(expression: str, legend: str = "__auto") -> prometheus.Dataquery:
    """Values at the end of the time shown."""
    return _query(expression, legend).instant()


def table(expression: str) -> prometheus.Dataquery:
    """Values at the end of the time shown, as one frame with a column for each label."""
    return at_the_end(expression).format(PromQueryFormat.TABLE)


def _query(expression: str, legend: str) -> prometheus.Dataquery:
    return (
        prometheus.Dataquery()
        .expr(expression)
        .legend_format(legend)
        .datasource(SOURCE)
        .editor_mode(QueryEditorMode.CODE)
    )
