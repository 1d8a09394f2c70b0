"""A job for other tools, as CSV and JSON, and its best configuration for a training without a
service."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

from pydantic import TypeAdapter

from bagua_autotune.model.characters import clean
from bagua_autotune.views import Event, JobDetail, ObservationView, TrialView
from bagua_wire.configuration import FILE_FORMAT, Configuration, described
from bagua_wire.cutting import Tensor

# A step of a thousand ranks is a line of 40 KB.
LINES_AT_ONCE = 100


def trials_csv(knobs: Iterable[str], trials: Sequence[TrialView]) -> str:
    """A header, and one line for each trial. The knobs are columns after its index."""
    rest = [name for name in TrialView.model_fields if name not in ("index", "configuration")]
    text = io.StringIO()
    columns = ["index", *knobs, *rest]
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    for trial in trials:
        row = {**trial.model_dump(mode="json"), **trial.configuration}
        writer.writerow({column: _cell(row[column]) for column in columns})
    return text.getvalue()


def _cell(value: object) -> object:
    """Return the value, escaped where a spreadsheet would take others' text for a formula."""
    if not isinstance(value, str):
        return value
    text = clean(value)
    return f"'{text}" if text.startswith(("=", "+", "-", "@")) else text


def job_json(
    job: JobDetail,
    trials: Sequence[TrialView],
    observations: Iterable[ObservationView],
    events: Sequence[Event],
) -> Iterator[str]:
    """Everything stored of the job except its profiles, in parts.

    Each tensor, trial, observation and event is one line.
    """
    yield job.model_dump_json(indent=2, exclude={"tensors"}).removesuffix("\n}")
    lists: tuple[tuple[str, type, Iterable[object]], ...] = (
        ("tensors", Tensor, job.tensors),
        ("trials", TrialView, trials),
        ("observations", ObservationView, observations),
        ("events", Event, events),
    )
    for name, kind, items in lists:
        yield f',\n  "{name}": ['
        adapter: TypeAdapter[object] = TypeAdapter(kind)
        lines = (f"\n    {adapter.dump_json(item).decode()}" for item in items)
        yield next(lines, "")
        while part := "".join(f",{line}" for line in islice(lines, LINES_AT_ONCE)):
            yield part
        yield "\n  ]"
    yield "\n}\n"


def configuration_json(job: JobDetail, configuration: Configuration) -> str:
    """A configuration as BAGUA_CONFIGURATION reads it, and the job that it was found for."""
    document = {
        "format": FILE_FORMAT,
        "job": job.name,
        "job_id": job.id,
        "configuration": dict(configuration),
        "tensors": described([(each.name, each.elements, each.dtype) for each in job.tensors]),
        "ranks_per_node": list(job.ranks_per_node),
        "software": job.software,
        "summary": job.result.summary if job.result else "",
    }
    return json.dumps(document, indent=2) + "\n"
