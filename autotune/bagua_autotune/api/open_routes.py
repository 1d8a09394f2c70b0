"""What needs no token: the service's own page, and health, readiness and metrics for whoever runs
the service.

The page's files (``/`` and ``/jobs/ID``) are the same for everyone and hold no data; their scripts
fetch ``/api/v2``, with a token where one is wanted.
"""

from __future__ import annotations

import logging
from importlib.resources import files
from pathlib import Path

from flask import Blueprint, Response, send_from_directory
from prometheus_client import CONTENT_TYPE_LATEST
from sqlalchemy.exc import SQLAlchemyError

from bagua_autotune.api.errors import failure
from bagua_autotune.metrics import Metrics
from bagua_autotune.store import Store
from bagua_autotune.store.errors import trouble

FOLDER = Path(str(files("bagua_autotune.web")))
# Nothing from elsewhere, nothing inline, and no text that is made into HTML or script.
POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}


def page() -> Blueprint:
    """The page's files."""
    routes = Blueprint("page", __name__)

    @routes.get("/")
    def jobs() -> Response:
        return send_from_directory(FOLDER, "jobs.html")

    @routes.get("/jobs/<job_id>")
    def job(job_id: str) -> Response:
        return send_from_directory(FOLDER, "job.html")

    @routes.get("/static/<path:name>")
    def static(name: str) -> Response:
        return send_from_directory(FOLDER / "static", name)

    @routes.after_request
    def protect(response: Response) -> Response:
        response.headers.update(HEADERS)
        # Asked for again at each load, and answered by 304: an upgrade is never half seen.
        response.headers["Cache-Control"] = "no-cache"
        return response

    return routes


logger = logging.getLogger(__name__)


def health(store: Store, metrics: Metrics) -> Blueprint:
    """Health, readiness and metrics."""
    routes = Blueprint("health", __name__)

    @routes.get("/healthz")
    def healthz() -> dict[str, str]:
        return {"status": "ok"}

    @routes.get("/readyz")
    def readyz() -> Response | dict[str, str]:
        try:
            store.check()
        except SQLAlchemyError as error:
            metrics.service.count_store_error(error)
            logger.error("not ready: the store failed: %s", error)
            return failure(503, trouble(error))
        return {"status": "ok"}

    @routes.get("/metrics")
    def exposition() -> Response:
        return Response(metrics.exposition(), content_type=CONTENT_TYPE_LATEST)

    return routes
