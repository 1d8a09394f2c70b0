"""What is to be known of a job at a glance, a line each; the same that the page has on top."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime

from bagua_autotune.cli.output import speedup_words
from bagua_autotune.model.job import RUNS
from bagua_autotune.model.text import describe_memory, describe_seconds
from bagua_autotune.views import JobSummary
from bagua_wire.words import describe


def fact_lines(job: JobSummary) -> Iterator[str]:
    """Return lines such as ``step time: 228 ms by default, 186 ms with the best, 186 ms now``."""
    figures, progress = job.figures, job.progress
    yield f"in short: {job.headline}"
    yield f"runs: {describe(job.configuration)}"
    yield f"speed-up: {speedup_words(figures)}"
    if job.protocol in ("v2", "runs"):  # Bagua's own workers tell no seconds, nor do scores
        default, best, now = (
            _seconds(seconds)
            for seconds in (
                figures.baseline_seconds,
                figures.incumbent_seconds,
                figures.current_seconds,
            )
        )
        yield f"step time: {default} by default, {best} with the best, {now} now"
    if figures.device_bytes is not None:
        default, best = (
            "-" if peak is None else describe_memory(peak, figures.device_bytes)
            for peak in (figures.default_peak_bytes, figures.peak_bytes)
        )
        yield f"memory: {default} by default, {best} with the best"
    most = f"at most {progress.max_trials}"
    if job.protocol not in RUNS:
        most += " in a search, besides those that confirm"
    yield f"trials: {progress.trials_measured} measured; {most}"
    lost = "" if figures.cost_steps is None else f"; {figures.cost_steps:.1f} lost by slower trials"
    if figures.default_exposed_seconds is not None:
        exposed = describe_seconds(figures.default_exposed_seconds)
        yield f"exposed by default: {exposed} of communication that computing does not hide"
    if job.protocol in RUNS:
        yield f"time: {describe_seconds(figures.search_seconds)}"
    else:
        yield f"steps: {figures.search_steps} under trials{lost}"
    heard = datetime.fromtimestamp(job.last_contact_at).strftime("%Y-%m-%d %H:%M:%S")
    yield f"last heard of: {heard}"


def _seconds(seconds: float | None) -> str:
    return "-" if seconds is None else describe_seconds(seconds)
