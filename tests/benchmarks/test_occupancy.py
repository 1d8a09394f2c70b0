"""The account of where a GPU's time goes in a step."""

from __future__ import annotations

import ast
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.support.cells import occupancy as module
from benchmarks.support.cells.occupancy import Occupancy, Ran, occupancy, of_trace

pytestmark = pytest.mark.slow

KERNELS = Path(__file__).parents[2] / "client/bagua_client/triton_kernels.py"
GEMM, NCCL = "void cutlass::Kernel2<cutlass_80_tensorop>(Params)", "ncclDevKernel_AllGather_RING_LL"
NAMES = [GEMM, "_sum", "_quantise_ranges", "Memcpy DtoD (Device -> Device)", NCCL]


RUNS = st.builds(
    lambda name, begin, length: Ran(name, begin, begin + length),
    st.sampled_from(NAMES),
    st.integers(-5, 30),
    st.integers(0, 12),
)


@given(st.lists(RUNS, max_size=25), st.integers(1, 25))
def test_the_parts_add_up_to_the_window(ran: list[Ran], end: int) -> None:
    # Of whole seconds, of which each is one thing from its begin to its end.
    expected = dict.fromkeys(("compute", "compression", "copies", "exposed", "idle"), 0)
    for second in range(end):
        running = {NAMES.index(each.name) for each in ran if each.begin <= second < each.end}
        kinds = ["compute", "compression", "compression", "copies", "exposed"]
        expected[kinds[min(running)] if running else "idle"] += 1
    found = asdict(occupancy(ran, 0, end))
    nccl = found.pop("nccl_seconds")
    assert found == {f"{kind}_seconds": seconds for kind, seconds in expected.items()}
    assert sum(found.values()) == end
    assert found["exposed_seconds"] <= nccl <= end


def event(name: str, begin: float, seconds: float, category: str = "kernel") -> dict[str, Any]:
    """As torch writes it, in microseconds."""
    return {"name": name, "cat": category, "ts": 1e6 * begin, "dur": 1e6 * seconds, "ph": "X"}


MARKS = [event(f"at::cuda::(anonymous namespace)::{module.MARK}(long)", at, 1) for at in (10, 21)]


def test_a_trace_is_read_between_its_marks(capsys: pytest.CaptureFixture[str]) -> None:
    events = [
        event(GEMM, 2, 7),
        event(GEMM, 12, 4),
        event(NCCL, 15, 3),
        event("Memcpy HtoD (Pageable -> Device)", 18, 1, "gpu_memcpy"),
        event("FSDP::all_gather", 11, 10, "gpu_user_annotation"),
        event("cudaLaunchKernel", 11, 10, "cuda_runtime"),
        {"name": "process_name", "ph": "M", "pid": 0, "args": {"name": "python"}},
    ]
    found = of_trace({"traceEvents": [*events, *MARKS]}, steps=2)
    assert found == Occupancy(2, 0, 0.5, 1, 1.5, 1.5)
    module.show({"ours": asdict(found), "lost": None})
    ours, lost = capsys.readouterr().out.splitlines()[1:]
    assert ours.split() == ["ours", *(f"{1e3 * each:.1f}" for each in (5, 2, 0, 0.5, 1, 1.5, 1.5))]
    assert lost.split() == ["lost", *["not", "known"] * 7]


@pytest.mark.parametrize("events", [[], MARKS[:1]])
def test_without_both_marks_nothing_is_known(events: list[dict[str, Any]]) -> None:
    assert of_trace({"traceEvents": events}, steps=2) is None


def test_all_kernels_of_the_compression_are_known() -> None:
    """Those that are launched: ``name[grid](...)``."""
    calls = [
        each.func for each in ast.walk(ast.parse(KERNELS.read_text())) if isinstance(each, ast.Call)
    ]
    launched = {ast.unparse(each.value) for each in calls if isinstance(each, ast.Subscript)}
    assert launched == module.COMPRESSION
