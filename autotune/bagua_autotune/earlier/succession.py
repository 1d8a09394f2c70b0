"""Which jobs are lives of one training, which was killed or resized and started again.

The launcher's name of the run tells, where it has one. Else the lease does: a training that was cut
short goes on with the next one of the same name and model. Two that run at the same time do not.
"""

from __future__ import annotations

from bagua_autotune.model.job import CUT_SHORT, Job
from bagua_autotune.store import Store

MOST_LOOKED_AT = 20


def goes_on_with(store: Store, job: Job, model_key: str) -> str | None:
    """The earlier life of a job that was just registered; None: it is the first, or that is not
    known yet (see take_up)."""
    alike = store.jobs.alike(job.name, model_key, MOST_LOOKED_AT)
    jobs = [j for j in alike if j.id != job.id and store.lives.following(j.id) is None]
    for each in jobs:
        if job.run is not None and each.run == job.run:
            return each.id
    # Those that still run are other trainings, or will be lost.
    ended = next((each for each in jobs if each.ended_at is not None), None)
    return ended.id if ended and was_cut_short(ended) else None


def take_up(store: Store, lost: str) -> None:
    """A job that is lost by now may have been started again meanwhile, without a word of its
    end."""
    following = store.lives.begun_since_silence(lost)
    if following is None or store.lives.following(lost) is not None:
        return
    if not store.jobs.get(following).fresh:
        store.lives.join(lost, following)


def let_go(store: Store, job: Job) -> None:
    """A job that was taken for lost runs: what was taken for its next life is another training,
    unless the launcher says otherwise."""
    following = store.lives.following(job.id)
    if following is not None and (job.run is None or store.jobs.get(following).run != job.run):
        store.lives.part(job.id)


def was_cut_short(job: Job) -> bool:
    """Whether its training was not over when it ended."""
    return job.phase in CUT_SHORT or job.is_lost
