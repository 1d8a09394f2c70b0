"""Pinned knobs (BAGUA_AUTOTUNE_KNOBS): the default configuration has their values too."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from bagua_client.knob_choices import Choice
from bagua_client.knobs import KNOBS
from bagua_client.tunable.tunable import Tunable

logger = logging.getLogger(__name__)


def pin(tunable: Tunable, knobs: Mapping[str, Choice]) -> None:
    """Make the job begin with the pinned values, and be compared with that; one that cannot be had
    is told and left out. All ranks together, before the first step."""
    offered = tunable.offer.values(tunable.communicator)
    for knob, choice in knobs.items():
        if choice.pinned is None:
            continue
        pinned: dict[str, Any] = {knob: choice.pinned}
        try:
            possible = offered.get(knob, [getattr(tunable.default, knob)])
            if choice.pinned not in possible and not KNOBS[knob].kind.is_open:
                raise ValueError(f"this job can have {', '.join(map(str, possible))}")
            tunable.start_from(replace(tunable.default, **pinned))
        except (RuntimeError, ValueError) as error:
            if tunable.communicator.rank == 0:
                logger.warning(
                    "BAGUA_AUTOTUNE_KNOBS: %s stays at its default, as %s is not possible here: %s",
                    *(knob, choice.pinned, error),
                )
