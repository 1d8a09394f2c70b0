"""A configuration as the ranks carry it out: a value for every knob that the client knows; and a
file with one, as ``bagua-autotune export JOB --configuration`` writes it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bagua_wire.configuration import FILE_FORMAT, NamedTensor, described, digest_of
from bagua_wire.knobs import KNOBS, Knobs


@dataclass(frozen=True)
class Configuration(Knobs):
    """What all ranks run in a step. Its attributes are those of :class:`bagua_wire.knobs.Knobs`.

    Raises:
        ValueError: a value is outside its domain.
    """

    def __post_init__(self) -> None:
        for name, knob in KNOBS.items():
            object.__setattr__(self, name, knob.kind.checked(name, getattr(self, name)))

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Configuration:
        """Read a configuration that the service sent. A missing knob has its default.

        Raises:
            ValueError: this client does not know a knob, or a value is outside its domain. If an
                unknown knob were ignored, it would be measured as if it were in force.
        """
        unknown = sorted(set(values) - set(KNOBS))
        if unknown:
            raise ValueError(
                f"this client does not know the knob {', '.join(unknown)}; update bagua-autotune"
            )
        return cls(**values)

    @property
    def cut(self) -> tuple[object, ...]:
        """The values that say how buckets are cut."""
        return tuple(getattr(self, name) for name, knob in KNOBS.items() if knob.cuts)

    def check_model(self, kind: str) -> None:
        """Check that models of this kind (:attr:`Knob.models`) have the knobs in use.

        Raises:
            ValueError: they do not.
        """
        lacking = [n for n, knob in KNOBS.items() if kind not in knob.models and self._uses(n)]
        if lacking:
            raise ValueError(f"{kind} models do not have the knob {', '.join(lacking)}")

    @property
    def torchs_way(self) -> Configuration:
        """This configuration's cut, with buckets that travel as with stock torch."""
        ways = [name for name, knob in KNOBS.items() if not (knob.cuts or knob.computes)]
        return replace(self, **{name: KNOBS[name].default for name in ways})

    @property
    def is_torchs_way(self) -> bool:
        """Whether buckets travel as with stock torch, however they are cut, and whatever is
        computed beside."""
        return self == self.torchs_way

    @property
    def changes_numbers(self) -> bool:
        """Whether it changes what the model learns by more than the rounding order of the sums."""
        return any(knob.changes_numbers for name, knob in KNOBS.items() if self._uses(name))

    @property
    def numbers(self) -> tuple[object, ...]:
        """The values that say what the model learns, beyond that rounding order."""
        return tuple(getattr(self, name) for name, knob in KNOBS.items() if knob.changes_numbers)

    @property
    def values(self) -> dict[str, Any]:
        """The value of every knob, as the service reads it."""
        values = [(name, getattr(self, name)) for name in KNOBS]
        return {name: list(v) if isinstance(v, tuple) else v for name, v in values}

    def to_json(self) -> dict[str, Any]:
        """The same for people and files: what is at its default only of what replicated models
        communicate by."""
        replicated = {name for name, knob in KNOBS.items() if "replicated" in knob.models}
        usual = {name for name in replicated if not KNOBS[name].computes}
        return {name: v for name, v in self.values.items() if name in usual or self._uses(name)}

    def __str__(self) -> str:
        """Say how the buckets are cut, then the knobs that are not at their defaults. Where only
        what is computed is not as by default, say that: there may be no buckets."""
        cuts = [name for name, knob in KNOBS.items() if knob.cuts and self._uses(name)]
        ways = [name for name, knob in KNOBS.items() if not knob.cuts and self._uses(name)]
        if self.buckets:
            cuts = ["buckets"]  # The sizes are not used.
        elif cuts or not ways or any(not KNOBS[name].computes for name in ways):
            cuts = ["bucket_bytes", *(name for name in cuts if name != "bucket_bytes")]
        return ", ".join(KNOBS[name].told(getattr(self, name)) for name in [*cuts, *ways])

    def _uses(self, name: str) -> bool:
        """Whether a knob is not at its default."""
        return bool(getattr(self, name) != KNOBS[name].default)


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

    def obstacle(self, tensors: Sequence[NamedTensor]) -> str:
        """Why it is not for this model; empty: it is, or does not say for which."""
        this = described(tensors)
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

    def is_in_order(self, tensors: Sequence[NamedTensor]) -> bool:
        """Whether gradients became ready in this order, too, as far as it says."""
        order = self._part("tensors").get("order_digest")
        return order in (None, described(tensors)["order_digest"])

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
