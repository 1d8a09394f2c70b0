"""``bagua-autotune export JOB --profile``: a measured job, for ``simulate --model FILE``. An entry
point of its own names it: `export` does not load what `simulate` needs."""

from __future__ import annotations

import click

from bagua_autotune.cli.reader import Reader
from bagua_autotune.model.text import clean
from bagua_autotune.views.overviews import JobOverview
from bagua_simulator.measured.recorded import summarise


def profile(reader: Reader, job: JobOverview) -> str:
    """The record of a job, as text. Raises ClickException if no step of it was profiled."""
    id, name = job.job.id, job.job.name
    profiles, observations = reader.profiles(id), reader.observations(id)
    trials = {trial.index: trial for trial in reader.trials(id)}  # Last: new ones may be there now.
    steps = [(trials[each.trial].configuration, each.profile) for each in profiles]
    measured = [
        (trials[each.trial].configuration, max(filter(None, each.seconds), default=0.0))
        for each in observations
        if trials[each.trial].state == "measured"
    ]
    try:
        record = summarise(
            name, job.ranks_per_node, reader.job(id).tensors, steps, measured,
            job.default_configuration,
        )  # fmt: skip
    except ValueError as error:
        raise click.ClickException(f"job {clean(name)}: {error}") from error
    return record.model_dump_json(indent=2) + "\n"
