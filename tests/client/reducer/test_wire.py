"""Buckets that travel in parts, and in 16 bits."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from bagua_client import Configuration, DistributedDataParallel
from bagua_client.agent.job import describe_job
from bagua_client.environment import Environment
from bagua_client.integrations.distributed_data_parallel import tunable_of
from bagua_client.reducer import carrier
from tests.ranks import RankPool

WIDTH = 48
PART_BYTES = 1024
"""Of a bucket of 9 KiB and another of 192 B, with whatever padding."""
WAYS = [Configuration(1, hierarchical) for hierarchical in ("off", "leaders", "shards")]
# Of a number of 8 bits (bfloat16), and of 11 (float16): a sum of four is rounded four times, and
# once before.
ROUNDING = {"bf16": 5 * 2**-8, "fp16": 5 * 2**-11}


def _gradients(configuration: Configuration, scale: float) -> list[torch.Tensor]:
    """Of a layer whose gradient on this rank is known, after a step under ``configuration``."""
    model = DistributedDataParallel(torch.nn.Linear(WIDTH, WIDTH))
    assert model.reconfigure(configuration)
    with mock.patch.object(carrier, "SMALLEST_PART_BYTES", PART_BYTES):
        for _ in range(2):
            model.zero_grad()
            (model(_inputs(dist.get_rank())) * scale).sum().backward()
    return [
        parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None
    ]


def _inputs(rank: int) -> torch.Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(rank))


@pytest.mark.parametrize(
    ("way", "precision", "channels"),
    [(WAYS[0], "bf16", 1), (WAYS[0], "fp16", 8), (WAYS[1], "fp16", 1), (WAYS[2], "bf16", 8)],
    ids=str,
)
def test_gradients_travel_in_16_bits(
    four_ranks: RankPool, way: Configuration, precision: str, channels: int
) -> None:
    told = replace(way, wire_precision=precision, channels=channels)
    # Sums that float16 could not hold, of numbers that it can.
    found = four_ranks.run(_gradients, told, 10_000.0)
    ranks = [_inputs(rank).sum(0) * 10_000.0 for rank in range(4)]
    expected = torch.stack(ranks).mean(0).expand(WIDTH, WIDTH)
    summands = torch.stack(ranks).abs().mean(0)
    for weight, bias in found:
        assert weight.dtype == bias.dtype == torch.float32
        assert torch.equal(weight, found[0][0])
        assert torch.equal(bias, found[0][1])
        assert ((weight - expected).abs() <= ROUNDING[precision] * summands).all()
        assert not torch.equal(weight, expected)
        assert bias.tolist() == pytest.approx([30_000.0] * WIDTH, rel=ROUNDING[precision])


def _parts(configuration: Configuration) -> tuple[list[tuple[int, int]], list[float]]:
    """Channel and number of elements of what travels in one step, and the gradients' sums."""
    torch.manual_seed(0)
    model = DistributedDataParallel(
        torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(3)))
    )
    assert model.reconfigure(configuration)
    sent: list[tuple[int, int]] = []
    carry = carrier.Carrier._pipeline

    def pipeline(travel: carrier.Carrier, device: torch.device, channel: int) -> object:
        found = carry(travel, device, channel)
        start = found.start

        def started(flat: torch.Tensor, *others: object) -> object:
            sent.append((channel, flat.numel()))
            return start(flat, *others)  # type: ignore[arg-type]

        return mock.Mock(wraps=found, start=started)

    with mock.patch.object(carrier, "SMALLEST_PART_BYTES", PART_BYTES):
        model(_inputs(dist.get_rank())).sum().backward()
        model.zero_grad()
        with mock.patch.object(carrier.Carrier, "_pipeline", pipeline):
            model(_inputs(dist.get_rank())).sum().backward()
    return sent, [float(p.grad.sum()) for p in model.parameters() if p.grad is not None]


def test_a_bucket_travels_in_parts_dealt_over_the_channels(two_ranks: RankPool) -> None:
    """Also one of a single tensor; a small bucket goes whole on the channel that is next."""
    (sent, sums), (others_sent, others_sums) = two_ranks.run(_parts, Configuration(1, channels=4))
    _, expected = two_ranks.run(_parts, Configuration(1))[0]
    assert sent == others_sent
    # Three times a bias, and a weight.
    assert sorted(size for _, size in sent) == [48] * 3 + [576] * 12
    turns = [channel for channel, _ in sent]
    assert turns == [turn % 4 for turn in range(len(sent))]
    assert sums == others_sums == pytest.approx(expected, rel=1e-4)


def _offered(dtype: torch.dtype, has_hook: bool) -> list[str]:
    """Precisions, where bfloat16 is allowed."""
    model = DistributedDataParallel(torch.nn.Linear(WIDTH, WIDTH, dtype=dtype))
    if has_hook:
        model.register_comm_hook(None, default_hooks.allreduce_hook)
    assert model.reconfigure(model.configuration)
    asked = Environment(allowed=frozenset({"bf16"}))
    assert "wire_precision" not in describe_job(tunable_of(model), Environment(), "job")["knobs"]
    offered = describe_job(tunable_of(model), asked, "job")["knobs"].get("wire_precision", {})
    return list(offered.get("values", []))


@pytest.mark.parametrize(
    ("dtype", "has_hook", "offered"),
    [
        (torch.float32, False, ["as_is", "bf16"]),
        (torch.bfloat16, False, []),
        (torch.float32, True, []),
    ],
)
def test_another_precision_is_offered_where_it_is_allowed_and_makes_a_difference(
    two_ranks: RankPool, dtype: torch.dtype, has_hook: bool, offered: list[str]
) -> None:
    assert two_ranks.run(_offered, dtype, has_hook) == [offered] * 2
