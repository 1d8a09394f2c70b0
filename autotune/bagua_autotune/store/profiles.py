"""Profiles: when gradients were ready and buckets travelled in a few steps of each trial."""

from __future__ import annotations

from sqlalchemy import func, select

from bagua_autotune.model.profile import Profile
from bagua_autotune.store.database import Database
from bagua_autotune.store.rows import check_job, locked_row, trial_row
from bagua_autotune.store.tables import ProfileRow, TrialRow

MOST_PROFILES = 5


class Profiles:
    """The part of the store that keeps profiles.

    Methods with an ``index`` raise UnknownJob if there is no such job and UnknownTrial if it has
    no such trial.
    """

    database: Database

    def add_profile(self, job_id: str, index: int, profile: Profile, at: float) -> bool:
        """Store a profiled step of a trial.

        Returns:
            False if the step is stored already, or MOST_PROFILES of the trial are.
        """
        with self.database.writing() as session:
            locked_row(session, job_id).last_contact_at = at
            trial = trial_row(session, job_id, index)
            query = select(ProfileRow.step).where(ProfileRow.trial_id == trial.id)
            known = set(session.scalars(query))
            if profile.step in known or len(known) >= MOST_PROFILES:
                return False
            content = profile.model_dump(mode="json")
            session.add(ProfileRow(trial_id=trial.id, step=profile.step, content=content))
            return True

    def profiles(self, job_id: str, index: int | None = None) -> list[tuple[int, Profile]]:
        """Pairs of trial index and profile, of one trial or all, in step order."""
        query = (
            select(TrialRow.index, ProfileRow.content)
            .join(ProfileRow, ProfileRow.trial_id == TrialRow.id)
            .where(TrialRow.job_id == job_id)
            .order_by(TrialRow.index, ProfileRow.step)
        )
        with self.database.reading() as session:
            check_job(session, job_id)
            if index is not None:
                query = query.where(TrialRow.id == trial_row(session, job_id, index).id)
            found = session.execute(query)
            return [(trial, Profile.model_validate(told, strict=False)) for trial, told in found]

    def latest_profiles(self, job_id: str, count: int, trial: int | None = None) -> list[Profile]:
        """The last profiled steps of a trial, by default of the newest profiled one; in order."""
        of_job = TrialRow.job_id == job_id
        newest = select(func.max(TrialRow.index)).join(ProfileRow).where(of_job).scalar_subquery()
        query = select(ProfileRow.content).join(TrialRow).where(of_job)
        query = query.where(TrialRow.index == (newest if trial is None else trial))
        with self.database.reading() as session:
            found = session.scalars(query.order_by(ProfileRow.step.desc()).limit(count)).all()
            return [Profile.model_validate(told, strict=False) for told in reversed(found)]
