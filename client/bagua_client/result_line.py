"""Results for scripts: one line of JSON for each round of tuning that ended."""

from __future__ import annotations

import json
import logging
from datetime import datetime, timezone

from bagua_client.tuning import Tuning

logger = logging.getLogger(__name__)

FORMAT = 1
STANDARD_OUTPUT = "-"


def write_result_line(path: str, tuning: Tuning) -> None:
    """Append it to the file, or print it where ``path`` is ``-``. A file that cannot be written is
    told, and is no error."""
    at = datetime.now(timezone.utc).isoformat(timespec="seconds")
    document = {"format": FORMAT, "at": at, **tuning.to_json()}
    del document["rank"]  # it is 0
    line = json.dumps(document, allow_nan=False)
    try:
        if path == STANDARD_OUTPUT:
            print(line, flush=True)
            return
        with open(path, "a", encoding="utf-8") as file:
            file.write(line + "\n")
    except OSError as error:
        logger.warning("BAGUA_AUTOTUNE_RESULT: the result cannot be written (%s)", error)
