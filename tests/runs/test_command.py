"""``bagua-autotune system`` with real processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

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
    process = start(folder, *options, **variables)
    out, err = process.communicate(timeout=100)
    return process.returncode, out, err


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
