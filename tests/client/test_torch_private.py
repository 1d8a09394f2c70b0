"""Every private name of torch that the client uses is there, and means what the client thinks."""

from __future__ import annotations

import inspect
import sys
import warnings
from datetime import timedelta
from types import MethodType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from bagua_client import Configuration
from bagua_client import DistributedDataParallel as Ours
from bagua_client.communication.communicator import Communicator
from bagua_client.torch_private import groups as torch_groups
from bagua_client.torch_private import optimizer as torch_optimizer
from bagua_client.torch_private.wrapper import frames_compiled, is_compiled, splits_at_buckets
from tests.ranks import RankPool


def _model() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))


def _step(model: nn.Module) -> None:
    model(torch.ones(2, 8)).sum().backward()


def test_the_methods_that_are_overridden_exist() -> None:
    """What torch's forward pass no longer calls would never be called."""
    called = inspect.getsource(DistributedDataParallel.forward)
    assert "self._pre_forward(" in called
    assert "self._sync_buffers(" in inspect.getsource(DistributedDataParallel._pre_forward)
    for name in ("_register_builtin_comm_hook", "register_comm_hook", "join_hook"):
        assert callable(getattr(DistributedDataParallel, name))


def _timed_steps(static_graph: bool) -> list[int]:
    """The last step that torch's log has times of: after torch's own reducer's steps, after those
    of one that was cut anew."""
    ddp = Ours(_model(), static_graph=static_graph)
    found = []
    for _ in range(2):
        for _ in range(5):
            _step(ddp)
        found.append(ddp._get_ddp_logging_data().get("iteration", 0))
        ddp.reconfigure(Configuration(1))
    return found


def _end_right_after_a_collective() -> None:
    group = dist.new_group()
    ddp = Ours(_model(), process_group=group)
    _step(ddp)
    dist.all_reduce(torch.zeros(2), group=group)
    dist.destroy_process_group(group)


def _end_trainings() -> None:
    usual = sys.getswitchinterval()
    sys.setswitchinterval(60)  # seconds in which no thread of gloo gets the interpreter by itself
    try:
        for _ in range(10):
            _end_right_after_a_collective()
    finally:
        sys.setswitchinterval(usual)


def test_a_training_ends_that_returns_right_after_its_last_collective(two_ranks: RankPool) -> None:
    """Under torch's own class the second or third hangs: pytorch#56297."""
    two_ranks.run(_end_trainings)


@pytest.mark.parametrize("static_graph", [False, True])
def test_torch_times_the_steps_of_its_own_reducer_and_not_those_after_a_recut(
    two_ranks: RankPool, static_graph: bool
) -> None:
    """For which the host would wait for a GPU in each of the first ten."""
    for before, after in two_ranks.run(_timed_steps, static_graph):
        assert before >= 4
        assert after <= 3  # a static graph's first steps


def _groups() -> tuple[timedelta | None, bool, int, bool]:
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=50))
    device = torch.device("cpu")
    before = torch_groups.timeout_of(group, device)
    torch_groups.set_timeout(group, timedelta(seconds=70))
    made = len(torch_groups.pg_names())
    with torch_groups.counting_groups_from(made + 5):
        counted = len(torch_groups.pg_names()) - made
    store = torch_groups.store()
    assert store is not None
    store.set("here", "1")
    works = torch.ones(1)
    dist.all_reduce(works, group=group)
    return before, torch_groups.is_bound_to_device(), counted, store.get("here") == b"1"


def test_groups_timeouts_and_the_store(two_ranks: RankPool) -> None:
    expected = (timedelta(seconds=50), False, 5, True)
    assert two_ranks.run(_groups) == [expected] * 2


def test_what_torch_puts_around_the_step_of_an_optimizer() -> None:
    optimizer: Any = torch.optim.SGD(_model().parameters(), lr=0.1)
    seen: list[str] = []
    for register in (optimizer.register_step_pre_hook, optimizer.register_step_post_hook):
        register(lambda *_: seen.append("hook"))
    assert all(getattr(optimizer, name) for name in torch_optimizer.HOOKS)
    torch_optimizer.unhooked_step(type(optimizer))(optimizer)
    assert not seen
    optimizer.step()
    assert seen == ["hook"] * 2
    torch_optimizer.clear_step_hooks(optimizer)
    optimizer.step()
    assert len(seen) == 2


def test_what_schedulers_look_at() -> None:
    """They warn neither of a step that they did not wrap nor of one that they did not see."""
    optimizer: Any = torch.optim.SGD(_model().parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)

    def step(_: Any) -> None:
        torch_optimizer.mark_as_stepped(optimizer)

    optimizer.step = MethodType(step, optimizer)
    with pytest.warns(UserWarning, match="has been overridden after"):
        scheduler.step()
    torch_optimizer.mark_as_seen_by_schedulers(step)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    assert optimizer.step.__func__ is step
    optimizer.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scheduler.step()
    assert [name for name in vars(optimizer) if torch_optimizer.is_torchs(name)]


def test_every_nccl_of_this_torch_is_known_and_takes_its_options() -> None:
    if not dist.is_nccl_available():
        pytest.skip("this torch is built without NCCL")
    kinds = {name for name in dir(dist) if name.startswith("ProcessGroupNCCL")}
    assert kinds <= set(torch_groups.NCCL_KINDS)
    options = dist.ProcessGroupNCCL.Options()
    options.config.max_ctas = 4
    for name in kinds:
        assert isinstance(options, getattr(dist, name).Options)


GPU = torch.device("cuda", 0)


def _strange_backend() -> tuple[str, str, int, str, int]:
    """One of another library's, for GPUs; on this CPU it is asked for nothing."""

    def create(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
        return dist.ProcessGroupGloo(store, rank, size, timeout)

    if "STRANGE" not in vars(dist.Backend):
        dist.Backend.register_backend("strange", create, devices=["cuda"])
    group = dist.new_group(backend="cpu:gloo,cuda:strange")
    alone = Communicator(group, torch.device("cpu"))
    before = alone.most_channels
    alone.device = GPU
    with pytest.raises(RuntimeError, match="strange"):
        alone.check(Configuration(channels=2))
    unknown = torch_groups.unknown_kind(group, GPU)
    return (
        torch_groups.backend_name(group, GPU),
        alone.obstacle,
        alone.most_channels,
        unknown,
        before,
    )


def test_a_gpu_backend_of_an_unknown_kind_gets_one_channel(two_ranks: RankPool) -> None:
    for name, obstacle, most, unknown, on_cpus in two_ranks.run(_strange_backend):
        assert (name, most, on_cpus) == ("strange", 1, 16)
        assert unknown == "strange (ProcessGroupGloo)"
        assert unknown in obstacle


def _in_detail() -> tuple[str, timedelta | None, list[str]]:
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    try:
        group = dist.new_group(timeout=timedelta(seconds=41))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch_groups.set_timeout(group, timedelta(seconds=42))
        cpu = torch.device("cpu")
        kind = type(torch_groups._backend(group, cpu)).__name__
        return kind, torch_groups.timeout_of(group, cpu), [str(each.message) for each in caught]
    finally:
        dist.set_debug_level(dist.DebugLevel.OFF)


def test_a_backend_is_recognised_behind_the_wrapper_of_torchs_debug_mode(
    two_ranks: RankPool,
) -> None:
    for kind, timeout, warned in two_ranks.run(_in_detail):
        assert kind == "ProcessGroupGloo"
        assert timeout == timedelta(seconds=42)
        assert warned == []


def test_the_compilers_own_count_and_setting_are_there() -> None:
    """Torch changes them; what reads them tells nothing where they are gone."""
    before = frames_compiled()
    stays, in_place = nn.Linear(2, 2), nn.Linear(2, 2)
    in_place.compile(backend="eager")
    made: nn.Module = torch.compile(nn.Sequential(nn.Linear(2, 2)), backend="eager")
    assert [is_compiled(each) for each in (stays, in_place, made)] == [False, True, True]
    made(torch.ones(1, 2))
    assert frames_compiled() > before
    assert splits_at_buckets()
    for off in (False, "no_optimization"):
        with torch._dynamo.config.patch(optimize_ddp=off):
            assert not splits_at_buckets()
    with torch._dynamo.config.patch(optimize_ddp="ddp_optimizer"):
        assert splits_at_buckets()
