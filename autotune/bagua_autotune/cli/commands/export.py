"""``bagua-autotune export``: a job for other tools."""

from __future__ import annotations

import click

from bagua_autotune.cli import hung_in, load
from bagua_autotune.cli.reader import (
    Reader,
    find_job,
    no_such_job,
    open_reader,
    source_options,
)
from bagua_autotune.model.job import OVER, RUNS
from bagua_autotune.model.text import clean
from bagua_autotune.store.errors import UnknownJob
from bagua_autotune.views.lists import configuration_json, job_json, trials_csv
from bagua_autotune.views.overviews import JobOverview


@click.command()
@click.argument("job")
@click.option("--csv", is_flag=True, help="The trials, one line each.")
@click.option("--json", is_flag=True, help="Everything that is stored of the job.")
@click.option(
    "--profile",
    is_flag=True,
    help="How long the job computes and communicates, for 'simulate --model FILE'.",
)
@click.option(
    "--configuration",
    is_flag=True,
    help="The best configuration: BAGUA_CONFIGURATION=FILE trains with it, without a service.",
)
@source_options
def export(job: str, database: str | None, url: str | None, **formats: bool) -> None:
    """Write JOB to the standard output, in one format.

    JOB is a job's id, or a name: then the newest job of that name.
    """
    asked = [name for name in WRITERS if formats[name]]
    if len(asked) != 1:
        given = " and ".join(f"--{name}" for name in asked)
        problem = f"{given} cannot be given together: " if asked else ""
        names = ", ".join(f"--{name}" for name in WRITERS)
        raise click.UsageError(f"{problem}choose one of {names}")
    reader = open_reader(database, url)
    found = find_job(reader, job)
    try:
        text = WRITERS[asked[0]](reader, found)
    except UnknownJob as error:  # deleted since it was found
        raise no_such_job(job) from error
    click.echo(text, nl=False)


def _csv(reader: Reader, job: JobOverview) -> str:
    return trials_csv(job.knobs, reader.trials(job.job.id))


def _json(reader: Reader, job: JobOverview) -> str:
    id = job.job.id
    trials, observations = reader.trials(id), reader.observations(id)
    return "".join(job_json(reader.job(id), trials, observations, reader.events(id)))


def _profile(reader: Reader, job: JobOverview) -> str:
    entry = hung_in("formats").get("profile")
    if entry is None:
        raise click.ClickException("the simulator writes --profile, and is not installed")
    text: str = load(entry)(reader, job)
    return text


def _configuration(reader: Reader, job: JobOverview) -> str:
    name = clean(job.job.name)
    if job.job.protocol in RUNS:
        raise click.ClickException(
            f"job {name} is a search of 'bagua-autotune system', whose settings a training is "
            "started with: --json has them as its result"
        )
    if job.job.protocol != "v2":
        raise click.ClickException(f"job {name} runs Bagua's own workers: they read no such file")
    best = next((trial.configuration for trial in job.trials if trial.is_best), None)
    if job.job.result and job.job.state in OVER:
        best = job.job.result.configuration
    elif best is not None:
        click.echo(f"job {name} is not tuned yet: this is its best configuration so far", err=True)
    if best is None:
        raise click.ClickException(f"job {name}: nothing is measured yet")
    if best == job.default_configuration:
        click.echo(f"job {name}: nothing is faster than its default: this is it", err=True)
    return configuration_json(reader.job(job.job.id), best)


WRITERS = {"csv": _csv, "json": _json, "profile": _profile, "configuration": _configuration}
