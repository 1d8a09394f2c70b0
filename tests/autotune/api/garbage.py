"""Requests that no client should send: hypothesis strategies for both APIs.

Bodies are nearly right (a field changed), of the right shape with wrong numbers, any JSON, or bytes
that are none: cut off, with NULs, not UTF-8, nested without end.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple
from urllib.parse import quote

from hypothesis import strategies as st

TENSORS = 8  # of the registration; as odd as many, and faster
NUMBERS = [0, -1, 2**31, 2**53 + 1, 2**64, 10**400, 0.5, -0.0, 1e-320, 1e308]
TEXTS = ["", "\0", "\x1b[31m", "\u202e", "\u00e9" * 300, "x" * 5000, "off", "1"]
ODD = st.sampled_from([*NUMBERS, *TEXTS, float("nan"), float("inf"), True, None, [], {}])
JSON = st.recursive(
    ODD | st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=12,
)
SECONDS = st.floats(-1, 2) | st.floats() | JSON
STEP = st.fixed_dictionaries(
    {
        "step": st.integers(-1, 2**54) | JSON,
        "seconds": st.lists(st.floats() | st.integers(), min_size=3, max_size=5) | JSON,
    },
    optional={"compute_seconds": st.lists(st.floats(0, 2), min_size=3, max_size=5) | JSON},
)
OBSERVATIONS = st.fixed_dictionaries(
    {"trial": st.integers(-1, 3) | JSON, "steps": st.lists(STEP, max_size=4)}
)
BUCKET = st.fixed_dictionaries(
    {
        "bytes": st.integers(-1, 2**54) | JSON,
        "started_seconds": SECONDS,
        "ended_seconds": SECONDS,
    }
)
PROFILE = st.fixed_dictionaries(
    {
        "trial": st.integers(-1, 3) | JSON,
        "step": st.integers(-1, 2**54) | JSON,
        "step_seconds": SECONDS,
        "ready_seconds": SECONDS.map(lambda seconds: [seconds] * TENSORS) | JSON,
        "buckets": st.lists(BUCKET, max_size=4) | JSON,
    }
)
EVENT = st.fixed_dictionaries(
    {"kind": st.sampled_from(["switched", "note", "drift", "diverged", "party"]) | JSON},
    optional={
        "trial": st.integers(-1, 3) | JSON,
        "step": st.integers() | JSON,
        "message": st.text() | JSON,
        "seconds": st.floats() | JSON,
    },
)
MODEL = st.sampled_from(["net", "other", "net\0"]) | JSON
DECLARED = st.fixed_dictionaries(
    {
        "name": st.sampled_from(["a", "b", "c\0"]) | JSON,
        "num_elements": st.integers(-1, 2**51) | JSON,
        "dtype": st.sampled_from(["f32", "f16", "u8", "f64"]) | JSON,
    }
)
WORKER = {"model_name": MODEL, "rank": st.integers(-1, 3) | JSON}
ITERATION = st.integers(-1, 400) | JSON
SPAN = st.fixed_dictionaries(
    {
        "trace_id": st.integers(-1, 2**129) | JSON,
        "action": st.text(max_size=8) | JSON,
        "tensor_name": st.sampled_from(["a", "b", "\0"]) | JSON,
        "start_time": st.integers(0, 2**128) | JSON,
        "end_time": st.integers(0, 2**128) | JSON,
    }
)
RAN = st.fixed_dictionaries(
    {"bucket_size": st.integers(-1, 2**60) | JSON, "is_hierarchical_reduce": st.booleans() | JSON}
)
V1 = {
    "register_tensors": st.fixed_dictionaries(
        {"model_name": MODEL, "tensor_list": st.lists(DECLARED, max_size=3) | JSON},
        optional={"whether_to_bucket": st.booleans() | JSON},
    ),
    "ask_hyperparameters": st.fixed_dictionaries({**WORKER, "train_iter": ITERATION}),
    "report_metrics": st.fixed_dictionaries(
        {**WORKER, "train_iter": ITERATION, "hyperparameters": RAN | JSON, "speed": SECONDS}
    ),
    "report_tensor_execution_order": st.fixed_dictionaries(
        {"spans": st.lists(SPAN, max_size=3) | JSON}
    ),
}
TENSOR = {"name": "a", "num_elements": 4, "dtype": "f32"}
RANK = {"model_name": "net", "rank": 0, "train_iter": 100}
TOLD = {"bucket_size": 2**20, "is_hierarchical_reduce": False}
VALID: dict[str, dict[str, Any]] = {
    "observations": {"trial": 0, "steps": [{"step": 9, "seconds": [0.1] * 4}]},
    "profiles": {
        "trial": 0,
        "step": 9,
        "step_seconds": 0.1,
        "ready_seconds": [0.1] * TENSORS,
        "buckets": [{"bytes": 3_200_000, "started_seconds": 0.1, "ended_seconds": 0.2}],
    },
    "events": {"kind": "note", "trial": 0, "step": 9, "message": "", "seconds": None},
    "register_tensors": {"model_name": "net", "tensor_list": [TENSOR], "whether_to_bucket": True},
    "ask_hyperparameters": RANK,
    "report_metrics": {**RANK, "hyperparameters": TOLD, "speed": 1.5},
    "report_tensor_execution_order": {
        "spans": [{"trace_id": 1, "action": "", "tensor_name": "a", "start_time": 1, "end_time": 2}]
    },
}
READ = ("", "/trials", "/observations", "/profiles", "/events", "/overview", "/curve", "/buckets")
FILES = ("/trials.csv", "/export.json")
IDS = st.sampled_from(["job", "new", "nobody", "a%00", "%ff", "..", "a b", "x" * 65, ""])


class Request(NamedTuple):
    """One that may be sent as it is."""

    method: str
    path: str
    body: bytes = b""


def sent(message: Any) -> bytes:
    """As JSON, with NaN and lone surrogates where they are."""
    return json.dumps(message).encode()


def changed(valid: dict[str, Any]) -> st.SearchStrategy[bytes]:
    """A message of which one field, or one part of it, is something else, is missing or is new."""

    def change(parts: tuple[str, Any, str]) -> bytes:
        field, value, how = parts
        rest = {name: kept for name, kept in valid.items() if name != field}
        held = valid[field]
        if how == "missing":
            return sent(rest)
        if how == "inside" and isinstance(held, dict) and held:
            return sent({**rest, field: {**held, next(iter(held)): value}})
        if how == "inside" and isinstance(held, list) and isinstance(held[0], dict):
            return sent({**rest, field: [{**held[0], next(iter(held[0])): value}]})
        if how == "inside" and isinstance(held, list):
            return sent({**rest, field: [*held, value]})
        return sent({**valid, ("new" if how == "new" else field): value})

    ways = st.sampled_from(["missing", "inside", "new", "whole", "whole"])
    odd = st.tuples(st.sampled_from(sorted(valid)), JSON, ways).map(change)
    return st.integers(0, 3).flatmap(lambda n: odd if n else st.just(sent(valid)))


def broken(whole: st.SearchStrategy[bytes]) -> st.SearchStrategy[bytes]:
    """The same, cut off, with a wrong byte somewhere, or something that is not JSON at all."""
    cut = st.tuples(whole, st.floats(0, 1)).map(lambda t: t[0][: int(len(t[0]) * t[1])])
    wrong = st.tuples(whole, st.floats(0, 1), st.sampled_from([b"\0", b"\xff", b"\xed\xa0\x80"]))
    spoilt = wrong.map(lambda t: t[0][: int(len(t[0]) * t[1])] + t[2] + t[0])
    deep = st.sampled_from([b"[" * 100_000, b'{"a":' * 50_000, b"[" * 300 + b"]" * 300])
    ways = [cut, spoilt, st.binary(max_size=50) | deep]
    return st.integers(0, 9).flatmap(lambda n: ways[n] if n < len(ways) else whole)


def requests(registration: dict[str, Any]) -> st.SearchStrategy[Request]:
    """Any request of either API; the registration is a valid one, of ``TENSORS`` tensors."""

    def post(path: str, kind: str, odd: st.SearchStrategy[Any]) -> st.SearchStrategy[Request]:
        nearly, other = changed(VALID[kind]), (odd | JSON).map(sent)
        bodies = broken(st.integers(0, 2).flatmap(lambda n: nearly if n else other))
        return bodies.map(lambda body: Request("POST", path, body))

    reports = {"observations": OBSERVATIONS, "profiles": PROFILE, "events": EVENT}
    registered = broken(changed(registration) | JSON.map(sent))
    puts = st.tuples(IDS, registered).map(
        lambda t: Request("PUT", f"/api/v2/jobs/{quote(t[0], safe='%')}", t[1])
    )
    query = st.sampled_from(["", "?trial=0", "?trial=-1", "?trial=%00", "?limit=0", "?name=%00"])
    gets = st.tuples(IDS, st.sampled_from([*READ, *FILES]), query).map(
        lambda t: Request("GET", f"/api/v2/jobs/{quote(t[0], safe='%')}{t[1]}{t[2]}")
    )
    return st.one_of(
        puts,
        *(post(f"/api/v2/jobs/job/{kind}", kind, odd) for kind, odd in reports.items()),
        *(post(f"/api/v1/{kind}", kind, odd) for kind, odd in V1.items()),
        gets,
    )
