"""Torch's DistributedDataParallel, with methods that it calls at the moments that we need; and what
torch's compiler has to do with a model."""

from __future__ import annotations

import copyreg
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, cast
from weakref import WeakKeyDictionary

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel import distributed as ddp_module

if TYPE_CHECKING:
    from torch._C._distributed_c10d import BuiltinCommHookType

P = ParamSpec("P")
T = TypeVar("T")


def untraced(function: Callable[P, T]) -> Callable[P, T]:
    """``torch.compiler.disable``, without importing the compiler where it is not used."""
    found: Callable[P, T] = cast(Any, torch)._disable_dynamo(function)
    return found


def called_untraced(function: Callable[P, T]) -> Callable[P, T]:
    """``function`` as torch is to call it back, in a backward pass or an optimizer's step: where a
    training has its whole step compiled, torch's compiler follows what these call, and what it
    cannot compile ends the training."""
    return cast(Callable[P, T], partial(_call, function))


@untraced
def _call(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    return function(*args, **kwargs)


class Unsaved:
    """A hook of ours on a module of the training's. Copies and pickles of the module have one of
    the standard library's in its place, which does nothing."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *args: Any) -> Any:
        return self._function(*args)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return getattr, (nullcontext(), "__exit__")


def signature_of_wrapper() -> inspect.Signature:
    """The signature of torch's wrapper, as torch wrote it: somebody may have put a constructor of
    their own, such as ``lambda self, *args, **kwargs``, in the place of torch's. Then the defaults
    are not known, and None."""
    init = DistributedDataParallel.__init__
    if getattr(inspect.unwrap(init), "__globals__", None) is vars(ddp_module):
        return inspect.signature(init)
    names: Sequence[str] = ("self", "module")
    find = getattr(getattr(ddp_module.__spec__, "loader", None), "get_code", None)
    code = None if find is None else find(ddp_module.__name__)
    for place in ("DistributedDataParallel", "__init__"):
        inner = () if code is None else code.co_consts
        code = next((each for each in inner if getattr(each, "co_name", "") == place), None)
    if code is not None:
        names = code.co_varnames[: code.co_argcount]
    kind, none = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.empty
    defaults = [none if name in ("self", "module") else None for name in names]
    return inspect.Signature(
        [
            inspect.Parameter(name, kind, default=default)
            for name, default in zip(names, defaults, strict=True)
        ]
    )


def is_composed(module: object) -> bool:
    """Whether torch's composable ``replicate`` was called on a module; imports nothing."""
    composable = sys.modules.get("torch.distributed._composable.replicate")
    kind = getattr(composable, "DDP", None)
    return kind is not None and isinstance(module, kind)


@dataclass(frozen=True)
class Parameters:
    """The arguments of torch's reducer: the parameters that trained when the model was wrapped."""

    tensors: list[torch.nn.Parameter]
    expect_sparse: list[bool]
    names: dict[int, str]

    def arranged(self, order: Sequence[int]) -> Parameters:
        """These parameters in another order."""
        return Parameters(
            [self.tensors[index] for index in order],
            [self.expect_sparse[index] for index in order],
            {place: self.names[index] for place, index in enumerate(order)},
        )


kept_parameters: WeakKeyDictionary[DistributedDataParallel, Parameters] = WeakKeyDictionary()
"""The parameters of each of our wrappers, as it was made with them."""


@contextmanager
def all_trained(parameters: Iterable[torch.nn.Parameter]) -> Iterator[None]:
    """Make all ``parameters`` require gradients inside this context: torch registers no gradient
    hook on a frozen one."""
    frozen = [parameter for parameter in parameters if not parameter.requires_grad]
    try:
        for parameter in frozen:
            parameter.requires_grad_(True)
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)


def parameters_of(ddp: DistributedDataParallel) -> Parameters:
    """The parameters in the order of the reducer's indices. No public way leads to this list.

    Raises:
        LookupError: some were frozen or unfrozen since the reducer was made, and not all of the
            frozen ones.
    """
    if ddp in kept_parameters:
        return kept_parameters[ddp]
    count = ddp._get_ddp_logging_data().get("num_parameter_tensors")  # type: ignore[no-untyped-call]
    buffers = ddp.modules_buffers, ddp.named_module_buffers
    # Torch leaves out those that were frozen when it made the reducer.
    for thawed in ((), ddp._module_parameters):
        with all_trained(thawed):
            tensors, expect_sparse = ddp._build_params_for_reducer()  # type: ignore[no-untyped-call]
            names = ddp._build_debug_param_to_name_mapping(tensors)  # type: ignore[no-untyped-call]
        ddp.modules_buffers, ddp.named_module_buffers = buffers  # Torch lists them anew.
        if count in (None, len(tensors)):
            return kept_parameters.setdefault(ddp, Parameters(tensors, expect_sparse, names))
    raise LookupError(f"the reducer has {count} parameters, and {len(tensors)} are there now")


def knows_parameters(ddp: DistributedDataParallel) -> bool:
    """Whether it can be told which parameters the reducer has."""
    try:
        parameters_of(ddp)
    except LookupError:
        return False
    return True


class WithMoments(DistributedDataParallel):
    """Torch's class, which calls a method of ours at certain moments of a forward pass.

    Module hooks would be public, but none of them surrounds the broadcast of the buffers.
    """

    _is_followed = False
    """Whether to call these methods; if not, torch.compile traces nothing but torch's own class."""

    def _pre_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        if self._is_followed:
            self._begin_forward()
        return super()._pre_forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]

    def _sync_buffers(self) -> None:
        if self._is_followed:
            self._timed_sync(super()._sync_buffers)
        else:
            super()._sync_buffers()  # type: ignore[no-untyped-call]

    def __del__(self) -> None:
        """Free torch's reducer before its process group.

        If it is the last that holds a gloo group, it waits for gloo's threads without letting go of
        the interpreter, which they may need to free what they reduced last: a training that returns
        right after its last collective never ends (pytorch#56297).
        """
        let_go(self)

    @untraced
    def _begin_forward(self) -> None:
        self._forward_begins()

    @untraced
    def _timed_sync(self, sync: Callable[[], None]) -> None:
        if not self._buffers_stay():
            with self._buffers_travel():
                sync()

    def _build_params_for_reducer(self) -> Any:
        """Keeps what torch builds: weights may be frozen or unfrozen later, but torch's reducer
        goes on with these."""
        built = super()._build_params_for_reducer()  # type: ignore[no-untyped-call]
        names = super()._build_debug_param_to_name_mapping(built[0])  # type: ignore[no-untyped-call]
        tensors, expect_sparse = built
        kept_parameters[self] = Parameters(tensors, expect_sparse, names)
        return built

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """As torch does it: from now on ``hook`` carries the buckets, and our own hook no more."""
        known = len(self._comm_hooks)
        self._hook_comes()
        try:
            super().register_comm_hook(state, hook)
        except Exception:
            # Torch lists a hook before its reducer refuses it as the second one.
            del self._comm_hooks[known:]
            raise
        finally:
            self._hook_came()

    def _register_builtin_comm_hook(self, comm_hook_type: BuiltinCommHookType) -> None:
        self._hook_comes()
        super()._register_builtin_comm_hook(comm_hook_type)  # type: ignore[no-untyped-call]
        self._hook_came()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copy and save the wrapper as its original class: pickle cannot find by name a class that
        ``tune`` made for a user's subclass."""
        made_of = type(self).__dict__.get("_made_of")
        if made_of is None:
            return super().__reduce_ex__(protocol)
        return copyreg._reconstructor, (made_of, object, None), self.__getstate__()  # type: ignore

    # The methods that a subclass overrides. They are called: before anything else in a forward
    # pass; around a broadcast of the module's buffers; before and after the user registers a
    # communication hook.
    def _forward_begins(self) -> None: ...

    def _buffers_stay(self) -> bool:
        return False

    def _buffers_travel(self) -> AbstractContextManager[None]:
        return nullcontext()

    def _hook_comes(self) -> None: ...
    def _hook_came(self) -> None: ...


def before_module(ddp: DistributedDataParallel, inputs: Any, kwargs: Any) -> tuple[Any, Any]:
    """Do what torch's wrapper does before its module's forward pass, for a module that is called
    itself; return the arguments of that pass.
    """
    found: tuple[Any, Any] = ddp._pre_forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]
    return found


def after_module(ddp: DistributedDataParallel, output: Any) -> Any:
    """Do what torch's wrapper does after its module's forward pass; return the output that the
    training is to see.
    """
    return ddp._post_forward(output)  # type: ignore[no-untyped-call]


def let_go(ddp: DistributedDataParallel) -> None:
    """Take torch's reducer away from weights that another wrapper is to train: two would both
    reduce their gradients. The wrapper cannot train after that."""
    vars(ddp).pop("reducer", None)
    vars(ddp)["logger"] = None  # It holds the reducer.


# What torch's compiler has done in this process; it is asked only where the job has loaded it.


def frames_compiled() -> int:
    """The number of Python frames that torch.compile has compiled in this process so far. It counts
    them itself, and has no public way to ask."""
    utils: Any = sys.modules.get("torch._dynamo.utils")
    return 0 if utils is None else int(utils.counters["frames"]["ok"])


def splits_at_buckets() -> bool:
    """Whether torch.compile splits what it compiles inside a DistributedDataParallel, so that its
    buckets can leave during the backward pass.

    Its setting ``torch._dynamo.config.optimize_ddp`` is a boolean, or the name of a way; of these,
    only ``no_optimization`` has "no comm/compute overlap" by its own comment.
    """
    dynamo: Any = sys.modules.get("torch._dynamo")
    return dynamo is None or dynamo.config.optimize_ddp not in (False, "no_optimization")


def is_compiled(module: torch.nn.Module) -> bool:
    """Whether all of ``module`` is given to the compiler: by ``torch.compile(module)``, or in place
    by ``module.compile()``, which leaves no public trace."""
    frames: Any = sys.modules.get("torch._dynamo.eval_frame")
    is_wrapped = frames is not None and isinstance(module, frames.OptimizedModule)
    return is_wrapped or module._compiled_call_impl is not None


def uncompiled(module: torch.nn.Module) -> torch.nn.Module:
    """What ``torch.compile`` was given to make ``module``; itself if it was not made so. There is
    no public way to ask."""
    frames: Any = sys.modules.get("torch._dynamo.eval_frame")
    if frames is None or not isinstance(module, frames.OptimizedModule):
        return module
    return cast(torch.nn.Module, module._orig_mod)
