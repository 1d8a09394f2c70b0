"""Jobs of a running service, read through ``/api/v2``."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from typing import TypeVar

import click
from pydantic import BaseModel, ValidationError

from bagua_autotune import __version__, views
from bagua_autotune.model.characters import clean
from bagua_autotune.store.errors import UnknownJob
from bagua_autotune.store.maintenance.retention import Deleted, Pruned, forget_copies

Message = TypeVar("Message", bound=BaseModel)
JSON = {"Content-Type": "application/json"}
AnyPage = TypeVar("AnyPage", bound=views.Page)
TIMEOUT_SECONDS = 30.0
PRUNE_TIMEOUT_SECONDS = 600.0
"""Longest time to delete jobs: thousands of them go piece by piece."""


class OtherRelease(click.ClickException):
    """The service is of another release than this command."""


class ServiceReader:
    """A Reader.

    Args:
        url: of the service; one without ``http://`` or ``https://`` is taken as http.
        token: the service's, if it has one.
    """

    def __init__(self, url: str, token: str | None) -> None:
        self._url = (url if "://" in url else f"http://{url}").rstrip("/")
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}

    def jobs(self, name: str | None = None, limit: int = 1) -> list[views.JobSummary]:
        query = {"limit": str(limit)} | ({} if name is None else {"name": name})
        try:
            return self._get(views.JobList, "/jobs?" + urllib.parse.urlencode(query)).jobs
        except UnknownJob as error:
            raise self._other_release() from error

    def job(self, job_id: str) -> views.JobDetail:
        return self._get(views.JobDetail, self._path(job_id))

    def overview(self, job_id: str) -> views.JobOverview:
        path = self._path(job_id)
        with suppress(UnknownJob):
            return self._get(views.JobOverview, path + "/overview")
        self._ask(path)
        try:
            # The job is known: it is a moment old, or the service has no overviews.
            return self._get(views.JobOverview, path + "/overview")
        except UnknownJob as error:
            raise self._other_release() from error

    def trials(self, job_id: str) -> list[views.TrialView]:
        pages = self._pages(views.TrialList, self._path(job_id) + "/trials")
        return [trial for page in pages for trial in page.trials]

    def observations(self, job_id: str) -> list[views.ObservationView]:
        pages = self._pages(views.ObservationList, self._path(job_id) + "/observations")
        return [observation for page in pages for observation in page.observations]

    def profiles(self, job_id: str) -> list[views.TrialProfile]:
        return self._get(views.ProfileList, self._path(job_id) + "/profiles").profiles

    def events(self, job_id: str) -> list[views.Event]:
        pages = self._pages(views.EventList, self._path(job_id) + "/events")
        return [event for page in pages for event in page.events]

    def delete(self, job_id: str, force: bool) -> Deleted:
        path = self._path(job_id) + ("?force=true" if force else "")
        answer = self._ask(path, timeout_seconds=PRUNE_TIMEOUT_SECONDS, method="DELETE")
        deleted = self._read(Deleted, answer)
        forget_copies([job.id for job in deleted.jobs])  # those of this host
        return deleted

    def prune(self, days: int, dry_run: bool) -> Pruned:
        asked = json.dumps({"older_than_days": days, "dry_run": dry_run}).encode()
        try:
            pruned = self._get(Pruned, "/prune", asked, PRUNE_TIMEOUT_SECONDS)
        except UnknownJob as error:
            raise self._other_release() from error
        forget_copies([] if dry_run else [job.id for job in pruned.jobs])
        return pruned

    def _path(self, job_id: str) -> str:
        return "/jobs/" + urllib.parse.quote(job_id, safe="")

    def _pages(self, message: type[AnyPage], path: str) -> Iterator[AnyPage]:
        """All pages of a list."""

        def read(after: str | None) -> AnyPage:
            query = "" if after is None else "?" + urllib.parse.urlencode({"after": after})
            return self._get(message, path + query)

        return views.all_pages(read)

    def _get(
        self,
        message: type[Message],
        path: str,
        body: bytes | None = None,
        timeout_seconds: float = TIMEOUT_SECONDS,
    ) -> Message:
        return self._read(message, self._ask(path, body, timeout_seconds))

    def _read(self, message: type[Message], answer: bytes) -> Message:
        try:
            return message.model_validate_json(answer)
        except ValidationError as error:
            if error.errors()[0]["type"] == "json_invalid":
                text = f"{self._url} cannot be read: its answer is not JSON"
                raise click.ClickException(text) from error
            raise self._other_release() from error

    def _ask(
        self,
        path: str,
        body: bytes | None = None,
        timeout_seconds: float = TIMEOUT_SECONDS,
        method: str | None = None,
    ) -> bytes:
        """Ask the service: GET, or POST of a JSON body, unless another method is named."""
        headers = self._headers if body is None else {**self._headers, **JSON}
        try:
            request = urllib.request.Request(
                self._url + "/api/v2" + path, body, headers, method=method
            )
            with urllib.request.urlopen(request, timeout=timeout_seconds) as response:
                return bytes(response.read())
        except urllib.error.HTTPError as error:
            if error.code == 404:
                raise UnknownJob(path) from error
            detail = self._wrong_token if error.code == 401 else _detail(error)
            raise click.ClickException(f"{self._url} answered {error.code}: {detail}") from error
        except (OSError, ValueError, http.client.HTTPException) as error:
            # Some errors have no message.
            reason = getattr(error, "reason", None) or str(error) or type(error).__name__
            raise click.ClickException(f"{self._url} cannot be read: {reason}") from error

    @property
    def _wrong_token(self) -> str:
        wrong = "it does not accept this token" if self._headers else "it needs a token"
        return f"{wrong}; set BAGUA_AUTOTUNE_TOKEN to that of the service"

    def _other_release(self) -> OtherRelease:
        try:
            version = clean(str(json.loads(self._ask("/openapi.json"))["info"]["version"]))
        except (click.ClickException, UnknownJob, ValueError, KeyError, TypeError):
            ours = f"this command's release, {__version__}"
            return OtherRelease(f"what answers at {self._url} is not a service of {ours}")
        versions = f"its version is {version}, this one's {__version__}"
        if version == __version__:
            versions = f"both say that they are {version}"
        return OtherRelease(
            f"the service at {self._url} is of another release than this command ({versions}); "
            "use the same release of both"
        )


def _detail(error: urllib.error.HTTPError) -> str:
    try:
        return clean(str(json.loads(error.read())["detail"]))
    except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError):
        return error.reason
