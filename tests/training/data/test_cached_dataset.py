"""Each sample is loaded once, by whatever process; what cannot be kept is loaded again."""

from __future__ import annotations

import multiprocessing
import os
import time
import uuid
from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from bagua_training.data import CachedDataset, CacheLoader, log_store, node, store
from tests.ranks import RankPool
from tests.training.data.servers import has_redis, redis_server

pytestmark = pytest.mark.slow

LENGTH = 60
needs_redis = pytest.mark.skipif(not has_redis(), reason="no Redis")
BACKENDS = ["memory", "disk", pytest.param("redis", marks=needs_redis)]


class Squares(Dataset[torch.Tensor]):
    """Counts how often this process loaded each sample."""

    def __init__(self) -> None:
        self.loaded: Counter[int] = Counter()

    def __getitem__(self, index: int) -> torch.Tensor:
        self.loaded[index] += 1
        return torch.full((3,), float(index * index))

    def __len__(self) -> int:
        return LENGTH


@pytest.fixture(params=BACKENDS)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    """The arguments for a cache that has nothing yet."""
    options = {"backend": request.param, "dataset_name": uuid.uuid4().hex}
    return options | ({"folder": str(tmp_path)} if request.param == "disk" else {})


def test_a_sample_is_loaded_once_and_stays_the_same(place: dict[str, Any]) -> None:
    squares = Squares()
    cached = CachedDataset(squares, **place)
    for _ in range(3):
        for index in range(LENGTH):
            assert torch.equal(cached[index], torch.full((3,), float(index * index)))
    assert len(cached) == LENGTH
    assert set(squares.loaded.values()) == {1}
    assert cached.cache_loader.statistics == (2 * LENGTH, LENGTH)
    assert cached.cache_loader.statistics.hit_rate == pytest.approx(2 / 3)
    cached[0][:] = -1  # A copy: the training may change what it is given.
    assert cached[0].eq(0).all()


def test_names_and_versions_do_not_mix(place: dict[str, Any]) -> None:
    place |= {"dataset_name": "a/1"}
    one, two, three = (
        CacheLoader(**place | other)
        for other in ({"version": uuid.uuid4().hex}, {"dataset_name": "a"}, {"version": "2"})
    )
    assert [loader.get("1/2", lambda _, n=n: n) for n, loader in enumerate((one, two, three))] == [
        0,
        1,
        2,
    ]
    one.store.clear()


@pytest.mark.parametrize("persistent", [False, True])
def test_workers_share_what_they_loaded(place: dict[str, Any], persistent: bool) -> None:
    cached = CachedDataset(Squares(), **place, writer_buffer_size=1 if persistent else 20)
    loader = DataLoader(
        cached,
        batch_size=5,
        shuffle=True,
        num_workers=2,
        persistent_workers=persistent,
        multiprocessing_context="fork",
    )
    for epoch in range(3):
        seen = torch.cat([batch[:, 0] for batch in loader]).sqrt().long()
        assert seen.sort().values.tolist() == list(range(LENGTH))
        assert cached.cache_loader.statistics == (epoch * LENGTH, LENGTH)


def test_workers_find_what_was_loaded_before_they_started(place: dict[str, Any]) -> None:
    cached = CachedDataset(Squares(), **place)
    for index in range(LENGTH // 2):
        cached[index]  # The last ten are not written by then.
    loader = DataLoader(cached, num_workers=1, multiprocessing_context="forkserver")
    assert len(list(loader)) == LENGTH
    assert cached.cache_loader.statistics == (LENGTH // 2, LENGTH)
    assert torch.equal(cached[LENGTH - 1], torch.full((3,), float((LENGTH - 1) ** 2)))
    assert not cached.dataset.loaded[LENGTH - 1]


def _epochs(place: dict[str, Any]) -> list[tuple[int, int]]:
    # Ranks of a test are daemons; those of a job are not, and have workers.
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    cached = CachedDataset(Squares(), **place)
    sampler = DistributedSampler(cached)
    loader = DataLoader(
        cached, batch_size=5, sampler=sampler, num_workers=2, multiprocessing_context="fork"
    )
    found = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        list(loader)
        torch.distributed.barrier()
        found.append(tuple(cached.cache_loader.statistics))
    return found


def test_ranks_share_what_their_workers_loaded(two_ranks: RankPool, place: dict[str, Any]) -> None:
    each = LENGTH // 2
    assert two_ranks.run(_epochs, place) == [[(0, each), (each, each)]] * 2


def _two_nodes(backend: str, name: str) -> int:
    loader = CacheLoader(backend, name)
    rank = torch.distributed.get_rank()
    loader.get(rank, lambda key: key)
    torch.distributed.barrier()
    for key in range(4):
        loader.get(key, lambda key: key)
    return loader.statistics.hits


@pytest.mark.parametrize(
    ("backend", "fewest"), [("memory", 2), pytest.param("redis", 4, marks=needs_redis)]
)
def test_memory_is_shared_inside_a_node_and_redis_by_all(
    four_ranks: RankPool, backend: str, fewest: int
) -> None:
    hits = four_ranks.run(_two_nodes, backend, uuid.uuid4().hex)
    assert all(fewest <= found <= 4 for found in hits)


def _lives(names: list[str]) -> list[int]:
    """Each life makes its cache; all but the process ends with one, the store stays."""
    rank = torch.distributed.get_rank()
    found = []
    for name in names:
        for kept in (node._made, node._places, node._lives, log_store._kept):
            kept.clear()  # type: ignore[attr-defined]
        # Torchrun counts the restarts of each node by itself.
        os.environ["TORCHELASTIC_RESTART_COUNT"] = str(rank)
        loader = CacheLoader("memory", dataset_name=name)
        loader.get(rank, str)
        torch.distributed.barrier()
        assert loader.get(1 - rank, lambda _: "loaded") == str(1 - rank)
        found.append(loader.num_keys())
        torch.distributed.barrier()
    return found


def test_a_life_uses_nothing_of_an_earlier_one(two_ranks: RankPool) -> None:
    assert two_ranks.run(_lives, ["first", "second"]) == [[2, 2]] * 2


def _absent() -> str:
    node._made.clear(), node._lives.clear(), node._places.clear()  # type: ignore[func-returns-value]
    node.WAIT = timedelta(seconds=0.5)
    if torch.distributed.get_rank():
        return ""
    with pytest.raises(RuntimeError) as caught:
        CacheLoader("memory")
    return str(caught.value)


def test_a_rank_that_makes_none_is_named() -> None:
    pool = RankPool([2])  # Of its own: it shortens the wait.
    said, _ = pool.run(_absent)
    pool.close()
    assert said.startswith("rank 1 has not made its CachedDataset")


@pytest.fixture
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "FIRST_PAUSE_SECONDS", 0.0)


@needs_redis
@pytest.mark.usefixtures("no_pauses")
def test_a_server_that_goes_away_costs_loading_only(caplog: pytest.LogCaptureFixture) -> None:
    with redis_server() as server:
        squares = Squares()
        cached = CachedDataset(squares, hosts=[server.host], writer_buffer_size=7)
        for index in range(LENGTH):
            if index == LENGTH // 2:
                server.stop()
            assert cached[index][0] == index * index
            assert len(cached.cache_loader._buffered._pending) < 7
        assert not cached.cache_loader.store.status()
        assert caplog.text.count("cache: it cannot be used") == 1
        server.start()
        for _ in range(2):
            for index in range(LENGTH):
                assert cached[index][0] == index * index
        assert caplog.text.count("cache: it is back") == 1
        assert caplog.text.count("cache: it cannot be used") == 1
        assert max(squares.loaded.values()) == 2  # Once before, once after.


@needs_redis
@pytest.mark.parametrize("policy", ["allkeys-random", "noeviction"])
def test_a_full_server_is_right_whether_it_drops_samples_or_takes_no_more(
    policy: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Redis as it comes drops nothing where ``maxmemory`` is set."""
    with redis_server(capacity=3_000_000, policy=policy) as server:
        loader = CacheLoader(hosts=[server.host])
        for _ in range(2):
            for key in range(LENGTH):
                assert (loader.get(key, lambda key: numpy.full(25_000, key)) == key).all()
        assert 0 < loader.num_keys() < LENGTH
        assert caplog.text.count("is full and drops nothing") == (policy == "noeviction")
        if policy == "noeviction":
            assert loader.statistics.hits == loader.num_keys()
        assert "cannot be used" not in caplog.text


@needs_redis
def test_a_server_that_does_not_answer_is_named(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("bagua_training.data.redis_store.TRIES", 1)
    loader = CacheLoader(hosts=[{"unix_socket_path": f"{tmp_path}/none"}])
    assert f"the Redis server {tmp_path}/none does not answer" in caplog.text
    assert loader.get(1, str) == "1"


@needs_redis
def test_a_store_that_does_not_answer_is_not_asked_for_each_sample(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with redis_server() as server:
        loader = CacheLoader(hosts=[server.host])
        server.stop()
        asked = Counter[str]()
        monkeypatch.setattr(loader.store, "mget", lambda keys: (asked.update(keys), 1 / 0))
        monkeypatch.setattr(store, "FIRST_PAUSE_SECONDS", 60.0)
        for key in range(LENGTH):
            assert loader.get(key, lambda key: key) == key
        assert asked.total() == 1


def test_a_slow_reader_does_not_keep_its_samples_for_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = (CacheLoader("disk", writer_buffer_size=20, folder=tmp_path) for _ in range(2))
    one.get(1, str)
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + store.OLDEST_SECONDS + 1)
    one.get(2, str)
    assert two.get(1, lambda _: "loaded again") == "1"


def test_few_large_samples_are_written_before_they_fill_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "MOST_BYTES", 10_000)
    one, two = (CacheLoader("disk", writer_buffer_size=1000, folder=tmp_path) for _ in range(2))
    for key in range(3):
        one.get(key, lambda key: bytes(6_000))
    loaded: list[int] = []
    for key in range(3):
        two.get(key, lambda key: loaded.append(key) or bytes(6_000))
    assert loaded == [2]  # The first two were written together, and the third is kept back.


def test_samples_are_kept_as_the_functions_of_the_module_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A public project puts its own in the place of Bagua's."""
    from bagua_training.data import cached_dataset

    calls: list[str] = []
    monkeypatch.setattr(
        cached_dataset, "serialize", lambda value: calls.append("out") or repr(value).encode()
    )
    monkeypatch.setattr(
        cached_dataset, "deserialize", lambda kept: calls.append("in") or int(kept.decode())
    )
    loader = CacheLoader("disk", folder=tmp_path)
    assert [loader.get(1, lambda key: 12), loader.get(1, lambda key: 13)] == [12, 12]
    assert calls == ["out", "in"]


class Gone:
    """Pickled by the name of a class that is there no more when it is read."""

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return Gone, ()


def test_what_cannot_be_unpickled_is_loaded_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loader = CacheLoader("disk", folder=tmp_path)
    loader.get(1, lambda _: Gone())
    monkeypatch.delitem(globals(), "Gone")
    assert loader.get(1, str) == "1"
    assert loader.get(1, lambda _: "loaded again") == "1"


KINDS = {
    "bfloat16": torch.ones(3, dtype=torch.bfloat16),
    "channels last": torch.arange(24.0).view(1, 2, 3, 4).to(memory_format=torch.channels_last),
    "conjugate": torch.tensor([1 + 2j]).conj(),
    "empty": torch.empty(0, 4),
    "expanded": torch.ones(1).expand(5),
    "number": torch.tensor(3),
    "sparse": torch.eye(3).to_sparse(),
    "with gradient": torch.ones(2, requires_grad=True),
}


@pytest.mark.parametrize("kind", KINDS)
def test_any_tensor_comes_back(kind: str, tmp_path: Path) -> None:
    tensor, loader = KINDS[kind], CacheLoader("disk", folder=tmp_path)
    loader.get(0, lambda _: tensor)
    found = loader.get(0, lambda _: pytest.fail("it was not kept"))
    assert torch.equal(found.to_dense(), tensor.to_dense())
    assert (found.dtype, found.layout) == (tensor.dtype, tensor.layout)
    assert found.requires_grad == tensor.requires_grad


def test_what_cannot_be_pickled_is_said(tmp_path: Path) -> None:
    loader = CacheLoader("disk", folder=tmp_path)
    with pytest.raises(TypeError, match="what was loaded for 7, a generator, because it cannot be"):
        loader.get(7, lambda key: (each for each in [key]))
    assert loader.get(7, str) == "7"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="only a GPU's driver pins memory")
def test_batches_are_pinned(place: dict[str, Any]) -> None:
    cached = CachedDataset(Squares(), **place)
    for _ in range(2):
        for batch in DataLoader(cached, 5, pin_memory=True):
            assert batch.is_pinned()
    assert cached.cache_loader.statistics == (LENGTH, LENGTH)


def test_two_datasets_of_one_name_are_told_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    one = CachedDataset(Squares(), "disk", folder=tmp_path)
    elsewhere = CachedDataset(Squares(), "disk", folder=tmp_path / "elsewhere")
    assert not caplog.text
    two = CachedDataset(Squares(), "disk", folder=tmp_path)
    assert "give each its own" in caplog.text
    assert len(one) == len(two) == len(elsewhere)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"backend": "mongodb"}, "backend must be memory, disk or redis, not 'mongodb'"),
        ({"backend": "memory", "writer_buffer_size": 0}, "writer_buffer_size must be at least 1"),
    ],
)
def test_what_makes_no_sense_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CacheLoader(**arguments)
