"""Training loops under Fabric with our strategy, on one rank of two."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from bagua_client.algorithms import QAdamOptimizer
from tests.integrations.strategy import strategy_fits
from tests.integrations.strategy.strategy_fits import TOLERANCE, Fitted, Place, difference
from tests.integrations.trainings import regression


def _fabric(place: Place, **arguments: Any) -> Any:
    ours = importlib.import_module(f"bagua_client.lightning.of_{place.package}")
    package = {"lightning": "lightning.fabric", "pytorch_lightning": "lightning_fabric"}
    fabrics = importlib.import_module(package[place.package])
    strategy = arguments.pop("strategy", None) or ours.BaguaFabricStrategy(**arguments)
    fabric = fabrics.Fabric(accelerator=place.accelerator, devices=2, strategy=strategy)
    fabric.launch()
    return fabric


class _Loop:
    """Fabric's own example.

    Attributes:
        fabric, model, optimizer: set up.
        losses: of this rank.
    """

    def __init__(self, fabric: Any, optimizer: type[torch.optim.Optimizer], seed: int = 0) -> None:
        self.fabric = fabric
        torch.manual_seed(0)
        loader = regression.data(64, shuffle=False)
        torch.manual_seed(seed)
        module = regression.model()
        self.model, self.optimizer = fabric.setup(module, optimizer(module.parameters(), lr=0.01))
        self._loader = fabric.setup_dataloaders(loader)
        self.losses: list[float] = []

    def epoch(self) -> None:
        for inputs, targets in self._loader:
            loss = nn.functional.mse_loss(self.model(inputs), targets)
            self.fabric.backward(loss)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.losses.append(float(loss.detach()))

    def fitted(self) -> Fitted:
        state = self.model.module.state_dict()
        values = {name: value.detach().cpu().clone() for name, value in state.items()}
        return Fitted({**values, "losses": torch.tensor(self.losses[-8:])})


def check_equal(place: Place) -> str:
    """Under its name, losses and weights are those of ``strategy="ddp"``."""
    found = []
    for strategy in ("ddp", "bagua"):
        loop = _Loop(_fabric(place, strategy=strategy), torch.optim.AdamW)
        loop.epoch()
        loop.epoch()
        found.append(loop.fitted())
    largest = difference(*found)
    assert largest <= TOLERANCE
    return f"at most {largest:.1e} from ddp"


def check_qadam(place: Place) -> str:
    """With its optimizer, and only together with it."""
    loop = _Loop(_fabric(place, algorithm="qadam"), QAdamOptimizer)
    loop.epoch()
    assert loop.model._forward_module.algorithm.optimizer is loop.optimizer.optimizer
    errors = []
    for make in (
        lambda: _Loop(_fabric(place, algorithm="qadam"), torch.optim.AdamW),
        lambda: _fabric(place, algorithm="qadam").setup_module(regression.model()),
    ):
        try:
            make()
        except Exception as error:
            errors.append(type(error).__name__)
    assert errors == ["MisconfigurationException", "RuntimeError"]
    return "trains, and refuses others"


def check_resumed(place: Place) -> str:
    """Each rank goes on from its own replica."""
    arguments = {"algorithm": "decentralized", "communication_interval": 5}
    path = f"{place.folder}/fabric.ckpt"
    whole = _Loop(_fabric(place, **arguments), torch.optim.AdamW)
    whole.epoch()
    whole.fabric.save(path, {"model": whole.model, "optimizer": whole.optimizer, "epoch": 1})
    whole.epoch()
    resumed = _Loop(_fabric(place, **arguments), torch.optim.AdamW, seed=5)
    state = {"model": resumed.model, "optimizer": resumed.optimizer, "epoch": 0}
    assert resumed.fabric.load(path, state) == {}
    assert state["epoch"] == 1
    resumed.epoch()
    largest = difference(whole.fitted(), resumed.fitted())
    assert largest <= TOLERANCE
    return f"at most {largest:.1e} from uninterrupted"


def check_paused(place: Place) -> str:
    """A pause makes one model of several, which then train on apart."""
    loop = _Loop(_fabric(place, algorithm="async", sync_interval_ms=1), torch.optim.AdamW)
    loop.epoch()
    rounds = []
    algorithm = loop.model._forward_module.algorithm
    with loop.fabric.strategy.paused(loop.model):
        flat = torch.cat([p.detach().reshape(-1) for p in loop.model.parameters()])
        assert bool((loop.fabric.all_gather(flat) == flat).all())
        rounds.append(algorithm.rounds)
    loop.epoch()
    rounds.append(algorithm.rounds)
    algorithm.abort(loop.model)
    assert rounds[1] > rounds[0]
    return f"{rounds[1] - rounds[0]} rounds after it"


CHECKS: dict[str, Callable[[Place], str]] = {
    **strategy_fits.CHECKS,
    "fabric equals ddp": check_equal,
    "fabric: qadam": check_qadam,
    "fabric: resumed": check_resumed,
    "fabric: paused": check_paused,
}
"""All that is checked of our strategies, by name; on two CPU ranks, or on two GPUs."""


def check(name: str, place: Place) -> str:
    """On each rank."""
    found = CHECKS[name](place)
    dist.barrier()  # What one rank has written, another may still read.
    return found
