"""``bagua-autotune system`` with real processes: variables, arguments, files and presets."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import pytest
from click.testing import CliRunner

from bagua_autotune.cli import main
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

JOB = Path(__file__).with_name("job.py")
METRIC = ["--metric", r"Total img/sec .*: ([0-9.]+)"]
SEARCHED = ["--set", "THREADS=1,2,4,8", "--set", "BUFFERS=1,4,8,16", "--backend", "gloo"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """What the job notes; and beside it all temporary files."""
    (tmp_path / "tmp").mkdir()
    (tmp_path / "job").mkdir()
    return tmp_path / "job"


def start(folder: Path, *options: str, **variables: str) -> subprocess.Popen[str]:
    place = options.index("--") if "--" in options else len(options)
    job = [sys.executable, "-S", str(JOB), str(folder), *options[place + 1 :]]
    return subprocess.Popen(
        [sys.executable, "-m", "bagua_autotune", "system", *options[:place], "--", *job],
        env={**os.environ, "TMPDIR": str(folder.parent / "tmp"), **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(folder: Path, *options: str, **variables: str) -> tuple[int, str, str]:
    """The exit code and both outputs."""
    command = [sys.executable, "-S", str(JOB), str(folder)]
    return invoke(folder, [*options, "--", *command], **variables)


def invoke(folder: Path, arguments: list[str], **variables: str) -> tuple[int, str, str]:
    """In this process: it only starts that of the job."""
    with mock.patch.object(tempfile, "tempdir", str(folder.parent / "tmp")):
        done = CliRunner().invoke(main, ["system", *arguments], env=variables)
    return done.exit_code, done.stdout, done.stderr


def assert_nothing_is_left(folder: Path) -> None:
    noted = [int(path.name.removeprefix("pid-")) for path in folder.glob("pid-*")]
    runs = len(list(folder.glob("run-*")))
    assert len(noted) >= 3 * runs > 0, "each run that is noted has started three"
    assert [pid for pid in noted if psutil.pid_exists(pid)] == []
    assert list((folder.parent / "tmp").iterdir()) == []


def test_the_fastest_settings_come_out_as_lines_for_a_shell(folder: Path) -> None:
    written = folder.parent / "runs.json"
    options = [*METRIC, *SEARCHED, "--timeout", "5", "--runs", "20", "--output", str(written)]
    code, out, err = run(folder, *options)
    assert code == 0, err
    assert out.splitlines() == ["export THREADS=4", "export BUFFERS=8"]
    shell = subprocess.run(
        ["sh", "-c", f"{out}\necho $THREADS $BUFFERS"], capture_output=True, text=True, check=True
    )
    assert shell.stdout == "4 8\n"
    assert "your settings: 1" in err
    assert "failed: ended with exit code 1" in err
    assert "failed: gave no result within 5 s" in err
    document = json.loads(written.read_text())
    assert document["environment"] == {"THREADS": "4", "BUFFERS": "8"}
    assert len(document["runs"]) <= 20
    speedup = document["speedup"]
    assert speedup["low"] < 1.8 < speedup["high"]
    result, price = err.splitlines()[-2:]
    assert result.startswith(f"{speedup['center']:.2f}x (")
    assert price.startswith("spent ")
    assert f" of training at {speedup['center']:.2f}x (" in price
    assert_nothing_is_left(folder)


@pytest.mark.parametrize(
    ("number", "variables"), [(signal.SIGINT, {"STUBBORN": "1"}), (signal.SIGTERM, {})]
)
def test_a_signal_ends_all_and_says_what_was_best(
    folder: Path, number: int, variables: dict[str, str]
) -> None:
    # The third run is fast, the sixth hangs.
    options = [*METRIC, "--set", "THREADS=2,4", "--backend", "gloo", "--", "6"]
    process = start(folder, *options, **variables)
    wait_until((folder / "hangs").exists, "the run that hangs")
    process.send_signal(number)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert out == ""
    assert "interrupted; the best so far, 1.5" in err
    assert "export THREADS=4" in err
    assert_nothing_is_left(folder)


def test_a_job_that_fails_as_it_is_is_an_error_with_its_last_lines(folder: Path) -> None:
    code, out, err = run(folder, *METRIC, *SEARCHED, BUFFERS="16")
    assert (code, out) == (1, "")
    assert "the job fails with your own settings: ended with exit code 1" in err
    assert "these buffers are too large" in err
    assert_nothing_is_left(folder)


def test_a_metric_that_finds_nothing_is_said(folder: Path) -> None:
    code, _, err = run(folder, "--metric", r"loss: ([0-9.]+)", *SEARCHED)
    assert code == 1
    assert "printed nothing that 'loss: ([0-9.]+)' finds" in err


def test_a_job_without_steps_is_told_of_metric(folder: Path) -> None:
    code, _, err = run(folder, *SEARCHED)
    assert code == 1
    assert "no step of a PyTorch optimizer was seen (--metric takes" in err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--job", "  "], "Invalid value for '--job': it holds nothing but blanks"),
        (["--metric", "no group"], "has 0 groups; it needs one"),
        (["--metric", "("], "Invalid value for --metric"),
        (["--set", "THREADS"], "'THREADS' is not NAME=V1,V2,..."),
        (["--runs", "5"], "5 is not in the range x>=6"),
        (["--json", "runs.json"], "--output FILE writes all runs"),
        (["--json", "ds.json:a=1,2"], "the command does not name ds.json"),
        (["--arg", "x=1"], "'x=1' is not --NAME=V1,V2,... or --NAME"),
        (["--set", "A=1,2", "--output", "/none/runs.json"], "there is no folder /none"),
        (["--preset", "deepspeed-zero2"], "--deepspeed_config FILE, --deepspeed FILE"),
        (["--set", "A=1,2", "--only-with", "A", "B=1"], "--only-with B: that is not varied"),
        (["--arg", "--a", "--arg", "--b", "--only-with", "--a", "--b=yes"], "values are off, on"),
    ],
)
def test_bad_options_are_refused_in_words(folder: Path, options: list[str], message: str) -> None:
    done = CliRunner().invoke(main, ["system", *options, "--", str(JOB), str(folder)])
    assert done.exit_code == 2
    assert message in done.stderr
    assert not list(folder.iterdir())


def test_a_command_that_is_not_there_is_said() -> None:
    done = CliRunner().invoke(main, ["system", "--", "no-such-command"])
    assert done.exit_code == 1
    assert "cannot be started: No such file or directory: no-such-command" in done.stderr


def test_nothing_to_search_is_said(folder: Path) -> None:
    code, _, err = run(folder, *METRIC, "--backend", "gloo")
    assert code == 1
    assert "nothing to search: gloo has no variable to tune" in err


ARGUMENTS_JOB = Path(__file__).with_name("arguments_job.py")
STEP_TIME = ["--metric", r"step time: ([0-9.]+) ms", "--lower-is-better", "--backend", "gloo"]


def search(
    folder: Path, options: list[str], *arguments: str, limit_kib: int = 0
) -> tuple[int, str, str]:
    """``run``, of the job with arguments, in the folder's own."""
    command = [sys.executable, "-S", str(ARGUMENTS_JOB), str(folder), *arguments]
    if limit_kib:
        command = ["bash", "-c", f'ulimit -v {limit_kib}; exec "$0" "$@"', *command]
    with contextlib.chdir(folder.parent):
        return invoke(folder, [*STEP_TIME, *options, "--", *command])


def runs(folder: Path) -> list[dict[str, Any]]:
    paths = sorted(folder.glob("run-*"), key=lambda path: int(path.name.removeprefix("run-")))
    return [json.loads(path.read_text()) for path in paths]


def test_arguments_that_belong_together_are_found(folder: Path) -> None:
    written = folder.parent / "runs.json"
    code, out, err = search(
        folder,
        ["--arg", "--ddp-bucket-size=2500000..160000000:log", "--arg", "--overlap-grad-reduce",
         "--arg", "--overlap-param-gather",
         "--only-with", "--ddp-bucket-size", "--overlap-grad-reduce=on",
         "--only-with", "--overlap-param-gather", "--overlap-grad-reduce=on",
         "--runs", "20", "--output", str(written)],
        "--ddp-bucket-size", "40000000",
    )  # fmt: skip
    assert code == 0, err
    assert out == "", "no variable is to be set"
    last = err.splitlines()[-1]
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
    assert "0 of them failed" in err, "what Megatron refuses is not tried"
    seen = [(run["ddp_bucket_size"], run["overlap_grad_reduce"]) for run in runs(folder)]
    assert {size for size, overlaps in seen if not overlaps} == {40_000_000}


def test_a_file_is_given_as_a_copy_and_kept_if_asked(folder: Path) -> None:
    ds = folder.parent / "ds.json"
    ds.write_text('{"zero": {"fast": false, "other": 5e8}}')
    before = ds.read_bytes()
    kept = folder.parent / "kept"
    code, _, err = search(
        folder,
        ["--json", "ds.json:zero.fast=true,false", "--set", "TUNED=1,2", "--runs", "8",
         "--keep", str(kept)],
        "--config=ds.json",
    )  # fmt: skip
    assert code == 0, err
    assert f"kept: {kept}/ds.json, in the place of ds.json" in err
    assert err.splitlines()[-1].endswith(f"--config={kept}/ds.json")
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
    code, out, err = search(
        folder, ["--json", "ds.json:zero.fast=true,false", "--runs", "6"], "--config", "ds.json"
    )
    assert code == 0, err
    assert "in ds.json:zero.fast=true" in err
    assert out == ""


def test_lack_of_memory_is_an_outcome_and_a_bound(folder: Path) -> None:
    written = folder.parent / "runs.json"
    code, _, err = search(
        folder,
        ["--arg", "--kept-layers=0,2,4,8,16,32", "--takes-memory", "--kept-layers",
         "--set", "TUNED=1,2", "--runs", "16", "--output", str(written)],
        "--kept-layers", "0", limit_kib=2_000_000,
    )  # fmt: skip
    assert code == 0, err
    # 8 layers are 1.6 GB, 16 are 3.2 GB.
    assert err.splitlines()[-1].endswith("--kept-layers 8"), err
    assert "ran out of memory: MemoryError" in err
    short = [run for run in json.loads(written.read_text())["runs"] if run["is_out_of_memory"]]
    assert f", {len(short)} ran out of memory" in err
    assert 1 <= len(short) <= 3
    sizes = [(int(run["settings"]["--kept-layers"]), run["settings"].get("TUNED")) for run in short]
    for place, (size, other) in enumerate(sizes):
        assert not any(size >= a and other == b for a, b in sizes[:place]), sizes


def test_a_preset_searches_its_settings_and_says_what_it_leaves_out(folder: Path) -> None:
    code, _, err = search(
        folder, ["--preset", "nccl-ib", "--only", "NCCL_IB_QPS_PER_CONNECTION", "--runs", "6"]
    )
    assert code == 0, err
    assert "left out: NCCL_BUFFSIZE=8388608,16777216: may take more memory" in err
    assert "searched: NCCL_IB_QPS_PER_CONNECTION\n" in err
    assert "nothing faster than your settings" in err


def test_settings_that_all_fail_are_an_error_with_the_last_lines_of_each_kind(folder: Path) -> None:
    code, out, err = search(folder, ["--arg", "--ddp-buket-size=1000000,2000000", "--runs", "8"])
    assert code == 1
    assert out == ""
    # The value differs from run to run: the lines are those of one kind.
    assert err.count("error: unrecognized arguments: --ddp-buket-size ") == 1, err
    assert err.count("failed: ended with exit code 2") >= 2
    *_, said = err.splitlines()
    assert said.startswith(
        "Error: no run with other settings succeeded; the last, --ddp-buket-size="
    )
    assert "nothing faster" not in err
