"""``bagua-autotune export``: a job for other tools."""

from __future__ import annotations

import csv
import json
import sys

import click

from bagua_autotune.api.messages import JobDetail, Trial
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
    if format == "json":
        _write_json(reader, found)
    elif format == "profile":
        _write_profile(reader, found)
    else:
        _write_csv(found, reader.trials(found.id))


def _write_json(reader: Reader, job: JobDetail) -> None:
    document = job.model_dump(mode="json")
    document["trials"] = [trial.model_dump(mode="json") for trial in reader.trials(job.id)]
    document["observations"] = [found.model_dump() for found in reader.observations(job.id)]
    document["events"] = [event.model_dump(mode="json") for event in reader.events(job.id)]
    click.echo(json.dumps(document, indent=2))


def _write_profile(reader: Reader, job: JobDetail) -> None:
    configurations = {trial.index: trial.configuration for trial in reader.trials(job.id)}
    steps = [(configurations[found.trial], found.profile) for found in reader.profiles(job.id)]
    try:
        record = summarise(job.name, job.ranks_per_node, job.tensors, steps)
    except ValueError as error:
        raise click.ClickException(f"job {clean(job.name)}: {error}") from error
    click.echo(record.model_dump_json(indent=2))


def _write_csv(job: JobDetail, trials: list[Trial]) -> None:
    """Knobs are columns between the trial's state and its measurement."""
    rest = [name for name in Trial.model_fields if name not in ("index", "configuration")]
    columns = ["index", *job.knobs, *rest]
    writer = csv.DictWriter(sys.stdout, columns, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    for trial in trials:
        row = {**trial.model_dump(mode="json"), **trial.configuration}
        row["failure"] = clean(trial.failure or "")
        writer.writerow(row)
