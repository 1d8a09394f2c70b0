"""``bagua-autotune jobs`` and ``show``: list the jobs; one job's trials and its result."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime

import click

from bagua_autotune.cli.output import print_json, print_table, say, say_beside, speedup_words, times
from bagua_autotune.cli.overview_panel import silence
from bagua_autotune.cli.reader import NoJobsYet, find_job, no_jobs, open_reader, source_options
from bagua_autotune.model.job import OVER, RUNS, Result
from bagua_autotune.model.text import describe_count, describe_memory, describe_seconds
from bagua_autotune.views.lists import ShownTrial
from bagua_autotune.views.overviews import MOST_JOBS_LISTED, JobList, JobOverview
from bagua_autotune.views.stock import stock_ddp_line, without_us
from bagua_autotune.views.summary import JobSummary, Life, name_life
from bagua_wire.words import describe

JOB_COLUMNS = ("job", "name", "state", "trials", "speed-up", "runs now", "lives")


@click.command()
@click.option(
    "--limit", type=click.IntRange(1, MOST_JOBS_LISTED - 1), default=100, show_default=True,
    help="List at most so many jobs.",
)  # fmt: skip
@click.option("--json", "is_json", is_flag=True, help="Write what GET /api/v2/jobs answers.")
@source_options
def jobs(limit: int, is_json: bool, database: str | None, url: str | None) -> None:
    """List the jobs, newest first. A training that was started again is listed once."""
    try:
        found = open_reader(database, url).jobs(limit=limit + 1)
    except NoJobsYet:
        found = []
    has_more = len(found) > limit
    found = found[:limit]
    if is_json:
        print_json(JobList(jobs=found, next=found[-1].id if has_more else None))
    else:
        print_table(JOB_COLUMNS, [_job_row(job) for job in found])
    if not found:
        say_beside(no_jobs(database, url))
    elif has_more:
        say_beside(f"there are more than these {limit}; see --limit")


def _job_row(job: JobSummary) -> tuple[str, ...]:
    # Without a result the speed-up is that of the best trial, and what runs now may be another.
    doubt = ", not confirmed" if job.figures.speedup is not None and job.reason is None else ""
    return (
        job.id,
        job.name,
        f"{job.state}, silent" if silence(job) else job.state,
        str(job.progress.trials_measured),
        times(job.figures.speedup) + doubt,
        describe(job.configuration),
        str(job.life),
    )


COLUMNS = (
    "trial", "purpose", "state", "ms per step", "95 %", "steps", "outliers", "speed-up",
    "configuration", "note",
)  # fmt: skip
LIFE_COLUMNS = ("life", "job", "ranks", "began", "end", "trials", "found")


@click.command()
@click.argument("job")
@click.option(
    "--json", "is_json", is_flag=True, help="Write what GET /api/v2/jobs/ID/overview answers."
)
@source_options
def show(job: str, is_json: bool, database: str | None, url: str | None) -> None:
    """Show JOB: its trials, the best one, its speed-up, and a line for stock DDP.

    JOB is a job's id, or a name: then the newest job of that name.
    """
    overview = find_job(open_reader(database, url), job)
    if is_json:
        print_json(overview)
    else:
        _show(overview)


def _show(overview: JobOverview) -> None:
    found = overview.job
    best = next((trial for trial in overview.trials if trial.is_best), None)
    say(f"job {found.name} ({found.id}): {found.state}{_name_round(found)}")
    if overview.lives:
        say(f"{name_life(overview.lives, found.id)}:")
        print_table(LIFE_COLUMNS, [_life_row(life) for life in overview.lives])
    _print_trials(overview.trials)
    for line in _fact_lines(found):
        say(line)
    if overview.limits.max_seconds is not None:
        say(f"limit of time: {describe_seconds(overview.limits.max_seconds)} for a tuning")
    if found.result:
        _say_result(found.result, is_of_runs=found.protocol in RUNS)
    chosen = found.configuration
    if best and not (found.result and found.state in OVER):
        chosen = best.configuration
        say(f"best so far: {describe(chosen)}: {speedup_words(found.figures)}")
    of_trials = [e.message for e in overview.events if e.kind == "note" and e.trial is not None]
    for note in filter(None, (*of_trials, overview.machine_change, silence(found))):
        say(f"note: {note}")
    if overview.stock_ddp:
        say(f"{without_us(overview.stock)}: {stock_ddp_line(overview.stock)}")
    if best and found.protocol == "v2":
        export = f"bagua-autotune export {found.id} --configuration > tuned.json"
        say(f"without a service: {export}, then train with BAGUA_CONFIGURATION=tuned.json")


def _fact_lines(job: JobSummary) -> Iterator[str]:
    """What is to be known of a job at a glance, the same that the page has on top; lines such as
    ``step time: 228 ms by default, 186 ms with the best, 186 ms now``."""
    figures, progress = job.figures, job.progress
    yield f"in short: {job.headline}"
    yield f"runs: {describe(job.configuration)}"
    yield f"speed-up: {speedup_words(figures)}"
    if job.protocol in ("v2", "runs"):  # Bagua's own workers tell no seconds, nor do scores
        default, best, now = (
            _seconds(seconds)
            for seconds in (
                figures.baseline_seconds,
                figures.incumbent_seconds,
                figures.current_seconds,
            )
        )
        yield f"step time: {default} by default, {best} with the best, {now} now"
    if figures.device_bytes is not None:
        default, best = (
            "-" if peak is None else describe_memory(peak, figures.device_bytes)
            for peak in (figures.default_peak_bytes, figures.peak_bytes)
        )
        yield f"memory: {default} by default, {best} with the best"
    most = f"at most {progress.max_trials}"
    if job.protocol not in RUNS:
        most += " in a search, besides those that confirm"
    yield f"trials: {progress.trials_measured} measured; {most}"
    lost = "" if figures.cost_steps is None else f"; {figures.cost_steps:.1f} lost by slower trials"
    if figures.default_exposed_seconds is not None:
        exposed = describe_seconds(figures.default_exposed_seconds)
        yield f"exposed by default: {exposed} of communication that computing does not hide"
    if job.protocol in RUNS:
        yield f"time: {describe_seconds(figures.search_seconds)}"
    else:
        yield f"steps: {figures.search_steps} under trials{lost}"
    heard = datetime.fromtimestamp(job.last_contact_at).strftime("%Y-%m-%d %H:%M:%S")
    yield f"last heard of: {heard}"


def _seconds(seconds: float | None) -> str:
    return "-" if seconds is None else describe_seconds(seconds)


def _name_round(job: JobSummary) -> str:
    return f", round {job.round}" if job.round else ""


def _print_trials(trials: list[ShownTrial]) -> None:
    rows = [_row(trial) for trial in trials]
    if not any(trial.round for trial in trials):
        print_table(COLUMNS, rows)
        return
    numbered = [(str(trial.round), *row) for trial, row in zip(trials, rows, strict=True)]
    print_table(("round", *COLUMNS), numbered)


def _say_result(result: Result, is_of_runs: bool) -> None:
    say(f"result: {result.summary}")
    if is_of_runs:  # its summary says the price
        return
    if result.cost_seconds:
        cost = f"{result.cost_steps:.3g} steps of the default ({result.cost_seconds:.3g} s)"
        say(f"cost: slower trials and switches lost the time of {cost}")
    if result.payback_steps is not None:
        say(f"paid back: after {describe_count(result.payback_steps, 'step')} of the result")


def _row(trial: ShownTrial) -> tuple[str, ...]:
    interval = f"{_ms(trial.low)} to {_ms(trial.high)}" if trial.low is not None else "-"
    return (
        str(trial.index),
        trial.purpose,
        trial.state,
        _ms(trial.seconds),
        interval,
        str(trial.steps),
        str(trial.outliers),
        times(trial.speedup),
        trial.words,
        trial.failure or ", ".join(_marks(trial)),
    )


def _marks(trial: ShownTrial) -> list[str]:
    marks = {"best": trial.is_best, "more than is possible: noise": trial.is_noise}
    return [mark for mark, is_set in marks.items() if is_set]


def _life_row(life: Life) -> tuple[str, ...]:
    nodes = len(life.ranks_per_node)
    return (
        str(life.number),
        life.job,
        f"{life.world_size} on {describe_count(nodes, 'node')}",
        datetime.fromtimestamp(life.created_at).strftime("%Y-%m-%d %H:%M:%S"),
        life.end,
        str(life.trials_measured),
        life.found,
    )


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.4g}"
