"""Cuts the buckets of a framework's wrapper anew while the framework trains."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel as Torchs

import bagua_client
from bagua_client import Configuration
from tests.client.setting import Setting
from tests.integrations.arms import Arm, Run, Trained

SETTINGS = (
    Setting(Configuration(1500, channels=2), None),
    Setting(Configuration(1, channels=4), None),
    Setting(Configuration(2500), (False, True, False)),
    Setting(Configuration(4000, first_bucket_bytes=1), None),
    Setting(Configuration(2000, channels=2), (True, False, False)),
    Setting(Configuration(2**20), None),
)
"""The models here have some kilobytes, so that most of these cut them each in its own way."""

OF_A_HOOK = tuple(Setting(Configuration(size), None) for size in (1500, 1, 4000, 2**20, 2500))
"""Where a communication hook of the training's carries the buckets, only their sizes change."""

STEP_SECONDS = 0.01
"""Between two steps of a tuned training, which would be over before the service has answered."""


class Recuts:
    """Follows one training.

    Args:
        run: with torch's class nothing is cut, and what is tuned is not cut by hand.
        settings: what to cut, in turns.
        every: so many steps.
    """

    def __init__(self, run: Run, settings: Sequence[Setting] = SETTINGS, every: int = 2) -> None:
        self._run = run
        self._settings = settings
        self._every = every
        self._steps = 0
        self._wrapper: Any = None
        self._seen = Trained()

    def wrapped(self, wrapper: Any) -> None:
        """The framework has made its wrapper, and not yet trained with it."""
        ours = bagua_client.DistributedDataParallel
        if self._run.arm is Arm.TUNED:
            assert type(wrapper) is Torchs
            assert bagua_client.tune(wrapper) is wrapper
        expected = Torchs if self._run.arm is Arm.TORCH else ours
        assert type(wrapper) is expected, f"the framework trains with {type(wrapper)}"
        self._wrapper = wrapper

    def stepped(self) -> None:
        """A step, or a backward pass of several in it, is over on all ranks."""
        self._steps += 1
        buckets = self._wrapper.reducer._get_zeros_like_grad_buckets()
        self._seen.cuts.add(tuple(bucket.buffer().numel() for bucket in buckets))
        if self._run.arm is not Arm.TORCH:
            self._seen.configurations.add(str(self._wrapper.configuration))
            self._recut()

    def _recut(self) -> None:
        if self._run.url:
            time.sleep(STEP_SECONDS)
        elif self._steps % self._every == 0 and self._is_settled:
            setting = self._settings[self._steps // self._every % len(self._settings)]
            try:
                if not self._wrapper.reconfigure(setting.of(self._wrapper)):
                    self._seen.refusals.add("the ranks did not agree")
            except RuntimeError as refusal:
                self._seen.refusals.add(str(refusal))

    @property
    def _is_settled(self) -> bool:
        """Whether torch has cut its buckets for good, which takes it two passes that synchronise;
        in between they are not seen."""
        return self._wrapper._tunable is None or self._wrapper._tunable.is_settled

    def trained(self, module: torch.nn.Module, losses: Sequence[float]) -> Trained:
        """What the training of ``module`` came to."""
        values = {**module.state_dict(), "losses": torch.tensor(losses)}
        assert "losses" not in module.state_dict()
        self._seen.values = {
            name: value.detach().double().numpy().copy() for name, value in values.items()
        }
        return self._seen
