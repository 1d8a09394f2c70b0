"""How many blocks of one model are recomputed, on one rank: how each is found, watched and
switched, and what is known of all of them together.

A block that keeps its activations computes the same as one that recomputes them; what forbids that
is seen in the first steps. The last blocks are the first to keep theirs: the backward pass begins
with them, so theirs are held for the shortest time, and the last one's are there anyway.

What a block keeps is known of the batches that were seen. A larger batch is recomputed as the
training has said, on this rank alone, as nothing of it travels; and so is another forward pass
before the backward pass than there ever was.
"""

from __future__ import annotations

import random
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch.utils.hooks import RemovableHandle

from bagua_client.configuration import Configuration
from bagua_client.torch_private import checkpointing as torchs
from bagua_client.torch_private.reducer import is_in_backward
from bagua_client.torch_private.wrapper import Unsaved, is_compiled, untraced
from bagua_client.tunable.looks import Observers, seen
from bagua_client.tunable.offer import Limit
from bagua_client.tunable.passes import (
    Passes,
    is_of_training,
    is_remembered,
    named_tensors,
    tensors_in,
)
from bagua_wire.knobs import ALL_BLOCKS

# Each block: found, watched for what forbids to switch it and for what it would keep, and switched.

ELSEWHERE = "what is saved for the backward pass is kept elsewhere, as in the host's memory"
WHOLE = "the whole model is compiled as one"
VARIES = 0.05
NOT_TRAINED = "none of its inputs requires a gradient, so that torch does not train it"
SUMS = (
    "the gradients of reentrant blocks that are called several times, are given several tensors "
    "with a gradient, or share weights, are summed in another order; use_reentrant=False helps"
)
LEAKS = (
    "what a reentrant block computes besides its output, or a hook in it reads, gets no gradient "
    "where it is recomputed; use_reentrant=False helps"
)
CALLED = "how often a block is called differs from pass to pass"
CHANGES = "blocks change attributes, buffers or frozen weights, twice where they are recomputed"
RANDOM = (
    "blocks draw random numbers that torch does not put back: Python's, NumPy's, or of a generator"
)
SAMPLED = 256
"""Elements of a tensor that are looked at: who writes one of them writes most."""


class Block:
    """One block that is recomputed. It holds the model's modules weakly.

    Args:
        way: how it is recomputed.
        is_compiled: whether the compiler is given it together with what recomputes it.

    Attributes:
        was_seen: whether a forward pass of it was.
        was_measured: whether it was recomputed since it is watched.
        calls: how often it was called for a training in this pass of the model.
        most_calls: how often in any pass that was watched.
        call_bytes: what one call keeps for its backward pass if the block is not recomputed, as
            recomputing it has shown; 0: that is not known.
        hindrance: why it cannot be switched, as its passes have shown; empty: it can.
    """

    def __init__(self, way: torchs.Way, is_compiled: bool) -> None:
        self.is_compiled = is_compiled
        self._is_known = False
        self.was_seen = self.was_measured = False
        self.calls, self.most_calls, self.call_bytes, self.hindrance = 0, 1, 0, ""
        self._least_bytes = sys.maxsize
        self._way = way
        self._handles: list[RemovableHandle] = []
        self._before, self._has_ended = NOTHING, False

    @property
    def module(self) -> torch.nn.Module | None:
        """What is recomputed; None: it is gone."""
        return self._way.block()

    @property
    def kept_bytes(self) -> int:
        """What all of its calls in a pass keep; 0: that is not known."""
        return self.call_bytes * self.most_calls

    @property
    def is_reentrant(self) -> bool:
        return self._way.is_reentrant

    @property
    def is_set_anew(self) -> bool:
        """See Way."""
        return self._way.is_set_anew

    @property
    def draws_again(self) -> bool:
        """Whether its random numbers are the same ones when it is recomputed."""
        return bool(self._way.options.get("preserve_rng_state", True))

    @property
    def buffers(self) -> Sequence[torch.Tensor]:
        module = self._way.block()
        return () if module is None else tuple(module.buffers())

    @property
    def varies(self) -> bool:
        """Whether what it keeps does, by more than an allocator makes of it."""
        return self.call_bytes > (1 + VARIES) * self._least_bytes

    def recompute(self) -> None:
        """Have it recomputed, as the training has said."""
        self._set(self._way.given)

    def keep(self) -> None:
        """Have its activations kept, from the next forward pass on."""
        self._set(self._way.kept)

    def watch(self, allocated_bytes: Callable[[], int] | None, is_known: bool) -> None:
        """Have it recomputed, and see what that takes and what forbids to leave it out, until it is
        switched again. One that is compiled is not watched: it would be compiled anew for that.

        Args:
            allocated_bytes: what is allocated on its device now; None: nobody knows.
            is_known: whether what forbids it is, so that it is not looked for.
        """
        self._is_known = is_known
        given = self._way.given
        self._set(given)
        self.was_measured = False
        if self.is_compiled:
            return
        if callable(given):
            measured = self._measured(allocated_bytes)
            self._way.put(_Watched(given, self._look, self._gives, measured))
        elif (module := self._way.block()) is not None:
            self._watch_module(module, allocated_bytes or (lambda: 0))

    def _look(self, args: Sequence[Any], more: object = ()) -> None:
        """Its forward pass begins.

        Args:
            more: what it is given besides, as by name.
        """
        if not torch.is_grad_enabled():
            return
        self.was_seen = True
        self.calls += 1
        self.most_calls = max(self.calls, self.most_calls)
        if not self._is_known:
            self._find(lambda: self._what_it_is_given(args, more))
            # What its first pass sets once, as the longest sequence seen, any other sets, too.
            now = seen(lambda: _written(self.module, self.is_reentrant), NOTHING)
            self._before = now if self.calls > 1 or self._has_ended else now._replace(values={})

    def _find(self, look: Callable[[], str]) -> None:
        """Look for what forbids to switch it; nothing is switched where that fails."""
        self.hindrance = seen(look, NOT_SEEN) or self.hindrance

    def _what_it_is_given(self, args: Sequence[Any], more: object) -> str:
        if torchs.has_saved_tensor_hooks():
            return ELSEWHERE
        if not self.is_reentrant:
            return ""
        given = {id(each) for each in tensors_in((args, more)) if each.requires_grad}
        if not any(isinstance(each, torch.Tensor) and each.requires_grad for each in args):
            return NOT_TRAINED
        if len(given) > 1 or self.calls > 1:
            return SUMS
        return LEAKS if _is_listened_to(self.module) else ""

    def _gives(self, output: Any) -> None:
        """Its forward pass ends with ``output``."""
        before, self._before, self._has_ended = self._before, NOTHING, True
        if not self._is_known:
            self._find(lambda: self._what_it_did(before, output))

    def _what_it_did(self, before: _Written, output: Any) -> str:
        now = _written(self.module, self.is_reentrant)
        if before.random and before.random != now.random:
            return RANDOM
        if any(now.values.get(key, was) != was for key, was in before.values.items()):
            return CHANGES
        # A reentrant function knows tensors that stand in the output by themselves.
        alone = output if isinstance(output, tuple) else (output,)
        inside = [each for each in alone if not isinstance(each, torch.Tensor)]
        return LEAKS if self.is_reentrant and any(True for _ in tensors_in(inside)) else ""

    def _measured(self, allocated_bytes: Callable[[], int] | None) -> Callable[..., Any]:
        """What calls a function, and knows what that has allocated if it is in a backward pass."""

        def call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            if allocated_bytes is None or not is_in_backward():
                return function(*args, **kwargs)
            before = allocated_bytes()
            try:
                return function(*args, **kwargs)
            finally:  # Torch ends it by an exception once it has all that it needs.
                self._keeps(allocated_bytes() - before)

        return call

    def _keeps(self, size_bytes: int) -> None:
        self.was_measured = True
        self._least_bytes = min(self._least_bytes, size_bytes)
        self.call_bytes = max(self.call_bytes, size_bytes)

    def _watch_module(self, module: torch.nn.Module, allocated_bytes: Callable[[], int]) -> None:
        """Where torch recomputes it by calling the module."""
        before: list[int] = []

        @untraced
        def begins(_: torch.nn.Module, args: Sequence[Any]) -> None:
            if is_in_backward():
                before.append(allocated_bytes())
            else:
                self._look(args)

        @untraced
        def ends(_: torch.nn.Module, __: Any, output: Any) -> None:
            if before:
                self._keeps(allocated_bytes() - before.pop())
            else:
                self._gives(output)

        self._handles = [
            # Before torch's own, in which what is saved is held back already.
            module.register_forward_pre_hook(Unsaved(begins), prepend=True),
            module.register_forward_hook(Unsaved(ends), always_call=True),
        ]

    def _set(self, value: Any) -> None:
        while self._handles:
            self._handles.pop().remove()
        self._way.put(value)


class _Watched(torchs.NotRecomputed):
    """Has a block recomputed as ``given`` does, and watched."""

    def __init__(
        self,
        given: Callable[..., Any],
        look: Callable[[Sequence[Any], object], None],
        gives: Callable[[Any], None],
        measured: Callable[..., Any],
    ) -> None:
        super().__init__(given)
        self._look, self._gives, self._measured = look, gives, measured

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return self.given(function, *args, **kwargs)
        by_name = function.keywords if isinstance(function, partial) else {}
        self._look(args, (kwargs, by_name))
        output = self.given(partial(self._measured, function), *args, **kwargs)
        self._gives(output)
        return output


class _Written(NamedTuple):
    """What a block may write: of what random numbers come, and its own, by where it is."""

    random: list[Any]
    values: dict[Any, Any]


NOTHING = _Written([], {})
OF_DEEPSPEED = ("ds_", "applied_pre_backward_ref_cnt")
"""Attributes in which it counts what it gathers: no block changes these itself."""
NOT_READING = ("torch.", "deepspeed.", "bagua_client.")
"""Hooks from there have others' work, and read nothing of what they see."""


def _written(module: torch.nn.Module | None, with_tensors: bool) -> _Written:
    """What there is now that a block's parts, or Python, would have to put back.

    Args:
        with_tensors: whether it matters which tensors are attributes of the parts.
    """
    # What a user's graph is captured of must not be waited for.
    if module is None or (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
        return NOTHING
    found = _Written([random.getstate()], {})
    if (numpy := sys.modules.get("numpy")) is not None:
        kind, keys, *rest = numpy.random.get_state()
        found.random.append((kind, keys.tobytes(), rest))
    for part in module.modules():
        for name, value in vars(part).items():
            if isinstance(value, torch.Generator):
                found.random.append(value.get_state().tolist())
            elif name == "training" or name.startswith(OF_DEEPSPEED):
                continue
            elif isinstance(value, int | float):
                found.values[id(part), name] = value
            elif isinstance(value, torch.Tensor) and with_tensors:
                found.values[id(part), name] = id(value)
        frozen = [each for each in part._parameters.values() if each is not None]
        for tensor in (*part._buffers.values(), *frozen):
            # What DeepSpeed gathers and lets go of is not written by that.
            if tensor is not None and not (tensor.requires_grad or hasattr(tensor, "ds_id")):
                found.values[id(part), id(tensor)] = seen(partial(_sample, tensor), "")
    return found


def _sample(tensor: torch.Tensor) -> str:
    """Some of its elements, as words: those that are no numbers are equal, too."""
    own = getattr(tensor, "_local_tensor", tensor).detach().flatten()
    return str(own[:: max(1, own.numel() // SAMPLED)].tolist())


def _is_listened_to(module: torch.nn.Module | None) -> bool:
    """Whether something reads what a module's parts compute: hooks that are not torch's, or a
    forward of its own that somebody has given one of them, which knows more than the part."""
    parts = () if module is None else tuple(module.modules())
    hooks = [hook for part in parts for hook in part._forward_hooks.values()]
    own = [(part, vars(part)["forward"]) for part in parts if "forward" in vars(part)]
    return any(not _module_of(hook).startswith(NOT_READING) for hook in hooks) or any(
        getattr(forward, "__self__", None) is not part or forward.__func__.__closure__
        for part, forward in own
    )


def _module_of(function: Any) -> str:
    """The name of the Python module that a function is from."""
    while isinstance(function, partial):
        function = function.func
    return str(getattr(function, "__module__", ""))


def _shares_weights(model: torch.nn.Module, blocks: Sequence[Block]) -> bool:
    """Whether a weight of some blocks is used in another place of the model, too."""
    weights = (each for part in model.modules() for each in part._parameters.values())
    everywhere = Counter(map(id, weights))
    modules = [module for block in blocks if (module := block.module) is not None]
    inside = Counter(id(each) for module in modules for each in module.parameters())
    return any(count > 1 or everywhere[key] > 1 for key, count in inside.items())


def blocks_of(model: torch.nn.Module) -> tuple[list[Block], str]:
    """The blocks of a model that can be switched, in the order in which the model lists them, and
    why none of them can be, or some cannot; empty: nothing is recomputed, or all can be."""
    found: list[Block] = []
    theirs: set[str] = set()
    # Modules of what is compiled, and of blocks, which are recomputed as parts of these.
    compiled, inner = weakref.WeakSet[torch.nn.Module](), weakref.WeakSet[torch.nn.Module]()
    is_offloaded = False
    for module in model.modules():
        is_offloaded |= torchs.keeps_elsewhere(module)
        if is_compiled(module):
            compiled.update(module.modules())
        for way in () if module in inner else torchs.ways_of(module):
            if way.unknown:
                theirs.add(way.unknown)
            else:
                found.append(Block(way, module in compiled))
            inner.update(cast(torch.nn.Module, way.block()).modules())
    if not found:
        names = ", ".join(sorted(theirs))
        return [], f"they are recomputed by {names}, which is not torch's" if theirs else ""
    if is_compiled(model):
        return [], WHOLE
    if is_offloaded:
        return [], ELSEWHERE
    left = f"some are recomputed by {', '.join(sorted(theirs))}" if theirs else ""
    return found, left


# The blocks of one model together.

SHARES_KEPT = (0.25, 0.5, 0.75, 1.0)
"""Of the blocks whose activations fit in the memory, those that are tried as kept, beside none."""
NOT_KNOWN = "what its blocks would keep is known after the first steps"
COMPILED = (
    "blocks are compiled together with what recomputes them, which rounds 16-bit numbers otherwise "
    "than without; BAGUA_AUTOTUNE_ALLOW=recomputed_blocks allows that"
)
NOT_CALLED = "no forward pass for training was seen: the whole model may be compiled as one"
NOT_SEEN = "not every block was recomputed in the first steps"
NO_ROOM = "in the device's memory there is no room for what a block would keep"
NOT_SIZED = "how large a batch is cannot be seen in what the model is called with"
NOT_MEASURED = "blocks are compiled with what recomputes them, so what they would keep is not seen"
WRITES = "blocks write buffers, twice where they are recomputed"
OUTER = "the training recomputes the model as a whole"
BY_ITSELF = (
    "the model's own code recomputes parts of it, as by torch.utils.checkpoint.checkpoint() in a "
    "forward pass, which cannot be switched from outside; checkpoint_wrapper(block) can be"
)
DRAWS = "blocks that are recomputed draw other random numbers then (preserve_rng_state=False)"


class Recomputation:
    """The blocks of one model that the training has made recompute their activations.

    Args:
        model: of this rank; held weakly.
        observers: by way of which its passes are watched.
        allocated_bytes: what is allocated on its device now; None: nobody knows, and memory is no
            limit.
        fits: whether the number of blocks in force does, by what is known of them by now.

    Attributes:
        recomputed: how many of the blocks are, from the first on.
        was_held_back: whether all were, for a larger batch or another pass, since somebody set this
            to False.
        has_varied: whether batches of several sizes were seen.
        handles: of ours among the hooks of the model and its modules.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        observers: Observers,
        allocated_bytes: Callable[[], int] | None = None,
        fits: Callable[[], bool] = lambda: True,
    ) -> None:
        self._observers, self._allocated_bytes, self._fits = observers, allocated_bytes, fits
        nothing: tuple[list[Block], str] = ([], "")
        self._blocks, self._left_alone = seen(lambda: blocks_of(model), nothing)
        self.recomputed = len(self._blocks)
        self.was_held_back = self._is_held_back = self._is_known = self.has_varied = False
        self._is_16_bits = seen(lambda: any(p.element_size() < 4 for p in model.parameters()), True)
        self._hindrance = ""
        self._largest: dict[str, tuple[int, int]] = {}
        self._passes, self._most_open = Passes(), 1
        self._before: list[Any] = []
        self._calls: list[int] = []
        self._is_seen = False
        self.handles: list[RemovableHandle] = []
        if self._blocks or not self._left_alone:
            begins = Unsaved(self._begins)
            self.handles.append(model.register_forward_pre_hook(begins, with_kwargs=True))

    # What may be changed

    def __len__(self) -> int:
        """How many blocks can be switched."""
        return len(self._blocks)

    @property
    def modules(self) -> Sequence[torch.nn.Module]:
        """What is recomputed by default."""
        return [module for block in self._blocks if (module := block.module) is not None]

    def named(self, configuration: Configuration) -> Configuration:
        """The configuration with the number of blocks that it means."""
        if not self._blocks or configuration.recomputed_blocks != ALL_BLOCKS:
            return configuration
        return replace(configuration, recomputed_blocks=len(self._blocks))

    def limit(self, free_bytes: int | None) -> Limit:
        """The row of ``recomputed_blocks`` in an offer.

        Args:
            free_bytes: what may be taken of the device's memory beyond what all blocks recomputed
                take; None: that is not known.
        """
        total, why = len(self._blocks), self._hindrance or self._left_alone
        values: Sequence[int] = ()
        if self._blocks and self._is_known and not self._hindrance:
            least = self._least(free_bytes)
            why = NO_ROOM if least == total else why
            values = [total, *(round(total - (total - least) * share) for share in SHARES_KEPT)]
        return Limit(
            list(dict.fromkeys(values)),
            why and f"recomputed blocks: {why}",
            self._cannot,
            changes=COMPILED if self._rounds else "",
        )

    def _cannot(self, count: int) -> str:
        """Why the training cannot have so many recomputed; empty: it can."""
        total = len(self._blocks)
        if count in (ALL_BLOCKS, total):
            return ""
        if count > total:
            return f"{count} blocks cannot be recomputed, as the training recomputes {total}"
        return self._hindrance or ("" if self._is_known else NOT_KNOWN)

    @property
    def _rounds(self) -> bool:
        """Whether blocks that keep their activations may compute other numbers, by rounding."""
        is_compiled = any(block.is_compiled for block in self._blocks)
        return is_compiled and self._is_16_bits and torchs.rounds_when_compiled()

    def _least(self, free_bytes: int | None) -> int:
        """How few blocks may be recomputed."""
        if free_bytes is None:
            return 0
        counts = range(len(self._blocks) + 1)
        return next(count for count in counts if self.kept_bytes(count) <= max(free_bytes, 0))

    def kept_bytes(self, count: int) -> int:
        """What all blocks keep for their backward passes beyond the first ``count``, at most: as
        much as another block more where it varies, as with experts that rows are sent to."""
        sizes = [block.kept_bytes for block in self._blocks[count:]] if count != ALL_BLOCKS else []
        if sizes and not self.has_varied and any(block.varies for block in self._blocks):
            sizes.append(max(sizes))
        return self._most_open * sum(sizes)

    @property
    def is_known(self) -> bool:
        """Whether it is known what the blocks would keep, or there are none."""
        return self._is_known or not self._blocks

    # Changes

    def put(self, count: int) -> None:
        """Recompute the first ``count`` blocks, from the next forward pass on."""
        count = len(self._blocks) if count == ALL_BLOCKS else count
        if count != self.recomputed:
            self.recomputed = count
            self._switch()

    def conclude(self) -> None:
        """The first steps are over: what the blocks would keep is known, or never will be."""
        if self._is_known:
            return
        self._is_known = True
        if not self._blocks:
            self._let_go()
        elif not self._is_seen:
            self._hindrance = self._hindrance or NOT_CALLED
        else:
            self._hindrance = self._hindrance or self._why_not_known()
            self._switch()

    def _why_not_known(self) -> str:
        if any(not (block.was_seen or block.is_compiled) for block in self._blocks):
            return NOT_SEEN
        if self._most_open > 1 and any(block.is_reentrant for block in self._blocks):
            return SUMS
        if self._allocated_bytes is None:
            return ""
        if not self._largest:
            return NOT_SIZED
        unknown = [block for block in self._blocks if not block.kept_bytes]
        if not unknown:
            return ""
        return NOT_MEASURED if any(block.is_compiled for block in unknown) else NOT_SEEN

    def forget(self) -> None:
        """Leave the model as it was."""
        self.put(ALL_BLOCKS)
        if self._is_seen:
            self._switch()
        self._let_go()
        self._blocks.clear()

    def _let_go(self) -> None:
        while self.handles:
            self.handles.pop().remove()

    def _switch(self) -> None:
        self._is_held_back = False
        for place, block in enumerate(self._blocks):
            if place < self.recomputed:
                block.recompute()
            else:
                block.keep()

    def _watch(self) -> None:
        for block in self._blocks:
            block.watch(self._allocated_bytes, self._is_known)

    # The model's passes

    def _begins(
        self, model: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> None:
        # An evaluation that remembers what it computes takes as much memory as a training.
        if is_of_training(model) or (self._is_known and is_remembered()):
            self._observers.call(self._pass_begins, model, args, kwargs)

    def _pass_begins(
        self, model: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> None:
        if is_in_backward():
            self._hindrance = OUTER
            return
        is_new = self._is_larger(args, kwargs) | self._are_more()
        for block in self._blocks:
            block.calls = 0
        if not self._is_known:
            self._see(model)
            return
        if not self._is_held_back and any(b.is_set_anew for b in self._blocks[self.recomputed :]):
            self._switch()
        if is_new and self.recomputed < len(self._blocks):
            if self._allocated_bytes is not None:
                self.was_held_back = self._is_held_back = True
                self._watch()
        elif self._is_held_back and any(b.was_measured for b in self._blocks) and self._fits():
            self._switch()

    def _are_more(self) -> bool:
        """Whether more passes than ever are open now, with the one that begins."""
        before, self._most_open = self._most_open, max(self._most_open, self._passes.open + 1)
        return self._most_open > before

    def _see(self, model: torch.nn.Module) -> None:
        """One of the first passes begins, and not in the compiler, which would compile it anew for
        what watches it."""
        modules = [] if self._blocks or self._is_seen else list(model.modules())
        if not any(map(is_compiled, modules)):
            runs = Unsaved(self._runs)
            self.handles += [each.register_forward_pre_hook(runs) for each in modules]
        if self._blocks and not self._is_seen:
            self.handles.append(model.register_forward_hook(Unsaved(self._ends)))
            self._watch()
            if _shares_weights(model, [block for block in self._blocks if block.is_reentrant]):
                self._hindrance = SUMS
        self._is_seen = True
        if self._blocks:
            self._is_16_bits |= torch.is_autocast_enabled() or torch.is_autocast_enabled("cpu")
            self._before = self._state()

    def _runs(self, *_: Any) -> None:
        """A module of a model runs, of which no block is known that is recomputed."""
        if not torch.compiler.is_compiling() and is_in_backward():
            self._left_alone = BY_ITSELF

    def _is_larger(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Whether a batch is larger than all before it, by elements or its longest side."""
        is_larger = False
        for name, tensor in named_tensors((args, kwargs)):
            now = (tensor.numel(), max(tensor.shape, default=0))
            most = self._largest.get(name, (0, 0))
            self.has_varied |= name in self._largest and now != most
            if now[0] > most[0] or now[1] > most[1]:
                is_larger = True
                self._largest[name] = (max(now[0], most[0]), max(now[1], most[1]))
        return is_larger

    def _ends(self, model: torch.nn.Module, _: Any, output: Any) -> None:
        if is_of_training(model) and not is_in_backward():
            self._observers.call(self._passes.forward_ends, output)
            if self._before:
                self._observers.call(self._look_back)

    def _look_back(self) -> None:
        """Whether something of the pass that ends forbids to switch the blocks."""
        (_, versions, draws), self._before = self._before, []
        _, now_versions, now_draws = self._state()
        if versions != now_versions:
            self._hindrance = WRITES
        elif draws is not None and not all(map(torch.equal, draws, now_draws)):
            self._hindrance = DRAWS
        calls = [block.calls for block in self._blocks]
        if any(now and was and now != was for now, was in zip(calls, self._calls, strict=False)):
            self._hindrance = self._hindrance or CALLED
        self._calls = calls
        self._hindrance = self._hindrance or next(
            (block.hindrance for block in self._blocks if block.hindrance), ""
        )

    def _state(self) -> list[Any]:
        """The blocks' buffers, which they are and how often they were written, and of what random
        numbers come, if it may not be kept."""
        buffers = [buffer for block in self._blocks for buffer in block.buffers]
        versions = [(id(buffer), buffer._version) for buffer in buffers]
        if all(block.draws_again for block in self._blocks):
            return [buffers, versions, None]
        draws = [torch.get_rng_state()]
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            draws.append(torch.cuda.get_rng_state())
        return [buffers, versions, draws]
