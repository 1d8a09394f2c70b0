"""Bagua's own optimiser behind a pipe; runs in an environment of Bagua's (see engines.py).

Each line of the input is one JSON object, and each is answered by one line:

    {"integers": {name: [low, high]}, "booleans": [name]}   a new optimiser: {}
    {"told": {name: value}, "score": speed}                 a trial's score, and the next:
                                                            {"asked": {name: value}}
"""

from __future__ import annotations

import json
import sys
from typing import Any

from bagua.service.bayesian_optimizer import (  # type: ignore[import-not-found]
    BayesianOptimizer,
    BoolParam,
    IntParam,
)


def declare(request: dict[str, Any]) -> BayesianOptimizer:
    """As Bagua's AutotuneTaskManager does: everything but the parameters is the default."""
    parameters: dict[str, Any] = {
        name: IntParam(val=low, space_dimension=(low, high))
        for name, (low, high) in request["integers"].items()
    }
    parameters |= {name: BoolParam(False) for name in request["booleans"]}
    return BayesianOptimizer(parameters)


def main() -> None:
    optimizer: Any = None
    for line in sys.stdin:
        request = json.loads(line)
        answer: dict[str, Any] = {}
        if "integers" in request:
            optimizer = declare(request)
        else:
            optimizer.tell(request["told"], request["score"])
            answer["asked"] = {name: int(value) for name, value in optimizer.ask().items()}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
