"""What a rank does once it has no more inputs than the others (torch's join)."""

from __future__ import annotations

from torch.distributed.algorithms.join import JoinHook

from bagua_client.reducer.tunable_reducer import TunableReducer


class Joined(JoinHook):
    """Torch's ``hook`` for a rank that has no more inputs than the others, and its end."""

    def __init__(self, hook: JoinHook, tunable: TunableReducer) -> None:
        self._hook = hook
        self._tunable = tunable
        tunable.may_join = True

    def main_hook(self) -> None:
        self._tunable.stand_back()
        self._hook.main_hook()

    def post_hook(self, is_last_joiner: bool) -> None:
        self._hook.post_hook(is_last_joiner)
        self._tunable.may_join = False
