"""``bagua-autotune export``: a job for other tools."""

from __future__ import annotations

import click

from bagua_autotune.api.export import job_json, trials_csv
from bagua_autotune.api.messages import JobDetail
from bagua_autotune.cli.reader import Reader, find_job, open_reader, source_options
from bagua_autotune.model.text import clean
from bagua_autotune.simulation.summary import summarise


@click.command()
@click.argument("job")
@click.option("--csv", "format", flag_value="csv", help="The trials, one line each.")
@click.option("--json", "format", flag_value="json", help="Everything that is stored of the job.")
@click.option(
    "--profile", "format", flag_value="profile",
    help="What the job computes and its network did, for 'simulate --model FILE'.",
)  # fmt: skip
@source_options
def export(job: str, format: str | None, database: str | None, url: str | None) -> None:
    """Write JOB (an id, or a name: its newest) to the standard output."""
    if format is None:
        raise click.UsageError("say --csv, --json or --profile")
    reader = open_reader(database, url)
    found = find_job(reader, job)
    trials = reader.trials(found.id)
    if format == "json":
        observations, events = reader.observations(found.id), reader.events(found.id)
        click.echo(job_json(found, trials, observations, events), nl=False)
    elif format == "profile":
        _write_profile(reader, found)
    else:
        click.echo(trials_csv(found, trials), nl=False)


def _write_profile(reader: Reader, job: JobDetail) -> None:
    configurations = {trial.index: trial.configuration for trial in reader.trials(job.id)}
    steps = [(configurations[found.trial], found.profile) for found in reader.profiles(job.id)]
    try:
        record = summarise(job.name, job.ranks_per_node, job.tensors, steps)
    except ValueError as error:
        raise click.ClickException(f"job {clean(job.name)}: {error}") from error
    click.echo(record.model_dump_json(indent=2))
