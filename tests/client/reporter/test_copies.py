"""What a node keeps of a tuning, and what the next rank 0 gets of it."""

from __future__ import annotations

import base64
import logging
import stat
import zlib
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from bagua_autotune.app import create_app
from bagua_autotune.settings import Settings
from bagua_autotune.store import Store
from bagua_autotune.store.maintenance.retention import delete_training
from bagua_client.communication.topology import Topology
from bagua_client.environment import Environment
from bagua_client.reporter import copies
from bagua_client.reporter.copies import Handover, is_of, pack, unpack
from bagua_client.torch_private import groups
from tests.autotune.support import registration

TENSORS = [{"name": "w", "bytes": 8, "dtype": "torch.float32", "group": "a"}]


@pytest.fixture(autouse=True)
def store(monkeypatch: pytest.MonkeyPatch) -> dist.Store:
    """The ranks' of this test."""
    met_over = dist.HashStore()
    monkeypatch.setattr(groups, "store", lambda: met_over)
    return met_over


def of_rank(
    rank: int, home: Path, monkeypatch: pytest.MonkeyPatch, url: str = "", fresh: bool = False
) -> Handover:
    """Of one of four ranks on two nodes, whose files are in a home of its own."""
    monkeypatch.setenv("XDG_DATA_HOME", str(home))
    communicator: Any = SimpleNamespace(rank=rank, topology=Topology(((0, 1), (2, 3))), name="all")
    return Handover("digits", communicator, Environment(url=url or None, fresh=fresh))


def told(text: str) -> str:
    packed = pack({"tensors": TENSORS, "said": text})
    assert packed is not None
    return packed


def files(home: Path) -> list[Path]:
    return list((home / "bagua-autotune" / "copies").glob("*"))


def test_the_newest_that_a_node_kept_reaches_rank_0(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = told("old"), told("new")
    lost, kept = tmp_path / "lost", tmp_path / "kept"
    of_rank(0, lost, monkeypatch).write(old)
    of_rank(2, kept, monkeypatch).write(new)
    for rank, home in ((0, lost), (1, lost), (2, kept), (3, kept)):
        of_rank(rank, home, monkeypatch).offer()
    taken = of_rank(0, lost, monkeypatch).take()
    assert taken == {"tensors": TENSORS, "said": "new"}
    assert is_of(taken, {"tensors": TENSORS})
    assert not is_of(taken, {"tensors": [{**TENSORS[0], "bytes": 16}]})
    assert not is_of({}, {"tensors": TENSORS})


def test_one_that_begins_afresh_takes_nothing_and_leaves_what_it_finds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_rank(0, tmp_path, monkeypatch).write(told("earlier"))
    afresh = of_rank(0, tmp_path, monkeypatch, fresh=True)
    afresh.offer()
    assert of_rank(0, tmp_path, monkeypatch).take() is None, "nothing was offered"
    of_rank(0, tmp_path, monkeypatch).offer()
    assert afresh.take() is None
    afresh.share({"tensors": TENSORS, "said": "now"})
    of_rank(0, tmp_path, monkeypatch).offer()
    taken = of_rank(0, tmp_path, monkeypatch).take()
    assert taken is not None
    assert taken["said"] == "now"


def test_a_service_elsewhere_outlives_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = of_rank(0, tmp_path, monkeypatch)
    first.write(told("kept"))
    of_rank(0, tmp_path, monkeypatch).offer()
    elsewhere = of_rank(0, tmp_path, monkeypatch, "http://autotune:8123")
    assert (elsewhere.is_needed, elsewhere.is_across) == (False, False)
    assert elsewhere.take() is None


def test_a_file_is_its_users_alone_and_the_newest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = of_rank(2, tmp_path, monkeypatch)
    old, new = told("old"), told("new")
    node.write(new)
    node.write(old)  # it came late
    (file,) = files(tmp_path)
    assert unpack(file.read_bytes())["said"] == "new"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700


def test_there_are_never_more_files_than_jobs_of_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copies, "MOST_FILES", 2)
    node = of_rank(2, tmp_path, monkeypatch)
    folder = tmp_path / "bagua-autotune" / "copies"
    folder.mkdir(parents=True)
    for age in range(5):
        (folder / f"{age}.copy").touch()
    node.write(told("new"))
    assert len(files(tmp_path)) == 2


@pytest.mark.parametrize(
    "content",
    [
        b"no copy",
        b"nan\n" + zlib.compress(b"{}"),
        b"1.0\n" + zlib.compress(b"[]"),
        b"1.0\n" + zlib.compress(b"[" * 100_000),
        b"1.0\n" + zlib.compress(b"{}")[:-3],
        b"1.0\n" + zlib.compress(b" " * (1 << 27)),
    ],
)
def test_what_is_no_copy_is_not_offered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes
) -> None:
    node = of_rank(0, tmp_path, monkeypatch)
    node.write(told("whole"))
    (file,) = files(tmp_path)
    file.write_bytes(content)
    of_rank(0, tmp_path, monkeypatch).offer()
    assert of_rank(0, tmp_path, monkeypatch).take() is None
    # And it does not keep a whole one from being kept.
    node.write(told("whole"))
    assert unpack(file.read_bytes())["said"] == "whole"


def test_what_a_node_offers_may_be_nonsense(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, store: dist.Store
) -> None:
    place = "bagua/copies/all/digits/1"
    store.set(place, base64.b64encode(b"nonsense").decode())
    store.set(f"{place}/at", "5")
    assert of_rank(0, tmp_path, monkeypatch).take() is None


def test_one_that_is_too_large_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(copies, "LARGEST_BYTES", 20)
    node = of_rank(0, tmp_path, monkeypatch)
    with caplog.at_level(logging.INFO):
        assert node.share({"tensors": TENSORS}) is None
        assert node.share({"tensors": TENSORS}) is None
    assert [record.message for record in caplog.records if "too large" in record.message] == [
        "autotune: the tuning's data are too large to be copied to the other nodes, and are lost "
        "with the host of rank 0. A service of its own (BAGUA_AUTOTUNE_URL) would keep them"
    ]


def test_a_disk_that_takes_nothing_is_no_trouble(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bagua-autotune").write_text("a file where a folder should be")
    node = of_rank(2, tmp_path, monkeypatch)
    node.write(told("new"))
    node.offer()
    assert of_rank(0, tmp_path, monkeypatch).take() is None


def test_a_copy_goes_when_its_job_is_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = of_rank(0, tmp_path, monkeypatch)
    with closing(Store(f"sqlite:///{tmp_path / 'a.db'}")) as store:
        service = create_app(Settings(), store).test_client()
        assert service.put("/api/v2/jobs/job", json=registration()).status_code == 201
        node.share(service.get("/api/v2/jobs/job/copy").get_json())
        assert len(files(tmp_path)) == 1
        delete_training(store, "job", force=True)
    assert files(tmp_path) == []
