"""Trainings by a Trainer with our strategy, on one rank of two; on CPUs, or on GPUs without pytest.

Each check returns what it found, in a few words, or raises.
"""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from bagua_client.algorithms import GlobalAlgorithmRegistry
from tests.integrations.trainings import regression
from tests.integrations.trainings.lightning_modules import (
    Adversaries,
    Partial,
    Regression,
    WithQAdam,
    WithTwoQAdams,
    WithTwoSchedulers,
    of,
)
from tests.upstream.runner import sync_batch_norm

STEPS = 20
TOLERANCE = 1e-6
ALGORITHMS = tuple(GlobalAlgorithmRegistry.available_algorithms("replicated"))
EQUAL: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulation": {"flatten": True, "accumulate_grad_batches": 4, "gradient_clip_val": 0.01},
    "manual": {"kind": Adversaries, "strategy": {"find_unused_parameters": True}},
    "bf16": {"precision": "bf16-mixed", "strategy": {"bucket_cap_mb": 0.001}},
    "sync_batchnorm": {"sync_batchnorm": True},
    "unused": {"kind": Partial, "strategy": {"find_unused_parameters": True}},
}
"""Trainings whose weights must be those of ``strategy="ddp"``."""
RESUMED: dict[str, dict[str, Any]] = {
    "gradient_allreduce": {},
    "bytegrad": {"error_feedback": True},
    "powersgd": {"start_powerSGD_iter": 3},
    "qadam": {},
    "decentralized": {"peer_selection_mode": "shift_one", "communication_interval": 3},
    "low_precision_decentralized": {},
    # Rounds begin at moments that differ from run to run; here those of interludes are left.
    "async": {"sync_interval_ms": 0, "warmup_steps": 5},
    "async, apart": {"sync_interval_ms": 0, "average_on_abort": False},
}
"""Arguments under which each rank has something of its own to keep."""


@dataclass(frozen=True)
class Place:
    """Where a training runs.

    Attributes:
        package: of Lightning's two.
        folder: on a file system that all ranks see.
        accelerator: ``cpu`` or ``gpu``.
    """

    package: str
    folder: str
    accelerator: str = "cpu"

    @property
    def lightning(self) -> Any:
        module = "lightning.pytorch" if self.package == "lightning" else self.package
        return importlib.import_module(module)

    def strategy(self, is_stock: bool = False, **arguments: Any) -> Any:
        if is_stock:
            return self.lightning.strategies.DDPStrategy(**arguments)
        ours = importlib.import_module(f"bagua_client.lightning.of_{self.package}")
        return ours.BaguaStrategy(**arguments)


@dataclass
class Fitted:
    """A training that is over.

    Attributes:
        values: weights, buffers and losses of this rank, by name.
        syncs: how often gradients were communicated, where that was counted.
    """

    values: dict[str, torch.Tensor] = field(default_factory=dict)
    syncs: int = 0


def fit(
    place: Place,
    strategy: Any,
    kind: type[Regression] = Regression,
    resume: str | None = None,
    seed: int = 0,
    callbacks: tuple[Any, ...] = (),
    **options: Any,
) -> Fitted:
    """Train, validate, test and predict; the same data for all seeds."""
    lightning = place.lightning
    logging.getLogger(lightning.__name__).setLevel(logging.ERROR)
    torch.manual_seed(0)
    loaders = regression.data(64), regression.data(16, shuffle=False)
    torch.manual_seed(seed)
    module = of(lightning, kind)
    trainer = lightning.Trainer(
        accelerator=place.accelerator,
        devices=2,
        strategy=strategy,
        callbacks=list(callbacks),
        default_root_dir=place.folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"enable_checkpointing": False, "max_steps": STEPS, "max_epochs": -1, **options},
    )
    with _sync_batch_norm(place, options.get("sync_batchnorm", False)):
        trainer.fit(module, *loaders, ckpt_path=resume)
    # Testing begins with rank 0's weights on all ranks.
    values = {name: value.detach().cpu().clone() for name, value in module.state_dict().items()}
    values["losses"] = torch.tensor(module.losses)
    for state in trainer.strategy.optimizer_state(trainer.optimizers[0])["state"].values():
        for name, value in state.items():
            values[f"{len(values)} {name}"] = torch.as_tensor(value).detach().cpu().clone()
    found = trainer.validate(module, loaders[1], verbose=False)
    found += trainer.test(module, loaders[1], verbose=False)
    values["evaluated"] = torch.tensor([value for each in found for value in each.values()])
    predicted = trainer.predict(module, loaders[1])
    values["predicted"] = torch.cat(predicted).cpu()
    return Fitted(values)


@contextmanager
def _sync_batch_norm(place: Place, is_used: bool) -> Iterator[None]:
    """PyTorch has that layer for accelerators only."""
    with ExitStack() as stack:
        used = is_used and place.accelerator == "cpu"
        for replaced in sync_batch_norm.stand_ins() if used else ():
            stack.enter_context(mock.patch.object(*replaced))
        yield


def difference(one: Fitted, other: Fitted) -> float:
    """The largest between any of their values."""
    assert list(one.values) == list(other.values)
    pairs = [(value, other.values[name]) for name, value in one.values.items()]
    assert all(value.isfinite().all() for value, _ in pairs)
    return max(float((a.double() - b.double()).abs().max()) for a, b in pairs)


def _counted(place: Place, fitted: Callable[..., Fitted], **options: Any) -> Fitted:
    """Trained by ``fitted``, with what travels counted."""
    syncs = []

    def hook(state, bucket):  # type: ignore[no-untyped-def]  # torch wants no other types
        syncs.extend([1] if bucket.is_last() else [])
        return allreduce_hook(state, bucket)

    class Count(place.lightning.Callback):  # type: ignore[misc,name-defined]
        def on_train_start(self, trainer: Any, *_: Any) -> None:
            trainer.strategy.model.register_comm_hook(None, hook)

    found = fitted(callbacks=(Count(),), **options)
    found.syncs = len(syncs)
    return found


# Checks


def check_equal(scenario: str, place: Place) -> str:
    """Weights, losses and metrics are those of DDPStrategy."""
    options = dict(EQUAL[scenario])
    arguments = options.pop("strategy", {})
    ours = {"flatten": options.pop("flatten", False), **arguments}
    stock = fit(place, place.strategy(True, **arguments), **options)
    trained = fit(place, place.strategy(**ours), **options)
    found = difference(stock, trained)
    assert found <= TOLERANCE, f"{scenario}: {found} from strategy='ddp'"
    untrained = fit(place, place.strategy(True, **arguments), **{**options, "max_steps": 1})
    assert (
        difference(
            *(Fitted({"first": next(iter(each.values.values()))}) for each in (stock, untrained))
        )
        > 100 * TOLERANCE
    )
    return f"at most {found:.1e} from ddp"


def check_count(place: Place) -> str:
    """Four batches, one communication."""
    found = _counted(
        place, partial(fit, place, place.strategy()), accumulate_grad_batches=4, max_steps=6
    )
    assert found.syncs == 6, found.syncs
    return "6 communications for 24 batches"


def check_named(algorithm: str, place: Place) -> str:
    """Each algorithm trains by its name."""
    import bagua_client.lightning  # noqa: F401

    seen = []

    class Seen(place.lightning.Callback):  # type: ignore[misc,name-defined]
        def on_train_start(self, trainer: Any, *_: Any) -> None:
            seen.append(trainer.strategy.model.algorithm.name)

    kind = WithQAdam if algorithm == "qadam" else Regression
    trained = fit(place, f"bagua_{algorithm}", kind, callbacks=(Seen(),), max_steps=60)
    assert seen == [algorithm]
    losses = trained.values["losses"]
    first, last = float(losses[2:10].mean()), float(losses[-10:].mean())
    assert last < 0.7 * first, (first, last)
    return f"loss {first:.3f} to {last:.3f}"


def check_qadams_errors(place: Place) -> str:
    """Its two configuration errors, and another optimizer."""
    message = "Bagua QAdam can only accept one QAdamOptimizer and one LR Scheduler."
    for kind in (WithTwoQAdams, WithTwoSchedulers, Regression):
        error: BaseException | None = None
        try:
            fit(place, "bagua_qadam", kind)
        except Exception as raised:
            error = raised
        assert type(error).__name__ == "MisconfigurationException", f"{kind.__name__}: {error!r}"
        assert str(error) == message
    return "told"


def check_resumed(scenario: str, place: Place) -> str:
    """A training that goes on from a checkpoint ends where one that was not interrupted does."""
    algorithm = scenario.partition(",")[0]
    kind = WithQAdam if algorithm == "qadam" else Regression
    arguments = {"algorithm": algorithm, **RESUMED[scenario]}
    epochs = {"max_steps": -1, "num_sanity_val_steps": 0}

    def saving(folder: str) -> dict[str, Any]:
        kept = place.lightning.callbacks.ModelCheckpoint(
            dirpath=str(Path(place.folder, folder)), filename="{epoch}", save_top_k=-1
        )
        return {"callbacks": (kept,), "enable_checkpointing": True, **epochs}

    whole = fit(place, place.strategy(**arguments), kind, max_epochs=3, **saving("whole"))
    saved = str(Path(place.folder, "whole", "epoch=0.ckpt"))
    strategy = place.strategy(**arguments)
    resumed = fit(place, strategy, kind, saved, 5, max_epochs=3, **saving("resumed"))
    assert len(resumed.values["losses"]) < len(whole.values["losses"])
    # The losses of the epochs that it made itself.
    whole.values["losses"] = whole.values["losses"][-len(resumed.values["losses"]) :]
    found = difference(whole, resumed)
    assert found <= TOLERANCE, f"{scenario}: {found} from the one that went on"
    return f"at most {found:.1e} from uninterrupted"


def check_async(place: Place) -> str:
    """While it validates or saves there is one model, and no round begins."""
    seen: dict[str, list[tuple[int, bool]]] = {"validated": [], "saved": [], "next": []}

    def look(what: str, trainer: Any) -> None:
        wrapper = trainer.strategy.model
        flat = torch.cat([p.detach().reshape(-1) for p in wrapper.parameters()])
        others = trainer.strategy.all_gather(flat)
        seen[what].append((wrapper.algorithm.rounds, bool((others == flat).all())))

    class Look(place.lightning.Callback):  # type: ignore[misc,name-defined]
        is_due = False

        def on_validation_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.state.fn == "fit" and not trainer.sanity_checking:
                look("validated", trainer)

        def on_save_checkpoint(self, trainer: Any, *_: Any) -> None:
            look("saved", trainer)
            self.is_due = True

        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            if self.is_due:  # Ours has not seen the batch yet.
                look("next", trainer)
                self.is_due = False

    saving = place.lightning.callbacks.ModelCheckpoint(
        dirpath=str(Path(place.folder, "async")), every_n_train_steps=3, save_top_k=-1
    )
    trained = fit(
        place,
        place.strategy(algorithm="async", sync_interval_ms=1),
        callbacks=(Look(), saving),
        enable_checkpointing=True,
        val_check_interval=4,
        max_steps=24,
    )
    assert len(seen["validated"]) == 6 * 2, seen
    assert all(is_one for looks in seen.values() for _, is_one in looks), seen
    rounds = [rounds for rounds, _ in seen["validated"]]
    assert rounds[0::2] == rounds[1::2]
    assert len(seen["saved"]) == 8
    pairs = list(zip(seen["saved"], seen["next"], strict=False))
    assert len(pairs) == 7
    assert all(before == after for before, after in pairs), seen
    assert rounds[-1] > rounds[0] + 5, "no rounds in between"
    flat = torch.cat([value.reshape(-1) for value in list(trained.values.values())[:2]])
    others: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(others, flat)
    assert torch.equal(others[0], others[1]), "the trained model is two"
    return f"{rounds[-1]} rounds, none while validating or saving"


def check_tuned(place: Place) -> str:
    """A validation is no part of a step, and the loss is told where an algorithm may be tried."""
    seen = []

    class Look(place.lightning.Callback):  # type: ignore[misc,name-defined]
        def on_validation_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.state.fn == "fit":
                seen.append(trainer.strategy.model._agent.measurement._timer._left_out_from)

        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            agent = trainer.strategy.model._agent
            assert agent._guard.has_any
            assert agent.measurement._timer._left_out_from is None

    variables = {
        "BAGUA_AUTOTUNE": "1",
        "BAGUA_AUTOTUNE_URL": "http://127.0.0.1:9",  # Nobody listens.
        "BAGUA_AUTOTUNE_ALLOW": "bytegrad",
    }
    with mock.patch.dict(os.environ, variables):
        fit(place, place.strategy(), callbacks=(Look(),), val_check_interval=2)
    assert len(seen) == 2 + 10 * 2
    assert None not in seen
    return f"{len(seen)} batches validated, in no step's time"


def check_reductions(place: Place) -> str:
    """Bagua's ways to reduce, by their names."""
    results = {}

    class Reduce(place.lightning.Callback):  # type: ignore[misc,name-defined]
        def on_train_start(self, trainer: Any, *_: Any) -> None:
            strategy = trainer.strategy
            names = ["sum", "mean", "avg", "product", "min", "max"]
            if place.accelerator == "cpu":  # NCCL has none of bits.
                names += ["band", "bor", "bxor"]
            for name in names:
                value = torch.tensor(2 + strategy.global_rank, device=strategy.root_device)
                if name in ("mean", "avg"):
                    value = value.float()
                results[name] = float(strategy.reduce(value, reduce_op=name))
            assert strategy.broadcast({"of": strategy.global_rank}) == {"of": 0}

    fit(place, place.strategy(), callbacks=(Reduce(),), max_steps=1)
    expected = {"sum": 5, "mean": 2.5, "avg": 2.5, "product": 6, "min": 2, "max": 3}
    expected |= {"band": 2, "bor": 3, "bxor": 1} if place.accelerator == "cpu" else {}
    assert results == expected
    return ", ".join(results)


CHECKS: dict[str, Callable[[Place], str]] = {
    **{f"equals ddp: {name}": partial(check_equal, name) for name in EQUAL},
    "counted": check_count,
    **{f"by name: {name}": partial(check_named, name) for name in ALGORITHMS},
    "qadam's errors": check_qadams_errors,
    **{f"resumed: {name}": partial(check_resumed, name) for name in RESUMED},
    "async": check_async,
    "tuned": check_tuned,
    "reductions": check_reductions,
}
