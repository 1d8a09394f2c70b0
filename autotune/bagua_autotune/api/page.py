"""``/`` and ``/jobs/ID``: the service's own page, as files that are the same for everyone.

They hold no data and need no token; their scripts fetch ``/api/v2``, with a token where one is
wanted.
"""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from flask import Blueprint, Response, send_from_directory

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


def blueprint() -> Blueprint:
    """Routes that need no token."""
    page = Blueprint("page", __name__)

    @page.get("/")
    def jobs() -> Response:
        return send_from_directory(FOLDER, "jobs.html")

    @page.get("/jobs/<job_id>")
    def job(job_id: str) -> Response:
        return send_from_directory(FOLDER, "job.html")

    @page.get("/static/<path:name>")
    def static(name: str) -> Response:
        return send_from_directory(FOLDER / "static", name)

    @page.after_request
    def protect(response: Response) -> Response:
        response.headers.update(HEADERS)
        # Asked for again at each load, and answered by 304: an upgrade is never half seen.
        response.headers["Cache-Control"] = "no-cache"
        return response

    return page
