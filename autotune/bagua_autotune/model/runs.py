"""What a search with whole runs of a command is registered with (``bagua-autotune system``)."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field, model_validator

from bagua_autotune.model.characters import printable
from bagua_autotune.model.job import JobSpec
from bagua_autotune.model.knobs import Categorical, Given, Knob, check_configuration
from bagua_autotune.model.received import ReceivedTensor

MOST_SETTINGS = 1000
# Such as ds_config.json:zero_optimization.reduce_bucket_size, with the path of the file.
LONGEST_SETTING = 4096
SettingName = Annotated[
    str, Field(min_length=1, max_length=LONGEST_SETTING), AfterValidator(printable)
]


class RunsSpec(JobSpec):
    """A job without tensors, whose knobs are settings of a command, by the names that the command
    line has for them. Nothing of it comes from a request."""

    tensors: tuple[ReceivedTensor, ...] = ()
    knobs: dict[SettingName, Knob] = Field(min_length=1, max_length=MOST_SETTINGS)
    default_configuration: dict[SettingName, Given] = Field(max_length=MOST_SETTINGS)

    @model_validator(mode="after")
    def _consistent(self) -> RunsSpec:
        for name, domain in self.knobs.items():
            if not isinstance(domain, Categorical):
                raise ValueError(f"knobs: {name} must be a categorical")
        check_configuration(self.default_configuration, self.knobs)
        return self
