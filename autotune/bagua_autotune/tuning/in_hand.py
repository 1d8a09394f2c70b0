"""The jobs whose ranks speak to this process, for a service that one training has for itself."""

from __future__ import annotations

import logging

from sqlalchemy.exc import SQLAlchemyError

from bagua_autotune.model.job import Event
from bagua_autotune.store import Store
from bagua_autotune.tuning.listener import TunerListener

logger = logging.getLogger(__name__)

GONE = "the training process was gone"


class InHand(TunerListener):
    """Listens to who speaks, and ends those jobs when nobody is left to speak for them."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._job_ids: set[str] = set()

    def on_heard(self, job_id: str) -> None:
        self._job_ids.add(job_id)

    def end(self, at: float) -> None:
        """The training is gone; jobs whose end was told stay as they are."""
        try:
            self._store.end_gone(list(self._job_ids), Event("ended", message=GONE, at=at))
        except SQLAlchemyError as error:
            logger.error("the jobs of the training cannot be ended: the store failed: %s", error)
