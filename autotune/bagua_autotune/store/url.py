"""A database's URL as the user gives it, and as it may be shown: without its secrets."""

from __future__ import annotations

import re

from sqlalchemy import URL, make_url
from sqlalchemy.exc import ArgumentError

from bagua_autotune.store.errors import StoreError

EXAMPLES = "examples: sqlite:////var/lib/autotune.db, postgresql+pg8000://user:password@host/name"
SECRET = re.compile("pass|pwd|secret|token|key|credential|odbc_connect", re.IGNORECASE)


def parse(text: str) -> URL:
    """Raises StoreError, which does not repeat the text: a password may be anywhere in it."""
    try:
        url = make_url(text)
    except (ArgumentError, ValueError):
        # Not chained: the cause may name a port that is part of a password.
        raise StoreError(
            f"what --database (or BAGUA_AUTOTUNE_DATABASE) names is no database URL; {EXAMPLES}"
        ) from None
    # Of a password with a bare @ or / the rest is taken for the host or the name, which are shown.
    others = (url.host, None if url.get_backend_name() == "sqlite" else url.database)
    if any("@" in part for part in others if part):
        raise StoreError(
            "the URL of --database (or BAGUA_AUTOTUNE_DATABASE) has an @ too many: percent-encode "
            f"those of the user and the password (@ is %40, / is %2F, : is %3A); {EXAMPLES}"
        )
    return url


def shown(url: URL) -> str:
    """With the password hidden, also one that is given as an option."""
    options = {key: "hidden" if SECRET.search(key) else told for key, told in url.query.items()}
    return url.set(query=options).render_as_string(hide_password=True)
