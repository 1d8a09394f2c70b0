"""Torch's reducer, whose buckets are re-cut between two steps and travel as configured.

All ranks are known to be together where the user calls for a change on all of them, where a step's
first bucket is about to travel, and where all buckets have arrived: only there do they vote or
communicate. A forward pass may be one that a single rank makes, whatever the model's mode is, so
nothing in it waits for another rank, but for a change under a static graph.

A change is made at the end of a reduction, or at the call if no step is under way: a new reducer
replaces the old one and takes over its gradients. In its first step torch records the order in
which gradients become ready. At the end of that step it cuts the buckets in that order. All ranks
do each of these in the same step and vote on the outcome: if it failed on one rank, all ranks
return to what they had.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from bagua_client.algorithms import Algorithm
from bagua_client.communication.agreement import Group, Vote
from bagua_client.communication.communicator import Communicator
from bagua_client.configuration import Configuration
from bagua_client.layout import Layout, describe, digest_of, plan
from bagua_client.reducer.carrier import Mark
from bagua_client.reducer.cut import Cut
from bagua_client.reducer.observation import BucketObservation, ReadyOrder, ReductionEnds
from bagua_client.reducer.offer import ReplicatedOffer, configuration_of, refusal_of
from bagua_client.reducer.replication import Replication
from bagua_client.torch_private import reducer as torchs
from bagua_client.torch_private.reducer import GradBucket
from bagua_client.tunable.memory import MeasuredMemory
from bagua_client.tunable.reconfiguration import Reconfiguration
from bagua_client.tunable.tunable import NOBODY, Timeline, Tunable


class TunableReducer(Tunable):
    """The reducer of one wrapped model. All ranks must make theirs together; see :class:`Tunable`.

    Attributes:
        parameters: the model's, in the reducer's order; ``tensors`` are the specs of these.
        is_attached: whether a tuning observes the steps.
    """

    cannot, failed = "cannot re-cut its buckets", "re-cutting the buckets failed"

    def __init__(
        self, ddp: DistributedDataParallel, algorithm: Algorithm, communicator: Communicator
    ) -> None:
        super().__init__(communicator, ddp.module, ddp.device)
        self._cut = Cut(ddp, self)
        self.parameters = self._cut.parameters.tensors
        names = {id(parameter): name for name, parameter in ddp.module.named_parameters()}
        self.tensors = describe(
            [(names[id(p)], p) for p in self.parameters], self._cut.parameters.expect_sparse
        )
        self.observation = BucketObservation(self.parameters, ddp, self.observers)
        self._order = self.observation.order
        by_node = algorithm.hierarchical and communicator.topology.is_hierarchical
        ways = "leaders" if by_node else "off"
        default = replace(configuration_of(self._cut.default_caps), hierarchical=ways)
        self.default = self.recomputation.named(default)
        self._kept = KeptLayout(self, self._order)
        self._replication = Replication(algorithm, self, names, self._kept, ddp, self)
        communicator.prepare(self.default, self._replication.planned(self.default).exchanges)
        self.layout = plan(self.tensors, self.order, self.default)
        if self.device_memory is not None and self.recomputation:
            self.memory = MeasuredMemory(self.device_memory, self.layout, self.recomputation)
        self._ends = ReductionEnds(
            lambda: torchs.is_finished(self._cut.ddp),
            lambda: self._unless_hooked(self._computed),
            lambda: self._unless_hooked(self._reduced),
        )
        weakref.finalize(ddp, self._ends.stop)
        self.is_attached = self._may_join = self._is_open = self._sees_buckets = False
        self._may_leave = True
        self._is_stale = True
        self._before = self.layout
        weakref.finalize(ddp, self._replication.travel.close)
        self._replication.use(self.default)

    # What may be changed

    @property
    def algorithm(self) -> Algorithm:  # type: ignore[override]
        """The algorithm in force; the instance belongs to this model alone."""
        return self._replication.algorithm

    @property
    def order(self) -> Sequence[int]:  # type: ignore[override]
        return self._order.indices

    @property
    def offer(self) -> ReplicatedOffer:
        return ReplicatedOffer(
            default=self.default,
            communicator=self.communicator,
            default_caps=self._cut.default_caps,
            tensors=self.tensors,
            in_ready_order=not self._cut.keeps_order,
            hook=self._cut.theirs,
            algorithms=self._replication.choices,
            recomputed=self.recomputed,
        )

    @property
    def refusal(self) -> str:
        return self._replication.obstacle or refusal_of(self._cut.ddp, self._cut.default_caps)

    @property
    def order_is_agreed(self) -> bool:
        return self._order.is_agreed and self.recomputation.is_known

    def plan(self, configuration: Configuration) -> Layout:
        if configuration.buckets and not self._order.is_known:
            raise ValueError(
                "explicit buckets count tensors in the order in which gradients become ready, "
                "which is known after the first steps"
            )
        configuration = self._replication.declared.named(self.recomputation.named(configuration))
        self._replication.planned(configuration)
        layout, offer = plan(self.tensors, self.order, configuration), self.offer
        offer.check(configuration)
        offer.caps(layout)
        return layout

    # Changes

    def leave(self) -> None:
        super().leave()
        self._ends.stop()
        self._order.stop()
        self._replication.close()

    def give_back(self) -> None:
        """Let torch alone carry the buckets, in the sizes that the model was wrapped with. Not
        collective, as torch makes a reducer on each rank for itself."""
        caps, travel = self._cut.default_caps, self._replication.travel
        self._cut.make(caps, travel, hooked=False, used=self._order.used, bare=True)
        self._cut.ddp.bucket_bytes_cap = caps.bucket_bytes
        self.recomputation.forget()
        self.layout = plan(self.tensors, self.order, configuration_of(caps))

    def start_from(self, default: Configuration) -> None:
        layout = self.plan(default)
        self.prepare(layout)
        self.default, self.layout, self._is_stale = default, layout, True

    @property
    def is_settled(self) -> bool:
        return super().is_settled and self._cut.is_final

    def prepare(self, layout: Layout) -> None:
        exchanges = self._replication.planned(layout.configuration).exchanges
        self.communicator.prepare(layout.configuration, exchanges)

    def schedule(self, layout: Layout) -> None:
        """See :meth:`Tunable.schedule`: at the end of this reduction, if called there, else of the
        next."""
        super().schedule(layout)
        self._is_stale |= not (self.is_hooked or self._ends.are_followed)  # No end is seen.

    def change(self, layout: Layout) -> bool:
        """See :meth:`Tunable.change`: at once, or at the end of the next reduction where some
        rank has begun a step."""
        self.schedule(layout)
        is_early = not (self.stands_back or self._cut.waits_for_sync)
        is_early = is_early and self._cut.is_between_steps(self._is_open)
        if 0 in Vote(int(is_early), *self._voters).values():
            return True
        may_wait = not self.is_hooked or self._cut.may_be_open
        is_done = self._carry_out()
        if may_wait:
            self._cut.expect_backward()
        return is_done

    def cut_in(self, order: Sequence[int], at_once: bool) -> None:
        """Cut in this order, which all ranks know before the first step: now, or as ever later."""
        self._order.take(order)
        self._cut.give(order if at_once else ())
        self._is_stale = True
        self.layout = plan(self.tensors, order, self.layout.configuration)
        if self._next is not None:
            self._next = plan(self.tensors, order, self._next.configuration)

    def before_forward(self) -> None:
        """A forward pass begins: maybe on this rank alone, unless all have loaded a checkpoint's
        buckets and have not used them yet.

        Raises:
            RuntimeError: the last step did not reach all parameters (torch's own error), and a
                new reducer, which would not know that, is due.
        """
        if not torch.is_grad_enabled():
            return
        if not self._cut.ddp.require_backward_grad_sync:
            if self._cut.is_expectant:  # It would take this pass for the one that it expects.
                self._cut.discard()
                self._put(self.layout)
            return
        self._cut.forward_begins()
        if self.stands_back:
            self.stand_back()
            return
        self._ends.is_due = True
        if self._replication.moments is not None:
            self._replication.moments.catch_up()
        self._cut.leave_untimed()
        if kept := self._kept.take_up(*self._voters, self._replication.begin_phase):
            self._next = kept
        if kept or (self._next and self._cut.waits_for_sync):
            self._carry_out()
        if self._is_stale:
            torchs.check_finished(self._cut.ddp)
            self._is_stale = False
            self._put(self.layout)
            if self._cut.is_due:  # In the order that was given.
                self._let_torch_cut()
        self._is_open = True
        if self._replication.moments is not None:
            self._replication.moments.forward_begins()

    def _make_way(self, layout: Layout) -> None:
        super()._make_way(layout)
        self._before = self.layout
        self._replication.make_way_for(layout.configuration)

    def _go_back(self) -> None:
        self._cut.discard()
        self._put(self._before)

    def _go_back_after_a_step(self) -> None:
        """It was in force for a step at least: weights may differ by rank."""
        self._replication.make_way_for(self._before.configuration)
        self._go_back()

    def _described(self, layout: Layout) -> str:
        tensors, buckets = len(self.tensors), len(layout.partition)
        return f"cut {tensors} tensors into {buckets} buckets ({layout.configuration})"

    def _let_torch_cut(self) -> None:
        """A new reducer cuts its final buckets, once."""
        if self._on_all_ranks(self._cut.finish, self._go_back_after_a_step):
            self._cut.is_final = True

    def _put(self, layout: Layout, bare: bool = False) -> None:
        """Put ``layout`` in force, with a new reducer unless the present one can stay.

        Args:
            bare: without this package's hook, so that torch alone carries the buckets.
        """
        offer, caps = self.offer, self.offer.caps(layout)
        self.recomputation.put(layout.configuration.recomputed_blocks)
        self._replication.use(layout.configuration)
        # Our hook also learns the order of the gradients, and where steps end.
        has_use = not self._is_torchs(layout) or not self.order_is_agreed or self._cut.keeps_order
        has_use |= self._replication.awaits_reduction
        is_followed = self._ends.are_followed
        is_watched = self._sees_buckets or (self._next is not None and not is_followed)
        self.layout, self._may_leave = layout, True
        hooked = is_watched or (offer.hook is None and has_use)
        self._cut.make(caps, self._replication.travel, hooked, self._order.used, bare, is_followed)

    # When others carry the buckets

    def _is_torchs(self, layout: Layout) -> bool:
        """Whether buckets travel as with stock torch. Phases of an algorithm begin in our hook."""
        configuration = layout.configuration
        if not configuration.is_torchs_way:
            return False
        algorithm = self._replication.planned(configuration)
        return algorithm.is_torchs and not algorithm.phase

    def is_carried_by_torch(self, layout: Layout) -> bool:
        if not (self._knows_ends and self._is_torchs(layout)):
            return False
        return self._cut.theirs is None

    @property
    def _knows_ends(self) -> bool:
        """Whether the ends of reductions can be told without a hook on buckets."""
        return torchs.reaches_all(self._cut.ddp) and self.order_is_agreed

    def _leave_to_torch(self) -> None:
        """Nobody observes the steps: keep no hook that has done what it was for."""
        if self._may_leave and self.is_hooked:
            self._may_leave = False
            if self.is_carried_by_torch(self.layout):
                self._leave_buckets()
        elif self.listener is NOBODY and not self.is_hooked:
            self._ends.stop()

    def _leave_buckets(self) -> None:
        """Follow but the ends of reductions, from the end of this one or the next one on, and have
        no hook on the buckets where torch carries them."""
        self._sees_buckets = False
        self._ends.follow([self.parameters[index] for index in self.order])
        if self.is_hooked:
            self._next = self._next or self.layout

    def stand_back(self) -> None:
        """Leave the buckets to torch until all ranks have ended; under ``join`` none may wait."""
        if self.is_hooked:
            self._is_stale = True
            self._put(self.layout, bare=True)

    def joins(self, may_join: bool) -> None:
        """The training is inside torch's ``join`` from now on, or no longer."""
        self._may_join = may_join

    @property
    def is_hooked(self) -> bool:
        """Whether our hook is told of the buckets."""
        return self._cut.is_hooked

    @property
    def is_left(self) -> bool:
        return self._cut.is_left

    @property
    def stands_back(self) -> bool:
        """Whether the training is inside ``join``, where ranks may end one by one."""
        return self._may_join and torchs.is_join_enabled(self._cut.ddp)

    def give_way(self) -> None:
        """Remove our hook: the user is about to register one, and torch takes only one."""
        self._next, self.default = None, self.default.torchs_way
        if self.is_hooked:
            self._put(plan(self.tensors, self.order, self.default), bare=True)
        elif not self.layout.configuration.is_torchs_way:  # Before the first step.
            self.layout = plan(self.tensors, self.order, self.default)

    def look_on(self) -> None:
        """The user has registered a hook: it carries the buckets, and ours only observes them."""
        self._is_stale = True

    # Observing the steps

    def attach(self, in_detail: bool = True) -> None:
        self.is_attached = True
        if in_detail or not self._knows_ends:
            self._sees_buckets = True
            self._is_stale |= self._next is None  # Else the hook comes with that.
            self._ends.stop()
        else:
            self._leave_buckets()
        self._cut.watch_times()
        torchs.split_graphs(self._cut.ddp, self._cut.default_caps.bucket_bytes)

    def watch(self) -> None:
        """See :meth:`Tunable.watch`: without a hook on buckets where torch carries them and each
        step reaches all parameters. All ranks must call this together, at the end of a step."""
        if torchs.reaches_all(self._cut.ddp):
            self.is_attached = False
            self._leave_buckets()

    def record(self, timeline: Timeline | None) -> None:
        self.observation.record(timeline)

    def detach(self) -> None:
        """See :meth:`Tunable.detach`; buckets travel as before."""
        super().detach()
        self.record(None)
        self.is_attached = self._sees_buckets = False
        self._may_leave = True

    def forget(self) -> None:
        """See :meth:`Tunable.forget`; no step has been seen."""
        super().forget()
        self._order.stop()

    def bucket_starts(self, bucket: GradBucket) -> Mark | None:
        """A bucket is full on this rank and about to travel. Called in the backward pass."""
        if bucket.index() == 0:
            self._kept.is_the_same(*self._voters)
            self._replication.reduction_begins(*self._voters)
        on_end = self.observers.call(self.observation.bucket_starts, bucket)
        if bucket.is_last():
            self._computed()
            torchs.after_backward(self._reduced)
        return on_end

    def _computed(self) -> None:
        self.observers.call(self.listener.computed)

    def _unless_hooked(self, seen: Callable[[], None]) -> None:
        """Our hook sees more of the same."""
        if not self.is_hooked:
            seen()

    def _reduced(self) -> None:
        """The backward pass is over, and torch has waited for all buckets."""
        self._is_open = self._ends.is_due = False
        self._cut.reduced()
        if self._replication.moments is not None:
            self._replication.moments.backward_ends()
        if self._order.step_ends(self._cut.final_steps, self._cut.keeps_order, self._voters):
            self.layout = plan(self.tensors, self.order, self.layout.configuration)
        self._count_step()
        self.listener.reduced()
        if not self.is_attached and self.is_settled and self._order.is_agreed:
            self._leave_to_torch()
        if self._next is not None and not self._cut.waits_for_sync:
            self._carry_out()
        elif self._cut.is_due:
            self._let_torch_cut()


# The buckets of a training that stopped, for the one that goes on with it.

logger = logging.getLogger(__name__)

NOTHING = 0
"""The vote of a rank that has loaded nothing."""


class KeptLayout:
    """What a checkpoint holds of the buckets: numbers that are rounded together, or summed up in
    some order, depend on them.

    A new wrapper does not know the order in which gradients become ready, so its first buckets
    would be others.
    """

    def __init__(self, tunable: TunableReducer, order: ReadyOrder) -> None:
        self._tunable = tunable
        self._order = order
        self._loaded: Mapping[str, Any] = {}
        self._is_over = False

    def state_dict(self) -> dict[str, Any]:
        """Return plain values: the tensors' names in the order in which gradients become ready
        (empty: it was not seen), whether the next step's buckets are cut in it, what the model was
        wrapped with and the configuration in force. While a tuning chooses that, it is none of the
        training's own.
        """
        tunable = self._tunable
        now = tunable.layout_to_come.configuration
        is_own = not tunable.is_attached and not now.algorithm
        return {
            "order": [tunable.tensors[index].name for index in self._order.learned],
            "is_cut": tunable.is_settled,
            "default": tunable.default.to_json(),
            "configuration": (now if is_own else tunable.default).to_json(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what :meth:`state_dict` gave. It is taken up before the first step, if all
        ranks have loaded the same.
        """
        self._loaded = state

    def take_up(
        self,
        group: Group,
        device: torch.device,
        begin_phase: Callable[[Group, torch.device], None],
    ) -> Layout | None:
        """Train with the buckets that were loaded, if any were. Called before the first step's
        forward pass: all ranks that have loaded some are together there.

        Args:
            begin_phase: has the algorithm begin the phase that it has loaded, if all ranks have:
                else that pass would send the buffers that each rank has of its own.

        Returns:
            The layout to put in force now; None: that of the wrapper.
        """
        if not self._loaded or not self.is_the_same(group, device):
            return None
        begin_phase(group, device)
        state, tunable = self._loaded, self._tunable
        indices = {spec.name: index for index, spec in enumerate(tunable.tensors)}
        order = [indices[name] for name in state["order"] if name in indices]
        if order and len(order) != len(indices):
            self._warn("the checkpoint's buckets do not hold the model's tensors")
            return None
        if order and tunable.offer.in_ready_order:
            tunable.cut_in(order, state["is_cut"])
        asked, default = (Configuration.from_json(state[k]) for k in ("configuration", "default"))
        # What the script, a tuning or a file sets now goes before.
        is_free = not (tunable.is_recut_due or tunable.is_attached)
        if not is_free or not default == tunable.default != asked:
            return None
        return Reconfiguration(tunable, asked, group, device).conclude()

    def is_the_same(self, group: Group, device: torch.device) -> bool:
        """Whether all ranks have loaded the same, which they are asked once: where the first bucket
        of a step is full, on all of them, those that have loaded nothing say so, as others may wait
        for them."""
        if self._is_over:
            return False
        self._is_over = True
        vote = digest_of(self._loaded) if self._loaded else NOTHING
        votes = Vote(vote, group, device).values()
        if any(votes) and len(set(votes)) > 1:
            self._warn("not all ranks have loaded the same state of the algorithm")
        return len(set(votes)) == 1

    def _warn(self, why: str) -> None:
        if self._tunable.communicator.rank == 0:
            logger.warning("%s; the buckets are cut as for a new training", why)
