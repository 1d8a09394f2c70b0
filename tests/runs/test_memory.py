"""How a run says that it had no memory left; each line is as the program prints it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from bagua_runs.job import LAST_LINES, kills_of_the_system, lack_of_memory

pytestmark = pytest.mark.slow

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


def test_the_kernels_count_is_a_number() -> None:
    assert kills_of_the_system() >= 0


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
