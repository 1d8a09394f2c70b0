"""What whoever runs the service looks at: health, readiness, metrics, and an index."""

from __future__ import annotations

import logging

from flask import Blueprint, Response
from prometheus_client import CONTENT_TYPE_LATEST
from sqlalchemy.exc import SQLAlchemyError

from bagua_autotune import __version__
from bagua_autotune.api.problems import problem
from bagua_autotune.metrics import Metrics
from bagua_autotune.store import Store

logger = logging.getLogger(__name__)

LINKS = ("/api/v2/jobs", "/api/v2/openapi.json", "/metrics", "/healthz", "/readyz")


def blueprint(store: Store, metrics: Metrics) -> Blueprint:
    """Routes that need no token."""
    health = Blueprint("health", __name__)

    @health.get("/")
    def index() -> dict[str, object]:
        return {"service": "bagua-autotune", "version": __version__, "links": LINKS}

    @health.get("/healthz")
    def healthz() -> dict[str, str]:
        return {"status": "ok"}

    @health.get("/readyz")
    def readyz() -> Response | dict[str, str]:
        try:
            store.check()
        except SQLAlchemyError as error:
            logger.error("not ready: the store failed: %s", error)
            return problem(503, "The store cannot be used at present.")
        return {"status": "ok"}

    @health.get("/metrics")
    def exposition() -> Response:
        return Response(metrics.exposition(), content_type=CONTENT_TYPE_LATEST)

    return health
