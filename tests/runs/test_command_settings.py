"""``bagua-autotune system`` with arguments, files and presets, on real processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

JOB = Path(__file__).with_name("arguments_job.py")
METRIC = ["--metric", r"step time: ([0-9.]+) ms", "--lower-is-better", "--backend", "gloo"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "tmp").mkdir()
    (tmp_path / "job").mkdir()
    return tmp_path / "job"


def system(folder: Path, options: list[str], *arguments: str, limit_kib: int = 0) -> Any:
    command = [sys.executable, "-S", str(JOB), str(folder), *arguments]
    if limit_kib:
        command = ["bash", "-c", f'ulimit -v {limit_kib}; exec "$0" "$@"', *command]
    return subprocess.run(
        [sys.executable, "-m", "bagua_autotune", "system", *METRIC, *options, "--", *command],
        env={**os.environ, "TMPDIR": str(folder.parent / "tmp")},
        cwd=folder.parent, capture_output=True, text=True, timeout=110, check=False,
    )  # fmt: skip


def runs(folder: Path) -> list[dict[str, Any]]:
    paths = sorted(folder.glob("run-*"), key=lambda path: int(path.name.removeprefix("run-")))
    return [json.loads(path.read_text()) for path in paths]


def test_arguments_that_belong_together_are_found(folder: Path) -> None:
    written = folder.parent / "runs.json"
    done = system(
        folder,
        ["--arg", "--ddp-bucket-size=2500000..160000000:log", "--arg", "--overlap-grad-reduce",
         "--arg", "--overlap-param-gather",
         "--only-with", "--ddp-bucket-size", "--overlap-grad-reduce=on",
         "--only-with", "--overlap-param-gather", "--overlap-grad-reduce=on",
         "--runs", "20", "--output", str(written)],
        "--ddp-bucket-size", "40000000",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout == "", "no variable is to be set"
    last = done.stderr.splitlines()[-1]
    assert last.startswith("run: ")
    assert last.endswith("--ddp-bucket-size 10000000 --overlap-grad-reduce --overlap-param-gather")
    document = json.loads(written.read_text())
    assert document["settings"] == {
        "--ddp-bucket-size": "10000000",
        "--overlap-grad-reduce": "on",
        "--overlap-param-gather": "on",
    }
    assert document["tuned_command"][-4:] == last.split()[-4:]
    assert document["environment"] == {}
    assert "0 of them failed" in done.stderr, "what Megatron refuses is not tried"
    seen = [(run["ddp_bucket_size"], run["overlap_grad_reduce"]) for run in runs(folder)]
    assert {size for size, overlaps in seen if not overlaps} == {40_000_000}


def test_a_file_is_given_as_a_copy_and_kept_if_asked(folder: Path) -> None:
    ds = folder.parent / "ds.json"
    ds.write_text('{"zero": {"fast": false, "other": 5e8}}')
    before = ds.read_bytes()
    kept = folder.parent / "kept"
    done = system(
        folder,
        ["--json", "ds.json:zero.fast=true,false", "--set", "TUNED=1,2", "--runs", "8",
         "--keep", str(kept)],
        "--config=ds.json",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert f"kept: {kept}/ds.json, in the place of ds.json" in done.stderr
    assert done.stderr.splitlines()[-1].endswith(f"--config={kept}/ds.json")
    assert json.loads((kept / "ds.json").read_text()) == {"zero": {"fast": True, "other": 5e8}}
    assert ds.read_bytes() == before
    own, *others = runs(folder)
    assert own["config"] == "ds.json"
    changed = [run for run in others if run["config"] != "ds.json"]
    assert changed
    assert all(run["config_content"]["zero"] == {"fast": True, "other": 5e8} for run in changed)
    assert list((folder.parent / "tmp").iterdir()) == []


def test_without_keep_the_keys_are_named_and_variables_are_set(folder: Path) -> None:
    (folder.parent / "ds.json").write_text("{}")
    done = system(
        folder, ["--json", "ds.json:zero.fast=true,false", "--runs", "6"], "--config", "ds.json"
    )
    assert done.returncode == 0, done.stderr
    assert "in ds.json:zero.fast=true" in done.stderr
    assert done.stdout == ""


def test_lack_of_memory_is_an_outcome_and_a_bound(folder: Path) -> None:
    written = folder.parent / "runs.json"
    done = system(
        folder,
        ["--arg", "--kept-layers=0,2,4,8,16,32", "--takes-memory", "--kept-layers",
         "--set", "TUNED=1,2", "--runs", "16", "--output", str(written)],
        "--kept-layers", "0", limit_kib=2_000_000,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    # 8 layers are 1.6 GB, 16 are 3.2 GB.
    assert done.stderr.splitlines()[-1].endswith("--kept-layers 8"), done.stderr
    assert "ran out of memory: MemoryError" in done.stderr
    short = [run for run in json.loads(written.read_text())["runs"] if run["is_out_of_memory"]]
    assert f", {len(short)} ran out of memory" in done.stderr
    assert 1 <= len(short) <= 3
    sizes = [(int(run["settings"]["--kept-layers"]), run["settings"].get("TUNED")) for run in short]
    for place, (size, other) in enumerate(sizes):
        assert not any(size >= a and other == b for a, b in sizes[:place]), sizes


def test_a_preset_searches_its_settings_and_says_what_it_leaves_out(folder: Path) -> None:
    done = system(
        folder, ["--preset", "nccl-ib", "--only", "NCCL_IB_QPS_PER_CONNECTION", "--runs", "6"]
    )
    assert done.returncode == 0, done.stderr
    assert "left out: NCCL_BUFFSIZE=8388608,16777216: may take more memory" in done.stderr
    assert "searched: NCCL_IB_QPS_PER_CONNECTION\n" in done.stderr
    assert "nothing faster than your settings" in done.stderr


def test_settings_that_all_fail_are_an_error_with_the_last_lines_of_each_kind(
    folder: Path,
) -> None:
    done = system(folder, ["--arg", "--ddp-buket-size=1000000,2000000", "--runs", "8"])
    assert done.returncode == 1
    assert done.stdout == ""
    # The value differs from run to run: the lines are those of one kind.
    assert done.stderr.count("error: unrecognized arguments: --ddp-buket-size ") == 1, done.stderr
    assert done.stderr.count("failed: ended with exit code 2") >= 2
    *_, said = done.stderr.splitlines()
    assert said.startswith(
        "Error: no run with other settings succeeded; the last, --ddp-buket-size="
    )
    assert "nothing faster" not in done.stderr
