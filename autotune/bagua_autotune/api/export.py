"""A job for other tools: as CSV and as JSON, downloaded or written by the command line."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Sequence

from bagua_autotune.api.messages import Event, JobDetail, Observation, Trial
from bagua_autotune.model.text import clean


def trials_csv(knobs: Iterable[str], trials: Sequence[Trial]) -> str:
    """A header, and one line for each trial; knobs are columns before the trial's round."""
    rest = [name for name in Trial.model_fields if name not in ("index", "configuration")]
    text = io.StringIO()
    columns = ["index", *knobs, *rest]
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    for trial in trials:
        row = {**trial.model_dump(mode="json"), **trial.configuration}
        writer.writerow({column: _cell(row[column]) for column in columns})
    return text.getvalue()


def _cell(value: object) -> object:
    """What others wrote must not be a formula where the file is opened as a spreadsheet."""
    if not isinstance(value, str):
        return value
    text = clean(value)
    return f"'{text}" if text.startswith(("=", "+", "-", "@")) else text


def job_json(
    job: JobDetail,
    trials: Sequence[Trial],
    observations: Sequence[Observation],
    events: Sequence[Event],
) -> str:
    """Everything that is stored of the job but its profiles."""
    document = job.model_dump(mode="json")
    document["trials"] = [trial.model_dump(mode="json") for trial in trials]
    document["observations"] = [found.model_dump() for found in observations]
    document["events"] = [event.model_dump(mode="json") for event in events]
    return json.dumps(document, indent=2) + "\n"
