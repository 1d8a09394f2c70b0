"""``bagua-autotune show``: one job's trials and what came of them."""

from __future__ import annotations

import click

from bagua_autotune.api.messages import JobDetail, Result, Trial
from bagua_autotune.cli.output import print_table, say, times
from bagua_autotune.cli.reader import find_job, open_reader, source_options
from bagua_autotune.model.knobs import Value
from bagua_autotune.model.text import describe

COLUMNS = (
    "trial", "purpose", "state", "ms per step", "95 %", "steps", "outliers", "speed-up",
    "configuration", "note",
)  # fmt: skip


@click.command()
@click.argument("job")
@source_options
def show(job: str, database: str | None, url: str | None) -> None:
    """Show JOB (an id, or a name: its newest): trials, incumbent, speed-up, line for DDP."""
    reader = open_reader(database, url)
    found = find_job(reader, job)
    trials = reader.trials(found.id)
    best = best_trial(found, trials)
    say(f"job {found.name} ({found.id}): {found.state}{_name_round(found)}")
    _print_trials(trials, best)
    if found.result:
        _say_result(found.result)
    chosen = found.configuration
    if best and not _is_settled(found):
        chosen = best.configuration
        say(f"incumbent: {describe(chosen)}: {_speedup(best, found, trials)}")
    say(f"stock DDP: {stock_ddp_line(chosen)}")


def best_trial(job: JobDetail, trials: list[Trial]) -> Trial | None:
    """The first trial of the final choice, or else of the incumbent, in the last round of its."""
    wanted = job.progress.incumbent
    if job.result and _is_settled(job):
        wanted = job.result.configuration
    found = [trial for trial in trials if trial.configuration == wanted]
    return min(found, key=lambda trial: (-trial.round, trial.index), default=None)


def stock_ddp_line(configuration: dict[str, Value]) -> str:
    """The line to paste; what stock DDP cannot do is said in a comment."""
    size = configuration.get("bucket_bytes")
    megabytes = (size if isinstance(size, int) else 25 * 1024**2) / 1024**2
    line = f"DistributedDataParallel(model, bucket_cap_mb={megabytes:.4g})"
    beyond = describe(
        {
            knob: value
            for knob, value in configuration.items()
            if knob != "bucket_bytes" and value != "off"
        }
    )
    return f"{line}  # without: {beyond}" if beyond else line


def _is_settled(job: JobDetail) -> bool:
    """Whether its result is the last word: it is not if the job is tuned again."""
    return job.result is not None and job.state not in ("tuning", "confirming")


def _name_round(job: JobDetail) -> str:
    return f", round {job.round}" if job.round else ""


def _print_trials(trials: list[Trial], best: Trial | None) -> None:
    rows = [_row(trial, trial is best) for trial in trials]
    if not any(trial.round for trial in trials):
        print_table(COLUMNS, rows)
        return
    numbered = [(str(trial.round), *row) for trial, row in zip(trials, rows, strict=True)]
    print_table(("round", *COLUMNS), numbered)


def _say_result(result: Result) -> None:
    say(f"result: {result.summary}")
    if result.cost_seconds:  # what an older release tuned does not say
        cost = f"{result.cost_steps:.3g} steps at the default ({result.cost_seconds:.3g} s)"
        say(f"cost: the search took the time of {cost}")
    if result.payback_steps is not None:
        say(f"payback: after {result.payback_steps} steps")


def _row(trial: Trial, is_best: bool) -> tuple[str, ...]:
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
        describe(trial.configuration),
        trial.failure or ("best" if is_best else ""),
    )


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.4g}"


def _speedup(trial: Trial, job: JobDetail, trials: list[Trial]) -> str:
    """With the widest interval that its own and the baseline's in the same round allow."""
    default = job.default_configuration
    baseline = next(
        (t for t in trials if (t.round, t.configuration) == (trial.round, default) and t.seconds),
        None,
    )
    if not (baseline and baseline.low and baseline.high and trial.low and trial.high):
        return times(trial.speedup)
    return times(trial.speedup, baseline.low / trial.high, baseline.high / trial.low)
