"""The lines that a good training prints: the start, every tenth trial, the result, its end."""

from __future__ import annotations

import re

GOOD = (
    r"autotune: job \S+ is being tuned, see http://\S+/jobs/\w+(#token=\S+)?",
    r"autotune: to see it from another machine, run there first: ssh -L \S+ \S+",
    # What the model or the machine does not have.
    r"autotune leaves some settings alone: .*",
    r"autotune: trial \d+0 of at most \d+(, best so far .*)?",
    # The result, and how the job is tuned again where its steps change for good.
    r"autotune: .*; \d+ trials?, \d+ steps?, .*",
    r"autotune: a step took \S+ ms after the tuning, and now takes \S+ ms",
    r"autotune: the job is being tuned again \(round \d+\)",
    # A service beside it gives way to the ranks: on a busy machine it may be silent for seconds.
    r"(WARNING )?autotune: the ranks use .* until the service answers again",
    r"autotune: the training ended before its tuning did; .*",
    r"autotune: the model was never tuned; this waited for .*",
    r"autotune: the page ends with the training; to see the job again, on \S+: "
    r"bagua-autotune show \S+, or bagua-autotune serve for its page",
    # Of two torchruns that end together one may wait for the other's store when that is gone.
    r".*/torch/distributed/elastic/agent/server/api\.py:\d+\] Traceback \(most recent call last\):",
)
# Not of other programs, whose paths may hold our name.
OURS = re.compile(r"^autotune|autotune: |bagua_client[:.]|waitress|Traceback|WARNING|ERROR")


def others(lines: list[str]) -> list[str]:
    """Those that are of ours, or say of something that it is wrong, and no good training prints."""
    ours = [line for line in lines if OURS.search(line)]
    # A progress bar does not end its line before ours begins.
    return [line for line in ours if not any(re.search(rf"(^|\])({x})$", line) for x in GOOD)]
