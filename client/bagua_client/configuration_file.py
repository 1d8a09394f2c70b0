"""A configuration in a file, as ``bagua-autotune export JOB --configuration`` writes it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bagua_client.configuration import Configuration
from bagua_client.layout import TensorSpec
from bagua_wire.configuration import FILE_FORMAT, described, digest_of


@dataclass(frozen=True)
class ConfigurationFile:
    """A configuration file that was read.

    Attributes:
        name: of the file.
        configuration: what to train with.
        digest: equal on two ranks if the files say the same.
        document: all that it says. Who writes one by hand needs the configuration only.
    """

    name: str
    configuration: Configuration
    digest: str
    document: Mapping[str, Any]

    @classmethod
    def read(cls, path: str) -> ConfigurationFile:
        """Raises ValueError, with a sentence, if it cannot be read or is something else."""
        name = Path(path).name
        try:
            document = json.loads(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise ValueError(f"{path} cannot be read: {error.strerror or error}") from None
        except ValueError as error:
            raise ValueError(f"{name} is not JSON: {error}") from None
        values = document.get("configuration") if isinstance(document, dict) else None
        if not isinstance(values, dict):
            raise ValueError(
                f"{name} has no configuration; 'bagua-autotune export JOB --configuration' "
                "writes such a file"
            )
        if document.get("format", FILE_FORMAT) != FILE_FORMAT:
            raise ValueError(f"{name} is of a later release; update bagua-autotune")
        try:
            configuration = Configuration.from_json(values)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
        return cls(name, configuration, digest_of(document), document)

    def obstacle(self, tensors: Sequence[TensorSpec]) -> str:
        """Why it is not for this model; empty: it is, or does not say for which."""
        this = _described(tensors)
        known, held = {**this, **self._part("tensors")}, sum(self.configuration.buckets)
        if known["count"] != len(tensors):
            return (
                f"{self.name} is for a model of {known['count']} tensors, this one has "
                f"{len(tensors)}"
            )
        if held not in (0, len(tensors)):
            return f"the buckets of {self.name} hold {held} tensors, the model has {len(tensors)}"
        if known["digest"] != this["digest"]:
            return f"{self.name} is for another model: its tensors have other names or sizes"
        return ""

    def is_in_order(self, tensors: Sequence[TensorSpec]) -> bool:
        """Whether gradients became ready in this order, too, as far as it says."""
        order = self._part("tensors").get("order_digest")
        return order in (None, _described(tensors)["order_digest"])

    def differences(self, now: Mapping[str, Any]) -> list[str]:
        """Return what has changed since the configuration was found; it may not be the fastest
        here.

        Args:
            now: by the same names as in the file.
        """
        before = {"ranks per node": self.document.get("ranks_per_node"), **self._part("software")}
        both = [name for name in now if before.get(name) is not None and before[name] != now[name]]
        return [f"{name} {before[name]} then, {now[name]} now" for name in both]

    def _part(self, name: str) -> Mapping[str, Any]:
        part = self.document.get(name)
        return part if isinstance(part, dict) else {}


def _described(tensors: Sequence[TensorSpec]) -> dict[str, Any]:
    return described([(each.name, each.elements, each.dtype) for each in tensors])
