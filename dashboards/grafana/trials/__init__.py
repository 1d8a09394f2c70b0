"""The dashboard "Tuning trials": one job, in the order in which its owner asks."""

from __future__ import annotations

from grafana_foundation_sdk.builders.dashboard import Dashboard, QueryVariable
from grafana_foundation_sdk.models.dashboard import VariableRefresh, VariableSort

from dashboards.grafana import layout
from dashboards.grafana.layout import Section
from dashboards.grafana.queries import SOURCE
from dashboards.grafana.trials import marks, outcome, ranks, search, trouble

UID = "bagua-autotune-trials"
JOBS = "label_values(bagua_autotune_job_state, job_name)"
# Names that PromQL's raw strings can hold: the panels' queries put them into one.
QUOTABLE = "/^[^`]*$/"


def dashboard() -> Dashboard:
    board = layout.dashboard(
        UID,
        "Tuning trials",
        "One job: whether it is being tuned, how much faster it became, and what was tried.",
        shown="now-1h",
    ).with_variable(
        QueryVariable("job")
        .label("Job")
        .description("The training's name, as BAGUA_AUTOTUNE_JOB says it.")
        .datasource(SOURCE)
        .query({"qryType": 1, "query": JOBS, "refId": "jobs"})
        .regex(QUOTABLE)
        .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(VariableSort.ALPHABETICAL_ASC)
    )
    for annotation in (marks.configuration_changes(), marks.ends_of_tuning()):
        board.annotation(annotation)
    return layout.add(
        board,
        [
            Section("Is it tuning, or done?", outcome.state()),
            Section("How much faster, how sure is that, and what did it cost?", outcome.gain()),
            Section("What was tried?", search.panels()),
            Section("Are the ranks alike, and what does communication cost?", ranks.panels()),
            Section("Is anything wrong?", trouble.panels()),
        ],
    )
