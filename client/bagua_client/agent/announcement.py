"""The few lines that every user should see, even without any logging configured."""

from __future__ import annotations

import logging

_package = logging.getLogger("bagua_client")


def announce(logger: logging.Logger, message: str, *arguments: object) -> None:
    """Log at INFO; where logging has no handler at all, write to standard error.

    Python's handler of last resort does the same for warnings only. The root logger stays as it
    is, so whoever configures logging gets the line once, or not at all if INFO is below their
    level. A level of the logger ``bagua_client`` counts without a handler, too.
    """
    if logger.hasHandlers():
        logger.info(message, *arguments)
        return
    least = max(logger.level or _package.level, logging.root.manager.disable + 1)
    if least <= logging.INFO and not logger.disabled:
        record = logger.makeRecord(logger.name, logging.INFO, __file__, 0, message, arguments, None)
        # Made anew: standard error may have been redirected since the last one.
        logging.StreamHandler().handle(record)
