"""Which settings of a model can be changed that a process trains by itself."""

from __future__ import annotations

from dataclasses import dataclass

from bagua_client.tunable.offer import Limit, Offer


@dataclass(frozen=True, kw_only=True)
class SingleOffer(Offer):
    """Nothing travels, so the rows are those that any training has."""

    kind = "single"

    def limits(self) -> dict[str, Limit]:
        """None of its own."""
        return {}
