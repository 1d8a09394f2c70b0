"""The OpenAPI 3.1 description of ``/api/v2``, made from the views."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

import bagua_autotune
from bagua_autotune.api import reports
from bagua_autotune.api.errors import ErrorDocument
from bagua_autotune.earlier.copies import Copy
from bagua_autotune.model.received import TrialProfile
from bagua_autotune.model.text import JOB_ID
from bagua_autotune.store.maintenance.retention import Deleted, Pruned
from bagua_autotune.tuning.status import JobState
from bagua_autotune.views.curve import Curve
from bagua_autotune.views.lists import EventList, JobDetail, ObservationList, ProfileList, TrialList
from bagua_autotune.views.overviews import JobBuckets, JobList, JobOverview

Mode = Literal["validation", "serialization"]
IN: Mode = "validation"
OUT: Mode = "serialization"
REFERENCE = "#/components/schemas/{model}"
STATUS_TEXTS = {
    200: "Done",
    201: "Registered",
    304: "Not changed since the version in If-None-Match",
    400: "The body is not JSON",
    401: "The token is missing or wrong",
    403: "The request comes from a page of another site, or its Host is not the service's, or a "
    "team's token came where only the service's own is good",
    404: "There is no such job",
    409: "In conflict with what is stored",
    411: "The body comes without a Content-Length",
    413: "The body is too large for this route",
    415: "The body is not declared as JSON",
    422: "The body, the job's id or the query is not valid",
    429: "The team has as many jobs that have not ended as it may have: send the same again after "
    "Retry-After seconds",
    503: "Nothing can be stored or read now, or too many large bodies come at once: send the same "
    "again after Retry-After seconds",
}
PAGED = (("limit", "integer"), ("after", "string"))


@dataclass(frozen=True)
class Operation:
    """One method of one path.

    Attributes:
        answer: the message of the answer; None: any JSON, or text of the ``content_type``.
        query: the name and the type of each query parameter.
        also: statuses that do not follow from the rest.
        asks_store: whether it fails where the database does.
    """

    method: str
    path: str
    summary: str
    answer: type[BaseModel] | None
    body: type[BaseModel] | None = None
    query: tuple[tuple[str, str], ...] = ()
    also: tuple[int, ...] = ()
    content_type: str = "application/json"
    asks_store: bool = True


OPERATIONS = (
    Operation(
        "get",
        "/jobs",
        "List jobs, newest first",
        JobList,
        query=(("name", "string"), *PAGED),
        also=(304, 404),
    ),
    Operation(
        "put",
        "/jobs/{job_id}",
        "Register a job, or resume it",
        JobState,
        reports.Registration,
        also=(201, 409, 429),
    ),
    Operation("get", "/jobs/{job_id}", "Everything about a job", JobDetail),
    Operation(
        "delete",
        "/jobs/{job_id}",
        "Delete a job with all lives of its training; force: also while that may still run",
        Deleted,
        query=(("force", "boolean"),),
        also=(409,),
    ),
    Operation(
        "get",
        "/jobs/{job_id}/copy",
        "What is known of the job, to be given to the service of another host",
        Copy,
    ),
    Operation(
        "post", "/copies", "Take over what the service of another host knew", reports.Adopted, Copy
    ),
    Operation("get", "/jobs/{job_id}/state", "What the job's ranks should run now", JobState),
    Operation("get", "/jobs/{job_id}/trials", "The job's trials", TrialList, query=PAGED),
    Operation(
        "get",
        "/jobs/{job_id}/observations",
        "The job's observations: measured steps",
        ObservationList,
        query=(("trial", "integer"), *PAGED),
        also=(409,),
    ),
    Operation(
        "post",
        "/jobs/{job_id}/observations",
        "Report measured steps; without steps, ask for the state",
        JobState,
        reports.Observations,
        also=(409,),
    ),
    Operation(
        "post",
        "/jobs/{job_id}/progress",
        "Tell how far a tuned job is",
        JobState,
        reports.ProgressReport,
        also=(409,),
    ),
    Operation(
        "get",
        "/jobs/{job_id}/profiles",
        "The job's profiled steps",
        ProfileList,
        query=(("trial", "integer"),),
        also=(409,),
    ),
    Operation(
        "post",
        "/jobs/{job_id}/profiles",
        "Report a profiled step",
        JobState,
        TrialProfile,
        also=(409,),
    ),
    Operation("get", "/jobs/{job_id}/events", "The job's events", EventList, query=PAGED),
    Operation(
        "post",
        "/jobs/{job_id}/events",
        "Report an event",
        JobState,
        reports.NewEvent,
        also=(409,),
    ),
    Operation(
        "get",
        "/jobs/{job_id}/overview",
        "Everything that page and terminal show of the job",
        JobOverview,
        also=(304,),
    ),
    Operation(
        "get",
        "/jobs/{job_id}/curve",
        "The step times that the search expects, by bucket size",
        Curve,
        also=(304,),
    ),
    Operation(
        "get",
        "/jobs/{job_id}/buckets",
        "How the default and the best configuration put the tensors into buckets",
        JobBuckets,
        also=(304,),
    ),
    Operation(
        "get",
        "/jobs/{job_id}/trials.csv",
        "The job's trials as a download",
        None,
        content_type="text/csv",
    ),
    Operation(
        "get",
        "/jobs/{job_id}/export.json",
        "Everything stored of the job except its profiles, as a download",
        None,
    ),
    Operation(
        "post",
        "/prune",
        "Delete the jobs that have not reported for some days, or list them (dry_run)",
        Pruned,
        reports.Prune,
    ),
    Operation("get", "/openapi.json", "This description", None, asks_store=False),
)


def document() -> dict[str, Any]:
    """The whole description."""
    models: dict[tuple[type[BaseModel], Mode], None] = {(ErrorDocument, OUT): None}
    for operation in OPERATIONS:
        if operation.body:
            models[operation.body, IN] = None
        if operation.answer:
            models[operation.answer, OUT] = None
    references, schemas = models_json_schema(list(models), ref_template=REFERENCE)
    paths: dict[str, dict[str, Any]] = {}
    for operation in OPERATIONS:
        described = _describe(operation, references)
        paths.setdefault(f"/api/v2{operation.path}", {})[operation.method] = described
    return {
        "openapi": "3.1.0",
        "info": {"title": "Bagua Autotune", "version": bagua_autotune.__version__},
        "paths": paths,
        "components": {
            "schemas": schemas.get("$defs", {}),
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"token": []}],
    }


def _describe(operation: Operation, references: Any) -> dict[str, Any]:
    responses: dict[str, Any] = {}
    error = references[(ErrorDocument, OUT)]
    for status in sorted(_statuses(operation)):
        content: dict[str, Any] = {"application/problem+json": {"schema": error}}
        if status < 400:
            content = {operation.content_type: {"schema": _schema(operation, references)}}
        if status == 304:
            content = {}
        responses[str(status)] = {"description": STATUS_TEXTS[status], "content": content}
    described: dict[str, Any] = {"summary": operation.summary, "responses": responses}
    described["parameters"] = _parameters(operation)
    if operation.body:
        schema = references[(operation.body, IN)]
        content = {"application/json": {"schema": schema}}
        described["requestBody"] = {"required": True, "content": content}
    return described


def _statuses(operation: Operation) -> set[int]:
    is_of_a_job = "{job_id}" in operation.path and operation.method != "put"
    return {
        *(200, 401, 403, *operation.also),
        *([404] if is_of_a_job else []),
        *([400, 411, 413, 415, 422] if operation.body else []),
        *([422] if _parameters(operation) else []),
        *([503] if operation.asks_store else []),
    }


def _schema(operation: Operation, references: Any) -> Any:
    if operation.answer:
        return references[(operation.answer, OUT)]
    is_json = operation.content_type == "application/json"
    return {"type": "object" if is_json else "string"}


def _parameters(operation: Operation) -> list[dict[str, Any]]:
    parameters: list[dict[str, Any]] = []
    if "{job_id}" in operation.path:
        schema = {"type": "string", "pattern": f"^{JOB_ID.pattern}$"}
        parameters.append({"name": "job_id", "in": "path", "required": True, "schema": schema})
    for name, kind in operation.query:
        parameters.append({"name": name, "in": "query", "schema": {"type": kind}})
    return parameters
