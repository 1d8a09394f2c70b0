"""Torch's reducer of one wrapper: made anew with other buckets, with a hook of ours or without."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence

from torch.nn.parallel import DistributedDataParallel

from bagua_client.reducer.carrier import Travel, Watcher, watched
from bagua_client.torch_private import reducer as torchs
from bagua_client.torch_private.wrapper import parameters_of


class Cut:
    """The buckets that a wrapper's reducer is cut to, and what carries them.

    A new reducer records in its first steps the order in which gradients become ready, and is
    then to cut its final buckets in that order, once.

    Args:
        watcher: is told of the buckets where a hook of ours carries or watches them.

    Attributes:
        parameters: the model's, as the reducer knows them.
        default_caps: the sizes that the model was wrapped with.
        is_hooked: whether ``watcher`` is told.
        reductions: how many have ended, of those that it was told of.
        is_final: whether the final buckets are cut, or torch will do it unobserved.
        is_expectant: whether a new reducer expects a backward pass that may be over already.
        may_be_open: whether there may be a forward pass, of which ``watcher`` was not told, whose
            backward pass is still to come.
    """

    def __init__(self, ddp: DistributedDataParallel, watcher: Watcher) -> None:
        self._wrapper = weakref.ref(ddp)
        self._watcher = watcher
        self._theirs: torchs.UserHook | None = None
        self.parameters = parameters_of(ddp)
        self.default_caps = caps = torchs.caps_of(ddp)
        self._caps: torchs.Caps | None = caps
        self.is_hooked, self.is_final, self._is_timed = False, True, False
        self._is_bare = self._is_new = self.is_expectant = self.may_be_open = False
        self.reductions = self._made_after = 0
        self._given: Sequence[int] = ()

    @property
    def ddp(self) -> DistributedDataParallel:
        """The wrapper."""
        ddp = self._wrapper()
        if ddp is None:
            raise RuntimeError("the wrapper of the model is gone")
        return ddp

    @property
    def is_left(self) -> bool:
        """Whether the wrapper is gone."""
        return self._wrapper() is None

    @property
    def theirs(self) -> torchs.UserHook | None:
        """The hook of the training's own, if it has one."""
        if self.ddp.logger is not None:  # None if a change has failed half-way.
            self._theirs = torchs.user_hook_of(self.ddp)
        return self._theirs

    @property
    def keeps_order(self) -> bool:
        """Whether torch cuts in the order in which the model lists its parameters, always."""
        return not torchs.rebuilds(self.ddp)

    @property
    def waits_for_sync(self) -> bool:
        """Whether the first pass of a new reducer must be one that synchronises: with a static
        graph, torch takes no others until it has seen the graph."""
        return bool(self.ddp.static_graph)

    @property
    def steps(self) -> int:
        """Number of reductions that ended under the present reducer, or since it is watched."""
        return self.reductions - self._made_after

    @property
    def final_steps(self) -> int:
        """Number of reductions that ended with the final buckets; 0: the next one is the first."""
        return self.steps - torchs.steps_to_cut(self.ddp)

    def give(self, order: Sequence[int]) -> None:
        """Make the next reducer cut its final buckets in this order before its first step, by
        :meth:`finish`; empty: make it anew, and let it find the order itself.
        """
        self._caps, self._given = None, order

    def make(
        self,
        caps: torchs.Caps,
        travel: Travel,
        hooked: bool,
        used: Iterable[int],
        bare: bool = False,
        is_followed: bool = False,
    ) -> None:
        """A new reducer with these sizes, unless the present one can stay.

        In the middle of a training it is always hooked: else torch would cut its final buckets in
        the next forward pass but one, in which the ranks wait for each other, and which may be
        one that a single rank makes.

        Args:
            travel: the hook of ours that carries the buckets, where the training has none.
            hooked: whether a hook is needed.
            used: indices of the parameters that got a gradient since the last reduction.
            bare: there must be none.
            is_followed: the ends of reductions are known without a hook, so that none is needed
                to cut the final buckets there.

        Raises:
            RuntimeError: out of memory, for example; then there is no reducer.
        """
        ddp, theirs = self.ddp, self.theirs
        self._is_new = False
        may_watch = not bare and (theirs is None or theirs.run is not None)
        is_left = is_followed and self.is_hooked and not hooked
        if caps == self._caps and not is_left:
            if self.is_hooked == may_watch or (not hooked and not self.is_hooked):
                return
            if may_watch and theirs is None:
                torchs.register_hook(ddp, travel)
                # Ranks that have ended in a join made no pass, but torch cuts there as elsewhere.
                self.is_hooked, self.is_final = True, self._is_bare or torchs.has_run(ddp)
                self._made_after = self.reductions
                return
        hooked = may_watch and (hooked or (torchs.has_run(ddp) and not is_followed))
        self.is_hooked, self.is_expectant, self._caps = False, False, None
        order, self._given = () if bare else self._given, ()
        torchs.new_reducer(ddp, self.parameters, caps, used if self.keeps_order else (), order)
        self._made_after = self.reductions - (torchs.steps_to_cut(ddp) if order else 0)
        self._caps, self._is_timed, self._is_bare, self._is_new = caps, True, bare, True
        if theirs is not None:
            run = (
                watched(theirs.run, theirs.state, self._watcher) if hooked and theirs.run else None
            )
            torchs.register_user_hook(ddp, theirs, run)
        elif hooked:
            torchs.register_hook(ddp, travel)
        self.is_hooked = hooked
        self.is_final = not (hooked or is_followed)

    def is_between_steps(self, is_open: bool) -> bool:
        """Whether no backward pass can be under way or still to come for the present reducer.

        Args:
            is_open: whether there was a forward pass since the last reduction of which ``watcher``
                was told. Without our hook that is not known; then a new reducer is made to expect
                a backward pass, which torch does only where it need not look at the output.
        """
        ddp = self.ddp
        if torchs.is_in_backward():
            return False
        if not torchs.is_finished(ddp):
            return False  # The next forward pass raises torch's error.
        if self.is_hooked:
            return not is_open
        return not torchs.has_run(ddp) or not (self.keeps_order or ddp.static_graph)

    def expect_backward(self) -> None:
        """The forward pass of the next backward pass may be over, and the old reducer gone. One
        that has stayed knows of that pass, and could not cut its final buckets in the next."""
        self.may_be_open = torchs.has_run(self.ddp)
        if self.may_be_open and self._is_new:
            self.ddp.reducer.prepare_for_backward([])
            self.is_expectant = True

    def forward_begins(self) -> None:
        """A forward pass that synchronises begins."""
        self.is_expectant = self.may_be_open = False

    def reduced(self) -> None:
        """A reduction has ended."""
        self.reductions += 1
        self.is_expectant = self.may_be_open = False

    @property
    def is_due(self) -> bool:
        """Whether the final buckets can be cut now."""
        return not self.is_final and self.steps >= max(1, torchs.steps_to_cut(self.ddp))

    def finish(self) -> None:
        """Cut the final buckets, unless others have made torch do it: Lightning does so before each
        backward pass. All ranks call this together."""
        torchs.rebuild(self.ddp)

    def discard(self) -> None:
        """Make the next layout anew: on some rank the reducer is broken."""
        self._caps = None

    def watch_times(self) -> None:
        """The steps are measured from now on."""
        self._is_timed = True

    def leave_untimed(self) -> None:
        """Before a forward pass, stop torch from timing the steps of a reducer that has cut its
        final buckets.
        """
        if self._is_timed and self.final_steps > 0:
            self._is_timed = False
            torchs.leave_untimed(self.ddp)
