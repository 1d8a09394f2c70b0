"""``bagua-autotune simulate --recomputed``: step times by how many blocks recompute their
activations."""

from __future__ import annotations

import json

import click

from bagua_autotune.cli.output import print_table, say, times
from bagua_simulator import Simulator
from bagua_simulator.recomputation import (
    LARGEST_SHARE,
    Block,
    RecomputingSimulator,
    Room,
    replicated,
)
from bagua_wire.knob_kinds import describe_bytes
from bagua_wire.knobs import RECOMPUTED_KNOB


def show_recomputed(
    simulator: Simulator, blocks: int, block_bytes: int, free_bytes: int | None, as_json: bool
) -> None:
    """Print them, and the fewest that there is room for.

    Args:
        blocks: in which the model's forward pass is, alike; by default all are recomputed.
        block_bytes: what each keeps if it is not.
        free_bytes: at the default's peak, of what may be used; None: enough.
    """
    workload = simulator.workload
    each = Block(workload.forward_seconds / blocks, block_bytes)
    enough = blocks * block_bytes if free_bytes is None else free_bytes
    room = Room(0.0, (enough + 1) / LARGEST_SHARE)
    recomputing = RecomputingSimulator(
        replicated(workload, simulator.cluster), [each] * blocks, room
    )
    rows = []
    for count in recomputing.space[RECOMPUTED_KNOB]["values"]:
        configuration = {**recomputing.default, RECOMPUTED_KNOB: count}
        seconds = recomputing.step_seconds(configuration)
        rows.append((count, seconds, recomputing.peak_bytes(configuration)))
    default_seconds = rows[0][1]
    count, seconds, more_bytes = rows[-1]
    if as_json:
        names = "recomputed", "seconds", "more_bytes"
        named = [dict(zip(names, row, strict=True)) for row in rows]
        click.echo(json.dumps({"model": workload.name, "blocks": blocks, "rows": named}, indent=2))
        return
    say(f"{workload.name}: {blocks} blocks, of which each keeps {describe_bytes(block_bytes)}")
    print_table(
        ["recomputed", "ms", "more memory"],
        [[str(n), f"{s * 1e3:.4g}", describe_bytes(more)] for n, s, more in rows],
    )
    bought = ""
    if more_bytes:
        saved_ms = 1e3 * (default_seconds - seconds) / (more_bytes / 2**30)
        bought = f", {saved_ms:.3g} ms for each GiB"
    say(f"best: {count} recomputed, {times(default_seconds / seconds)} over all{bought}")
