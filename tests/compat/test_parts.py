"""What Bagua scripts import beside communication: checkpoints, helpers, the service's messages."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from flask import Flask
from torch import nn
from werkzeug.serving import make_server

from bagua_compat.service import (
    AutotuneClient,
    AutotuneService,
    BaguaHyperparameter,
    BayesianOptimizer,
    BoolParam,
    TensorDeclaration,
    get_tensor_declaration_bytes,
)
from bagua_compat.torch_api import checkpoint, env, utils
from bagua_compat.torch_api.algorithms.q_adam import QAdamOptimizer
from bagua_compat.torch_api.checkpoint import load_checkpoint, save_checkpoint
from bagua_compat.torch_api.model_parallel.moe import MoE
from tests.compat.scripts import release_module
from tests.ranks import RankPool

pytestmark = pytest.mark.slow


def test_names_that_differ_are_an_error_unless_asked_for(tmp_path: Path) -> None:
    assert load_checkpoint(tmp_path, nn.Linear(3, 2)) == 0, "where there is none"
    save_checkpoint(1, tmp_path, nn.Linear(3, 2))
    with pytest.raises(RuntimeError, match=r"Missing key"):
        load_checkpoint(tmp_path, nn.Sequential(nn.Linear(3, 2)))
    assert load_checkpoint(tmp_path, nn.Sequential(nn.Linear(3, 2)), strict=False) == 1


def test_the_average_weighs_by_time() -> None:
    with mock.patch.object(time, "time") as clock:
        clock.return_value = 100.0
        average = utils.StatisticalAverage()
        for value, seconds in ((1.0, 1.0), (3.0, 1.0), (8.0, 2.0)):
            clock.return_value += seconds
            average.record(value)
        assert average.total_recording_time() == 4
        assert average.get(2) == 8
        assert average.get(4) == (1 + 3 + 8 + 8) / 4
        clock.return_value += 1
        assert average.get(0.5) == 8


def test_tensors_are_joined_and_parted() -> None:
    tensors = [torch.ones(2, 2), torch.full((3,), 2.0)]
    utils.apply_flattened_call(tensors, lambda flat, factor: flat.mul_(factor), [3])
    assert tensors[0].tolist() == [[3, 3], [3, 3]]
    assert tensors[1].tolist() == [6, 6, 6]
    flat = utils.flatten(tensors)
    assert utils.check_contiguous(utils.unflatten(flat, tensors))
    assert not utils.check_contiguous([*tensors[::-1], flat])
    assert [utils.to_bagua_datatype(t) for t in (torch.float32, torch.int64)] == ["f32", "i64"]
    with pytest.raises(ValueError, match=r"torch\.bfloat16"):
        utils.to_bagua_datatype(torch.bfloat16)


def test_the_environment_is_that_of_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GROUP_RANK", "NODE_RANK", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert (env.get_rank(), env.get_local_size(), env.get_node_rank()) == (0, 1, 0)
    for name in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "NODE_RANK"):
        monkeypatch.setenv(name, str(len(name)))
    assert (env.get_rank(), env.get_local_size(), env.get_node_rank()) == (4, 16, 10)
    monkeypatch.delenv("GROUP_RANK")
    assert env.get_node_rank() == 9
    monkeypatch.setenv("BAGUA_IS_OUTPUT_AUTOTUNE_LOG", "0")
    assert not env.get_is_output_autotune_log()


def test_hyperparameters_take_over_what_they_know() -> None:
    tensor = TensorDeclaration(name="a", num_elements=3, dtype="i64")
    found = BaguaHyperparameter().update({"buckets": [[tensor]], "bucket_size": 5, "other": 1})
    assert found.dict() == {
        "buckets": [[tensor]],
        "bucket_size": 5,
        "is_hierarchical_reduce": False,
    }
    assert get_tensor_declaration_bytes(tensor) == 24


@pytest.fixture
def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[AutotuneClient]:
    monkeypatch.setenv("BAGUA_AUTOTUNE_DATABASE", f"sqlite:///{tmp_path}/jobs.db")
    app = AutotuneService(world_size=1, autotune_level=0, warmup_time_s=0.01).setup_app(
        Flask("users")
    )
    app.add_url_rule("/own", view_func=lambda: "their own")
    server = make_server("127.0.0.1", 0, app, threaded=True)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield AutotuneClient("127.0.0.1", server.server_port)
    server.shutdown()
    thread.join()


def test_the_service_answers_beside_what_the_application_has(client: AutotuneClient) -> None:
    assert client.health_check()
    other = client.session.get(f"http://{client.autotune_service_addr}/own")
    assert other.text == "their own"
    tensor = TensorDeclaration(name="a", num_elements=3, dtype="f32")
    hyper = client.register_tensors("model", [tensor]).json()["recommended_hyperparameters"]
    assert hyper["buckets"] == [[tensor]]
    assert client.report_tensor_execution_order([]).status_code == 200
    assert client.report_metrics("none", 0, 1, hyper, 1.0).status_code == 405
    # Of level 0 the default is all that there is to find.
    for iteration in range(100):
        client.report_metrics("model", 0, iteration, hyper, 1.0)
        asked = client.ask_hyperparameters("model", 0, iteration).json()
        assert asked["recommended_hyperparameters"] == hyper
        if asked["is_autotune_completed"]:
            return
    pytest.fail("it was not completed within 100 iterations")


def test_a_service_that_is_not_there() -> None:
    assert not AutotuneClient("127.0.0.1", env.find_free_network_port()).health_check()


def test_the_optimizer_refuses_what_would_spoil_it() -> None:
    optimizer = BayesianOptimizer({"on": BoolParam(True)}, n_initial_points=1)
    assert optimizer.ask()["on"] in (0, 1)
    optimizer.tell({"on": True}, 1.0)
    with pytest.raises(ValueError, match="finite"):
        optimizer.tell({"on": 1}, np.nan)


def test_each_parameter_of_qadam_has_its_state_from_the_beginning() -> None:
    optimizer = QAdamOptimizer(nn.Linear(2, 1).parameters(), warmup_steps=2)
    found = [sorted(state) for state in optimizer.state.values()]
    assert found == [["exp_avg", "exp_avg_sq", "step"]] * 2


def _training_of(has_experts: bool, seed: int) -> tuple[nn.Module, Any, Any]:
    torch.manual_seed(seed)
    layer = MoE(4, nn.Linear(4, 4), num_local_experts=2) if has_experts else nn.Linear(4, 4)
    model = nn.ModuleDict({"first": nn.Linear(4, 4), "layer": layer})
    optimizer = torch.optim.SGD(model.parameters(), 0.1 * seed, momentum=0.9)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, float(seed))
    optimizer.step()
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.1 * seed)


def _carried_over(folder: str, has_experts: bool, is_theirs_first: bool) -> None:
    """A training that one saves and the other loads is the same: of each rank its own experts, all
    else that of the first."""
    theirs = release_module("checkpoint/checkpointing.py")
    writer, reader = (theirs, checkpoint) if is_theirs_first else (checkpoint, theirs)
    rank = dist.get_rank() if has_experts else 0
    saved, loaded = (
        _training_of(has_experts, seed=1 + rank),
        _training_of(has_experts, seed=5 + rank),
    )
    writer.save_checkpoint(12, folder, *saved)
    assert reader.load_checkpoint(folder, *loaded) == 12
    states = [training[0].state_dict() for training in (saved, loaded)]
    compared = [key for key in states[0] if rank == 0 or "expert" in key]
    assert compared
    for key in compared:
        assert torch.equal(states[0][key], states[1][key]), key
    torch.testing.assert_close(loaded[1].state_dict(), saved[1].state_dict(), rtol=0, atol=0)
    assert rank > 0 or saved[2].state_dict() == loaded[2].state_dict()


@pytest.mark.parametrize("is_theirs_first", [True, False], ids=["Bagua's", "ours"])
@pytest.mark.parametrize("has_experts", [False, True], ids=["plain", "experts"])
def test_files_are_bagua_s(
    two_ranks: RankPool, tmp_path: Path, has_experts: bool, is_theirs_first: bool
) -> None:
    two_ranks.run(_carried_over, str(tmp_path), has_experts, is_theirs_first)
