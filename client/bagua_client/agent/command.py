"""What the service wants the ranks to do, as rank 0's reporter put it."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from bagua_client.configuration import Configuration

logger = logging.getLogger(__name__)


class Command(NamedTuple):
    """See :class:`bagua_client.reporter.conversation.Conversation`.

    Attributes:
        configuration: None: this rank could not read it, or cannot carry it out.
    """

    trial: int | None = None
    watch: bool = False
    told: Mapping[str, Any] = {}
    configuration: Configuration | None = None


def read_command(
    text: bytes, rank: int, keep: Callable[[Any], None], check: Callable[[Configuration], None]
) -> Command:
    """Read a command as far as that can be done; it does not raise: other ranks vote on it.

    Args:
        keep: takes the copy of what is known.
        check: raises where the ranks cannot have a configuration.
    """
    found = Command()
    try:
        said = json.loads(text)
        found = found._replace(trial=said["trial"], watch=said["watch"])
        keep(said.get("copy"))
        asked = Configuration.from_json(said["configuration"])
        found = found._replace(told=said["told"])
        check(asked)
        found = found._replace(configuration=asked)
    except Exception as error:
        logger.warning("rank %d cannot carry out the service's command: %s", rank, error)
    return found
