"""Jobs copied from another store, whose host may be gone."""

from __future__ import annotations

from sqlalchemy.exc import IntegrityError

from bagua_autotune.model.job import Event, Job, JobSpec, Trial
from bagua_autotune.store import rows
from bagua_autotune.store.database import Database
from bagua_autotune.store.tables import EventRow, JobRow


class Copies:
    """The part of the store that takes copies in."""

    database: Database

    def adopt_job(
        self,
        job: Job,
        spec: JobSpec,
        trials: list[Trial],
        event: Event,
        *,
        model_key: str,
        network_key: str,
    ) -> bool:
        """Store a job as it is, without its steps. False, with nothing changed, if it is known."""
        content, tensors = rows.spec_columns(spec)
        row = JobRow(
            id=job.id,
            name=job.name,
            protocol=job.protocol,
            phase=job.phase,
            spec=content,
            tensors=tensors,
            data={},
            result=rows.result_column(job.result) if job.result else None,
            created_at=job.created_at,
            last_contact_at=job.last_contact_at,
            ended_at=job.ended_at,
            finished_at=job.finished_at,
            round=job.round,
            fingerprint=spec.fingerprint,
            model_key=model_key,
            network_key=network_key,
            inherited=job.inherited.model_dump(mode="json") if job.inherited else None,
        )
        try:
            with self.database.writing() as session:
                if session.get(JobRow, job.id) is not None:
                    return False
                session.add(row)
                session.flush()  # before the rows that refer to it
                for trial in trials:
                    made = rows.new_trial_row(job.id, trial)
                    made.state, made.failure = trial.state, trial.failure
                    if trial.estimate is not None:
                        rows.write_estimate(made, trial.estimate)
                    session.add(made)
                session.add(EventRow(job_id=job.id, **vars(event)))
        except IntegrityError:  # another replica stored it at the same moment
            return False
        return True
