"""A store in one file, in memory and on disk, used by several processes."""

from __future__ import annotations

import multiprocessing
import os
import signal
from pathlib import Path

import pytest

from bagua_training.data.log_store import RECORDS, LogStore, SharedFile, disk

pytestmark = pytest.mark.slow

MIB = 2**20
CAPACITY = RECORDS + MIB
_FORK = multiprocessing.get_context("fork")


@pytest.fixture(params=["memory", "disk"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> LogStore:
    if request.param == "memory":
        return LogStore(SharedFile(), CAPACITY)
    return disk(tmp_path / "cache", "digits", "1", CAPACITY)


def test_it_has_what_was_written_last(store: LogStore) -> None:
    store.set("1", b"one")
    store.mset({"2": b"two", "empty": b"", "1": b"another"})
    assert store.mget(["1", "2", "3", "empty"]) == [b"another", b"two", None, b""]
    assert store.num_keys() == 3
    assert store.status()
    store.clear()
    assert store.get("1") is None
    assert store.num_keys() == 0
    store.set("1", b"again")
    assert store.get("1") == b"again"


def test_keys_of_one_hash_are_told_apart(store: LogStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bagua_training.data.log_store.TABLE_ENTRIES", 1)
    values = {str(number): bytes([number]) for number in range(100)}
    store.mset(values)
    assert store.mget(list(values)) == list(values.values())


def test_full_it_keeps_what_it_has(store: LogStore, caplog: pytest.LogCaptureFixture) -> None:
    values = {str(number): bytes([number]) * 100_000 for number in range(30)}
    for key, value in values.items():
        store.set(key, value)
    found = store.mget(list(values))
    assert found == list(values.values())[:10] + [None] * 20
    assert caplog.text.count("cache: full with 10 samples") == 1
    store.set("small", b"fits")
    assert store.get("small") == b"fits"


def _write(store: LogStore, process: int) -> None:
    for number in range(200):
        store.set(f"{process} {number}", f"{process}:{number}".encode())
        store.set(f"common {number}", bytes(1000))


def test_processes_write_at_once(store: LogStore) -> None:
    processes = [_FORK.Process(target=_write, args=(store, number)) for number in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert store.num_keys() == 3 * 200 + 200
    for process in range(3):
        for number in range(200):
            assert store.get(f"{process} {number}") == f"{process}:{number}".encode()


def test_a_sample_loaded_twice_is_kept_once(store: LogStore) -> None:
    for _ in range(2 * MIB // 100_000):
        store.set("1", bytes(100_000))
    store.set("2", b"fits")
    assert store.mget(["1", "2"]) == [bytes(100_000), b"fits"]


def _die_writing(store: LogStore) -> None:
    with store._file.locked():
        os.kill(os.getpid(), signal.SIGKILL)


def test_who_dies_while_writing_locks_nobody_out(store: LogStore) -> None:
    process = _FORK.Process(target=_die_writing, args=(store,))
    process.start()
    process.join()
    store.set("1", b"one")
    assert store.get("1") == b"one"


def test_memory_is_in_no_folder_and_opened_by_its_address() -> None:
    file = SharedFile()
    assert os.fstat(file.descriptor).st_nlink == 0
    store = LogStore(file, CAPACITY)
    store.set("1", b"one")
    other = LogStore(SharedFile(store.address), CAPACITY)
    assert other.get("1") == b"one"
    with pytest.raises(FileNotFoundError):
        SharedFile(store.address + "0")  # The numbers are right, and it is another file.


def test_another_job_finds_what_is_on_disk(tmp_path: Path) -> None:
    disk(tmp_path, "digits", "1", CAPACITY).set("1", b"one")
    assert disk(tmp_path, "digits", "1", CAPACITY).get("1") == b"one"
    assert disk(tmp_path, "letters", "1", CAPACITY).get("1") is None


def test_files_of_older_versions_are_removed(tmp_path: Path) -> None:
    old = disk(tmp_path, "a/b", "1", CAPACITY)
    old.set("1", b"one")
    letters = disk(tmp_path, "a", "1", CAPACITY)
    assert disk(tmp_path, "a/b", "2", CAPACITY).get("1") is None
    assert old.get("1") == b"one"  # It is in use.
    assert len(list(tmp_path.iterdir())) == 2
    assert letters.status()


def test_a_torn_value_on_disk_counts_as_absent(tmp_path: Path) -> None:
    store = disk(tmp_path, "digits", "1", CAPACITY)
    store.mset({"1": b"one" * 100, "2": b"two"})
    (path,) = tmp_path.iterdir()
    content = path.read_bytes()
    path.write_bytes(content.replace(b"one" * 100, b"one" * 50 + bytes(150)))
    store = disk(tmp_path, "digits", "1", CAPACITY)
    assert store.mget(["1", "2"]) == [None, b"two"]
    store.set("1", b"one" * 100)
    assert store.get("1") == b"one" * 100


def test_a_file_that_others_can_write_is_refused(tmp_path: Path) -> None:
    disk(tmp_path, "digits", "1", CAPACITY)
    (path,) = tmp_path.iterdir()
    path.chmod(0o666)
    with pytest.raises(PermissionError, match="can be written by others"):
        disk(tmp_path, "digits", "1", CAPACITY)
