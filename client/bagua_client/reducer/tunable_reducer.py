"""Torch's reducer, whose buckets are re-cut between two steps and travel as configured.

A configuration comes into force before the next forward pass that synchronises, after torch's own
check of the last step: a new reducer replaces the old one and takes over its gradients. In its
first step torch records the order in which gradients become ready. Before the next forward pass it
cuts the buckets in that order. All ranks do each of these in the same step and vote on the
outcome: if it failed on one rank, all ranks return to what they had.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from bagua_client.algorithms import Algorithm
from bagua_client.communication.agreement import attempt
from bagua_client.communication.communicator import Communicator
from bagua_client.configuration import Configuration
from bagua_client.layout import Layout, describe, plan
from bagua_client.reducer.comm_hook import Mark, watched
from bagua_client.reducer.offer import Offer, configuration_of, refusal_of
from bagua_client.reducer.ready_order import ReadyOrder
from bagua_client.reducer.replication import Replication
from bagua_client.reducer.timeline import Timeline
from bagua_client.torch_private import reducer as torchs
from bagua_client.torch_private.reducer import GradBucket

logger = logging.getLogger(__name__)

FAILED, DONE, CUT = 1, 2, 3
"""Votes on an attempted change. CUT: it is done, and torch has cut its final buckets."""


class TunableReducer:
    """The reducer of one wrapped model. All ranks must make theirs together.

    Attributes:
        communicator: the process groups of the ranks that train the model.
        parameters: the model's parameters, in the reducer's order.
        tensors: specs of these parameters.
        default: the configuration that the model was wrapped with, or the one to start from.
        layout: the layout in force.
        recut_seconds: how long the latest change took.
        after_reduction: called at the end of every step's communication, where all ranks are
            known to be in the same step.
        on_last_ready: called when a step's last bucket is full on this rank.
        on_return: called with the reason when a change failed on some rank and all went back.
        waiting: returns a context that is entered around communication in a forward pass.
        may_join: whether the training is inside torch's ``join``, which may be disabled.
    """

    def __init__(
        self, ddp: DistributedDataParallel, algorithm: Algorithm, communicator: Communicator
    ) -> None:
        self._wrapper = weakref.ref(ddp)
        self._parameters = torchs.parameters_of(ddp)
        self.parameters = self._parameters.tensors
        names = {id(parameter): name for name, parameter in ddp.module.named_parameters()}
        self.tensors = describe([(names[id(p)], p) for p in self._parameters.tensors])
        self._order = ReadyOrder(self.parameters)
        self.communicator = communicator
        self._baseline = caps = torchs.caps_of(ddp)
        self._caps: torchs.Caps | None = caps
        by_node = algorithm.hierarchical and communicator.topology.is_hierarchical
        self.default = replace(configuration_of(caps), hierarchical="leaders" if by_node else "off")
        self._replication = Replication(algorithm, self, names, ddp, self)
        communicator.prepare(self.default, self._replication.planned(self.default).exchanges)
        self.layout = plan(self.tensors, self.order, self.default)
        self.recut_seconds = 0.0
        self.after_reduction: Callable[[], None] | None = None
        self.on_last_ready: Callable[[], None] | None = None
        self.on_return: Callable[[str], None] | None = None
        self.waiting: Callable[[], AbstractContextManager[None]] = nullcontext
        self.may_join = False
        self._voters = communicator.group, communicator.device
        self._timeline: Timeline | None = None
        self._ready_handles: list[RemovableHandle] = []
        self._is_attached = self._is_hooked = self._is_timed = False
        self._is_stale = True
        self._next: Layout | None = None
        self._before = self.layout
        self._reductions = self._first_seen = 0
        self._made_after: int | None = None
        self._theirs: torchs.UserHook | None = None
        self._used = {i for i, p in enumerate(self.parameters) if p.grad is not None}
        if not torchs.rebuilds(ddp):
            weakref.finalize(ddp, _remove, torchs.on_each_gradient(self.parameters, self._used.add))
        weakref.finalize(ddp, self._replication.travel.close)
        self._replication.use(self.default)

    # What may be changed

    @property
    def algorithm(self) -> Algorithm:
        """The algorithm in force; the instance belongs to this model alone."""
        return self._replication.algorithm

    @property
    def order(self) -> tuple[int, ...]:
        """Indices of ``tensors``, in the order in which gradients become ready."""
        return self._order.indices

    @property
    def offer(self) -> Offer:
        """What may be changed, and why the rest may not."""
        ddp = self._ddp
        if ddp.logger is not None:  # None if a change has failed half-way.
            self._theirs = torchs.user_hook_of(ddp)
        return Offer(
            default=self.default,
            baseline=self._baseline,
            tensors=self.tensors,
            in_ready_order=torchs.rebuilds(ddp),
            hook=self._theirs,
            algorithms=self._replication.choices,
        )

    @property
    def refusal(self) -> str:
        """Why no setting can be changed while this training runs; empty: some can."""
        return self._replication.obstacle or refusal_of(self._ddp, self._baseline)

    @property
    def order_is_agreed(self) -> bool:
        """Whether ``order`` was seen, and is the same on all ranks: torch sends them rank 0's."""
        return self._order.is_agreed

    def plan(self, configuration: Configuration) -> Layout:
        """The layout that ``configuration`` would put in force; changes nothing.

        Raises:
            ValueError: it does not fit the model, or torch cannot carry it out here.
        """
        if configuration.buckets and not self.order_is_agreed:
            raise ValueError(
                "explicit buckets count tensors in the order in which gradients become ready, "
                "which is known after the first steps"
            )
        configuration = self._replication.named(configuration)
        self._replication.planned(configuration)
        layout = plan(self.tensors, self.order, configuration)
        self.offer.caps(layout)
        return layout

    # Changes

    def start_from(self, default: Configuration) -> None:
        """Replace the wrapper's default. All ranks call this together, before the first step.

        Raises:
            ValueError, RuntimeError: it cannot be carried out here; nothing has changed.
        """
        layout = self.plan(default)
        self.communicator.prepare(default, self._replication.planned(default).exchanges)
        self.default, self.layout, self._is_stale = default, layout, True

    @property
    def is_recut_due(self) -> bool:
        """Whether a scheduled layout is not in force yet."""
        return self._next is not None

    @property
    def layout_to_come(self) -> Layout:
        """The scheduled layout; the one in force if none is scheduled."""
        return self._next or self.layout

    @property
    def is_settled(self) -> bool:
        """Whether the layout scheduled last is in force, with its final buckets."""
        return self._next is None and self._made_after is None

    def schedule(self, layout: Layout) -> None:
        """Put ``layout`` into force before the next forward pass that synchronises. All ranks
        must have agreed on it, and call this in the same step."""
        exchanges = self._replication.planned(layout.configuration).exchanges
        self.communicator.prepare(layout.configuration, exchanges)
        self._next = layout

    def vote_in(self, group: dist.ProcessGroup, device: torch.device) -> None:
        """Vote on changes in ``group``, which communicates from ``device``, from now on."""
        self._voters = group, device

    def before_forward(self) -> bool:
        """A forward pass begins. Changes are made between two steps, that is, before a training
        pass that synchronises.

        Returns:
            Whether torch must not re-cut its buckets in this pass.

        Raises:
            RuntimeError: the last step did not reach all parameters (torch's own error); or a
                change failed on this rank, and so did the return to the layout before it.
        """
        ddp = self._ddp
        if not torch.is_grad_enabled():
            return False
        is_between_steps = ddp.module.training and ddp.require_backward_grad_sync
        if self.may_join and torchs.is_join_enabled(ddp):
            if is_between_steps:
                self.stand_back()
            return False
        is_cut_due = self._made_after is not None and self._reductions > self._made_after
        if not is_between_steps:
            return is_cut_due
        if self._replication.moments is not None:  # Before any vote: other ranks may wait in it.
            self._replication.moments.catch_up()
        if is_cut_due:
            self._let_torch_cut()
        if self._is_timed and self._reductions - self._first_seen > torchs.steps_to_cut(ddp):
            self._is_timed = False
            torchs.leave_untimed(ddp)
        self._settle()
        if self._next is not None:
            torchs.rebuild(ddp)
            self._carry_out(self._next)
            self._settle()
        if self._replication.moments is not None:
            self._replication.moments.forward_begins()
        return False

    def _settle(self) -> None:
        """Register the communication hook that the algorithm's phase or the training needs."""
        if self._replication.change_phase(*self._voters):
            self._is_stale = True
        if self._is_stale:
            self._is_stale = False
            self._build(self.layout)

    def _let_torch_cut(self) -> None:
        """A new reducer cuts its final buckets once. Counted steps tell whether it has, because
        others may make torch do it: Lightning does so before each backward pass."""
        ddp, steps = self._ddp, self._reductions - (self._made_after or 0)

        def cut() -> bool:
            torchs.rebuild(ddp)
            return steps >= torchs.steps_to_cut(ddp)

        if self._on_all_ranks(cut, is_in_force=True) == CUT:
            self._made_after = None

    def _carry_out(self, layout: Layout) -> None:
        began = time.perf_counter()
        self._next, self._before = None, self.layout
        self._replication.make_way_for(layout.configuration)
        if self._on_all_ranks(lambda: self._build(layout)) == FAILED:
            return
        self.recut_seconds = time.perf_counter() - began
        if self.communicator.rank == 0 and layout.digest != self._before.digest:
            logger.info(
                "autotune: cut %d tensors into %d buckets (%s) in %.1f ms",
                len(self.tensors),
                len(layout.partition),
                layout.configuration,
                self.recut_seconds * 1e3,
            )

    def _on_all_ranks(self, change: Callable[[], bool | None], is_in_force: bool = False) -> int:
        """Make ``change`` on all ranks. FAILED: one rank could not, so all ranks went back."""
        votes, error = attempt(lambda: CUT if change() else DONE, FAILED, *self._voters)
        if FAILED not in votes:
            return votes[0]
        ranks = ", ".join(str(rank) for rank, value in enumerate(votes) if value == FAILED)
        if error:
            logger.error("rank %s cannot re-cut its buckets (%s)", self.communicator.rank, error)
        if is_in_force:  # It was in force for a step at least: weights may differ by rank.
            self._replication.make_way_for(self._before.configuration)
        self._build(self._before)
        reason = f"re-cutting the buckets failed on rank {ranks}"
        if self.communicator.rank == 0:
            logger.error("%s: all ranks went back to %s", reason, self.layout.configuration)
        if self.on_return is not None:
            self.on_return(reason)
        return FAILED

    @property
    def _ddp(self) -> DistributedDataParallel:
        ddp = self._wrapper()
        if ddp is None:
            raise RuntimeError("the wrapper of the model is gone")
        return ddp

    def _build(self, layout: Layout, bare: bool = False) -> None:
        """Put ``layout`` in force, with a new reducer unless the present one can stay.

        Args:
            bare: without this package's hook, so that torch alone carries the buckets.
        """
        ddp, offer = self._ddp, self.offer
        caps, theirs = offer.caps(layout), offer.hook
        self._replication.use(layout.configuration)
        is_torchs_way = layout.configuration.is_torchs_way
        is_torchs = self.algorithm.is_torchs and is_torchs_way
        # Our hook also learns the order that explicit buckets need, and where steps end.
        sees = not self.order_is_agreed and offer.has_explicit_buckets
        has_use = not is_torchs or sees or not torchs.rebuilds(ddp)
        hooked = not bare and (self._is_attached or (theirs is None and has_use))
        self.layout = layout
        if caps == self._caps:
            if hooked == self._is_hooked:
                return
            if hooked and theirs is None:
                torchs.register_hook(ddp, self._replication.travel)
                self._is_hooked = True
                return
        self._is_hooked, self._caps = False, None
        in_order = torchs.rebuilds(ddp)
        torchs.new_reducer(ddp, self._parameters, caps, () if in_order else self._used)
        self._caps, self._made_after = caps, self._reductions
        self._first_seen, self._is_timed = self._reductions, True
        if theirs is not None:
            run = watched(theirs.run, theirs.state, self) if hooked and theirs.run else None
            torchs.register_user_hook(ddp, theirs, run)
        elif hooked:
            torchs.register_hook(ddp, self._replication.travel)
        self._is_hooked = hooked
        if not hooked:
            self._made_after = None  # Torch cuts the final buckets by itself, unobserved.

    # When others carry the buckets

    def stand_back(self) -> None:
        """Leave the buckets to torch until all ranks have ended. Under ``join`` ranks end one by
        one, torch divides by the number that is left, and no rank may wait for a vote."""
        if self._is_hooked:
            self._is_stale = True
            self._build(self.layout, bare=True)

    def give_way(self) -> None:
        """Remove our hook: the user is about to register one, and torch takes only one."""
        self._next = None
        self.default = replace(self.default, channels=1, hierarchical="off")
        if self._is_hooked:
            self._build(plan(self.tensors, self.order, self.default), bare=True)
        elif not self.layout.configuration.is_torchs_way:  # Before the first step.
            self.layout = plan(self.tensors, self.order, self.default)

    def look_on(self) -> None:
        """The user has registered a hook: it carries the buckets, and ours only observes them."""
        self._is_stale = True

    # Observing the steps

    def attach(self) -> None:
        """Observe the steps from the next one on. All ranks must call this together."""
        self._is_attached = self._is_stale = self._is_timed = True
        torchs.split_graphs(self._ddp, self._baseline.bucket_bytes)

    def detach(self) -> None:
        """Stop observing the steps; buckets travel as before."""
        self.after_reduction = self.on_last_ready = self.on_return = None
        self.waiting = nullcontext
        self.record(None)
        self._is_attached = False
        self._voters = self.communicator.group, self.communicator.device

    def record(self, timeline: Timeline | None) -> None:
        """Record the next steps in ``timeline``; None: stop recording."""
        self._timeline = timeline
        _remove(self._ready_handles)
        if timeline is not None:
            self._ready_handles = torchs.on_each_gradient(self.parameters, timeline.tensor_ready)

    def bucket_starts(self, bucket: GradBucket) -> Mark | None:
        """A bucket is full on this rank and about to travel. Called in the backward pass."""
        self._order.saw(bucket)
        on_end = None
        if self._timeline is not None:
            on_end = self._timeline.bucket_starts(bucket.buffer().nbytes)
        if bucket.is_last():
            if self.on_last_ready is not None:
                self.on_last_ready()
            torchs.after_backward(self._reduced)
        return on_end

    def _reduced(self) -> None:
        """The backward pass is over, and torch has waited for all buckets."""
        self._reductions += 1
        self._used.clear()
        if self._replication.moments is not None:
            self._replication.moments.backward_ends()
        steps = self._reductions - self._first_seen
        is_cut = steps > torchs.steps_to_cut(self._ddp)
        if self._order.step_ends(is_cut, not torchs.rebuilds(self._ddp)):
            self.layout = plan(self.tensors, self.order, self.layout.configuration)
        if self.after_reduction is not None:
            self.after_reduction()


def _remove(handles: list[RemovableHandle]) -> None:
    while handles:
        handles.pop().remove()
