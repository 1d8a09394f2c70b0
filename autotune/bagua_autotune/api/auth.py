"""The token that guards the APIs, where one is set."""

from __future__ import annotations

import hmac

from flask import Flask, abort, request
from pydantic import SecretStr

GUARDED = "/api/"


def require_token(app: Flask, token: SecretStr) -> None:
    """Answer 401 to requests below ``/api/`` without ``Authorization: Bearer TOKEN``."""
    expected = b"Bearer " + token.get_secret_value().encode()

    @app.before_request
    def _check() -> None:
        if not request.path.startswith(GUARDED):
            return
        # WSGI hands headers over as latin-1.
        given = request.headers.get("Authorization", "").encode("latin-1", "replace")
        if not hmac.compare_digest(given, expected):
            abort(
                401,
                "This service wants the header Authorization: Bearer TOKEN, with the "
                "token that BAGUA_AUTOTUNE_TOKEN holds where it runs.",
            )
