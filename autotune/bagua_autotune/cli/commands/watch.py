"""``bagua-autotune watch``: one job, live, until it is tuned."""

from __future__ import annotations

import time
from types import TracebackType
from urllib.error import HTTPError

import click
from rich.console import Console
from rich.live import Live
from rich.text import Text

from bagua_autotune.cli.output import INTERRUPTED, say
from bagua_autotune.cli.overview_panel import OverviewPanel, silence
from bagua_autotune.cli.reader import OtherRelease, Reader, find_job, open_reader, source_options
from bagua_autotune.model.text import clean
from bagua_autotune.store.errors import OtherSchema, UnknownJob
from bagua_autotune.views.overviews import JobOverview
from bagua_autotune.views.summary import JobSummary
from bagua_wire.messages import BEING_TUNED
from bagua_wire.words import describe

POLL_SECONDS = 1.0


@click.command()
@click.argument("job")
@click.option("--wait", is_flag=True, help="Wait for JOB to begin.")
@source_options
def watch(job: str, wait: bool, database: str | None, url: str | None) -> None:
    """Watch JOB until it is tuned or its training has ended.

    JOB is a job's id, or a name: then the newest job of that name. On a terminal a few lines are
    kept up to date; in a pipe each change is a line.
    """
    console = Console(highlight=False)
    try:
        with LiveView(console) if console.is_interactive else LineView() as view:
            reader, job_id = _find(job, wait, database, url, view)
            found = _follow(reader, job_id, view)
    except KeyboardInterrupt:
        raise click.exceptions.Exit(INTERRUPTED) from None
    say(_outcome(found))


class LiveView:
    """The last lines of a terminal. ``trouble`` says why there is nothing new to show."""

    def __init__(self, console: Console) -> None:
        self._live = Live(console=console, auto_refresh=False)
        self._overview: JobOverview | None = None

    def __enter__(self) -> LiveView:
        self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._live.stop()

    def show(self, overview: JobOverview) -> None:
        self._overview = overview
        self._live.update(OverviewPanel(overview), refresh=True)

    def trouble(self, text: str) -> None:
        shown = self._overview and OverviewPanel(self._overview, text)
        self._live.update(shown or Text(clean(text)), refresh=True)


class LineView:
    """A pipe: a line for each new trial, best configuration or state, and for each silence."""

    def __init__(self) -> None:
        self._last: object = None
        self._is_silent = False

    def __enter__(self) -> LineView:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def show(self, overview: JobOverview) -> None:
        job = overview.job
        best = next((trial.index for trial in overview.trials if trial.is_best), None)
        # Between two trials none is open.
        if job.trial is not None or job.state not in BEING_TUNED:
            now = f"now {describe(job.configuration)}"
            self._say(f"{job.name}: {job.headline}; {now}", (job.state, job.round, now, best))
        silent = silence(job)
        if silent and not self._is_silent:
            say(f"{job.name}: {silent}; still watching")
        self._is_silent = bool(silent)

    def trouble(self, text: str) -> None:
        self._say(text, text)

    def _say(self, line: str, key: object) -> None:
        if key != self._last:
            say(line)
        self._last = key


def _find(
    job: str, wait: bool, database: str | None, url: str | None, view: LiveView | LineView
) -> tuple[Reader, str]:
    """The reader and the job's id. With ``wait`` a job of this name whose training has ended does
    not count: the next one is waited for."""
    reader: Reader | None = None
    while True:
        try:
            reader = reader or open_reader(database, url)
            found = find_job(reader, job).job
            if not wait or found.ended_at is None or found.id == job:
                return reader, found.id
        except click.ClickException as error:
            if not wait or _is_refusal(error):
                raise
        view.trouble(f"waiting for job {job!r}")
        time.sleep(POLL_SECONDS)


def _is_refusal(error: click.ClickException) -> bool:
    """Whether waiting is useless: the token is wrong, perhaps, or the release."""
    cause = error.__cause__
    is_refused = isinstance(cause, HTTPError) and cause.code < 500
    return is_refused or isinstance(cause, OtherSchema) or isinstance(error, OtherRelease)


def _follow(reader: Reader, job_id: str, view: LiveView | LineView) -> JobSummary:
    """Show the job until its tuning is over. If its training is started again meanwhile, go on with
    the job of that life."""
    is_followed = False
    while True:
        try:
            overview = reader.overview(job_id)
            newest = overview.lives[-1].job if overview.lives else job_id
            if is_followed and newest != job_id:
                job_id = newest
                continue
            is_followed = True
            view.show(overview)
            if overview.job.state not in BEING_TUNED:
                return overview.job
        except UnknownJob:
            view.trouble("the service no longer knows the job; trying again")
        except OtherRelease:
            raise
        except click.ClickException as error:
            view.trouble(f"{error.message}; trying again")
        time.sleep(POLL_SECONDS)


def _outcome(job: JobSummary) -> str:
    if job.result is not None:
        return f"result: {job.result.summary}"
    if job.state == "lost":
        return f"job {job.name} is lost: its training has stopped reporting"
    return f"job {job.name} ended before its tuning did"
