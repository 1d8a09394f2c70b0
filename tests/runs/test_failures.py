"""How a run says that it had no memory left, each line as the program prints it; and what failed
runs rule out, with a setting that takes memory (m, n) and one that does not (u)."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bagua_runs.job import LAST_LINES, lack_of_memory
from bagua_runs.outcomes import Outcome, Run
from bagua_runs.places import EnvironmentVariable
from bagua_runs.search import Failures, SystemSearch
from bagua_runs.space import SearchSpace, Setting
from bagua_wire.configuration import Configuration

pytestmark = pytest.mark.slow


SIZES = ("1", "2", "4", "8", "16")


def setting(name: str, values: tuple[str, ...], takes_memory: bool) -> Setting:
    return Setting(EnvironmentVariable(name), values, values[0], takes_memory=takes_memory)


M, N = setting("m", SIZES, True), setting("n", SIZES, True)
U = setting("u", ("1", "2", "4"), False)
SPACE = SearchSpace([M, N, U])
SHORT = Outcome(failure="ran out of memory: MemoryError", is_out_of_memory=True)
FITS = Outcome(1.0, 0.0)


def at(m: int, n: int, u: int) -> Configuration:
    return Configuration(m=m, n=n, u=u)


def run(outcome: Outcome, m: int, n: int, u: int) -> Run:
    return Run(1, "search", at(m, n, u), outcome)


def ruled_out(*runs: Run) -> set[Configuration]:
    failures = Failures(runs, SPACE.settings)
    return {candidate for candidate in SPACE.candidates if failures.rules_out(candidate)}


def test_as_much_or_more_with_all_else_equal_is_not_tried() -> None:
    found = ruled_out(run(FITS, 1, 1, 1), run(SHORT, 4, 2, 1))
    assert found == {at(m, n, 1) for m in (4, 8, 16) for n in (2, 4, 8, 16)}


def test_smaller_values_are_tried_again_however_often_larger_ones_failed() -> None:
    """The rule for other failures would blame u=2, which they have in common."""
    found = ruled_out(run(FITS, 1, 1, 1), *(run(SHORT, m, 1, 2) for m in (16, 8, 4)))
    assert at(2, 1, 2) not in found
    assert at(1, 16, 2) not in found
    assert at(4, 1, 1) not in found, "one run at 4 says nothing of other values of u"
    assert {at(8, 1, 1), at(16, 1, 4), at(8, 4, 4)} <= found, "two runs at 8 or below do"


def test_what_fitted_before_is_not_to_blame() -> None:
    runs = [run(FITS, 16, 1, 1), run(SHORT, 16, 8, 2), run(SHORT, 8, 8, 4)]
    found = ruled_out(*runs)
    assert at(16, 1, 2) not in found
    assert at(1, 8, 1) in found


def test_other_failures_say_nothing_of_larger_values() -> None:
    crash = Outcome(failure="ended with exit code 1")
    assert ruled_out(run(FITS, 1, 1, 1), run(crash, 4, 2, 1)) == {at(4, 2, 1)}


def test_without_a_setting_that_takes_memory_it_is_a_failure_as_any() -> None:
    space = SearchSpace([setting("m", SIZES, False), setting("u", ("1", "2", "4"), False)])
    runs = [
        Run(1, "search", Configuration(m=1, u=1), FITS),
        *(Run(2, "search", Configuration(m=4, u=u), SHORT) for u in (1, 2)),
    ]
    failures = Failures(runs, space.settings)
    found = {c for c in space.candidates if failures.rules_out(c)}
    assert found == {Configuration(m=4, u=u) for u in (1, 2, 4)}


@given(st.lists(st.tuples(st.sampled_from(SPACE.candidates), st.booleans())))
def test_bounds_grow_upwards_and_spare_what_fitted(
    outcomes: list[tuple[Configuration, bool]],
) -> None:
    runs = [Run(1, "search", c, FITS if fits else SHORT) for c, fits in outcomes]
    failures = Failures(runs, SPACE.settings)
    failed = {run.configuration for run in runs if run.cost is None}
    fitted = {run.configuration for run in runs} - failed
    for candidate in SPACE.candidates:
        if candidate in failed:
            assert failures.rules_out(candidate)
        elif candidate in fitted:
            assert not failures.rules_out(candidate)
        larger = Configuration({**candidate, "m": 16, "n": 16})
        if failures.rules_out(candidate) and larger not in fitted:
            assert failures.rules_out(larger)


def test_a_search_finds_the_best_below_the_bound_and_wastes_few_runs() -> None:
    """Larger is faster, and more than 8 of both together does not fit."""
    short = []

    def job(changes: Mapping[str, str], timeout_seconds: float) -> Outcome:
        m, n, u = (int(changes.get(name, 1)) for name in "mnu")
        if m * n > 8:
            short.append((m, n, u))
            return SHORT
        cost = math.log(1.0 + 1.0 / m + 0.3 / n + 0.1 * math.log2(u))
        return Outcome(math.exp(cost), cost, seconds=1.0)

    search = SystemSearch(SPACE, job, most_runs=25)
    verdict = search.find()
    reached = dict(verdict.configuration)
    assert reached in [{"m": 8, "n": 1, "u": 1}, {"m": 4, "n": 2, "u": 1}]
    assert len(short) <= 8
    for place, (m, n, u) in enumerate(short):
        before = short[:place]
        assert not any(m >= a and n >= b and u == c for a, b, c in before), short


CUDA = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total"


@pytest.mark.parametrize(
    "line",
    [
        CUDA,
        f"[rank1]: {CUDA}",
        "torch.cuda.OutOfMemoryError: CUDA out of memory.",
        "RuntimeError: CUDA error: out of memory",
        "NCCL WARN Cuda failure 2 'out of memory'",
        "MemoryError",
        "[rank0]: MemoryError: Unable to allocate 8.00 GiB",
        "numpy._core._exceptions._ArrayMemoryError: Unable to allocate 7.45 GiB",
        "RuntimeError: [enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't "
        "allocate memory: you tried to allocate 40 bytes. Error code 12 (Cannot allocate memory)",
        "  what():  std::bad_alloc",
        "OSError: [Errno 12] Cannot allocate memory",
    ],
)
def test_what_programs_print(line: str) -> None:
    lines = ["step 1", line, *["other ranks end"] * 100]
    assert lack_of_memory(lines, 1, 0)
    assert lack_of_memory(lines, None, 0), "a rank that waits for it ends later or never"


@pytest.mark.parametrize(
    "line", ["ValueError: no memory of it", "peak memory 3 GiB", "class GpuMemoryErrors", ""]
)
def test_other_lines_say_nothing(line: str) -> None:
    assert lack_of_memory([line], 1, 0) == ""


def test_what_was_printed_long_before_the_end_was_survived() -> None:
    assert lack_of_memory([CUDA, *["step"] * LAST_LINES], 1, 0) == ""


@pytest.mark.parametrize(
    ("lines", "code"),
    [
        ([], 137),
        ([], -9),
        (["  exitcode  : -9 (pid: 4711)"], 1),
        (["Signal 9 (SIGKILL) received by PID 4711"], 1),
    ],
)
def test_sigkill_is_lack_of_memory_only_if_the_kernel_killed_for_it(
    lines: list[str], code: int
) -> None:
    assert lack_of_memory(lines, code, 1) == "killed by the kernel for lack of memory"
    assert lack_of_memory(lines, code, 0) == ""
    assert lack_of_memory(["done"], 1, 1) == "", "it killed another job's process"


@pytest.mark.parametrize(
    "code", ["bytearray(4 << 40)", "import torch; torch.empty(1 << 40).fill_(1)"]
)
def test_what_real_programs_print(code: str) -> None:
    shell = f"ulimit -v 8000000; exec {sys.executable} -c '{code}'"
    done = subprocess.run(
        ["bash", "-c", shell], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        check=False,
    )  # fmt: skip
    assert lack_of_memory(done.stdout.splitlines(), done.returncode, 0), done.stdout
