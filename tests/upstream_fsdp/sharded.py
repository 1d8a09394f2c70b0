"""The tests of ``fully_shard``: with torch alone, and with models that we change."""

from __future__ import annotations

from dataclasses import replace

from tests.upstream.runner.subject import Subject
from tests.upstream_fsdp.exceptions import KNOWN, LEFT_OUT
from tests.upstream_fsdp.one_test import prepare, run_test
from tests.upstream_fsdp.suite import names_of_gpu_tests, names_of_tests

CHANGED = "changed"

SUBJECT = Subject(
    title="fully_shard",
    names=names_of_tests,
    world_sizes=(2, 4),
    least_shares={CHANGED: 0.95},
    least_counted={2: 50, 4: 40}.get,
    known=KNOWN,
    left_out=LEFT_OUT,
    prepare=prepare,
    run=run_test,
    changed="changed",
    test_seconds=300.0,
)
NATIVE = replace(
    SUBJECT,
    names=names_of_gpu_tests,
    world_sizes=(2,),
    least_counted={2: 35, 4: 30}.get,
    backend="cpu:gloo,cuda:nccl",  # Some keep what they save on the CPU.
)
