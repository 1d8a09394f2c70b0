"""Results of a tuning where other tools show them: one callback for :func:`bagua_client.on_tuned`
for each. They write on rank 0 alone. None of these libraries is needed, and none is imported
before its callback is used.

    bagua_client.on_tuned(bagua_client.callbacks.TensorBoard(writer))
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from bagua_client.tuning import Tuning

PREFIX = "bagua"
FIGURES = (
    "speedup", "low", "high", "cost_steps", "cost_seconds", "payback_steps", "trials", "steps",
)  # fmt: skip
MOST_TAG_CHARACTERS = 5000
"""A database of MLflow's takes no more; a long list of buckets may be longer."""


class Stored:
    """The result of a job that is over, for which a callback is called by hand::

        job = json.load(open("job.json"))  # bagua-autotune export JOB --json > job.json
        bagua_client.callbacks.WandB()(bagua_client.callbacks.Stored(job))

    Such as one of ``bagua-autotune system``, which is no training of its own.

    Args:
        job: what ``bagua-autotune export JOB --json`` printed.

    Raises:
        ValueError: the job has no result.
    """

    rank = 0

    def __init__(self, job: Mapping[str, Any]) -> None:
        result = job.get("result")
        if not result:
            raise ValueError(f"job {job.get('name')!r} has no result: it is {job.get('state')!r}")
        self.state = "finished"
        self.round = int(job["round"])
        self.at_step: int = result["steps"]
        self.summary: str = result["summary"]
        self.figures = {name: result[name] for name in FIGURES}
        self._configuration: Mapping[str, Any] = result["configuration"]

    @property
    def configuration(self) -> Stored:
        """By which ``to_json`` is found, as in a Tuning."""
        return self

    def to_json(self) -> dict[str, Any]:
        """The values of the configuration."""
        return dict(self._configuration)


class TensorBoard:
    """Writes the figures as scalars ``bagua/speedup`` and so on, and the result as the text
    ``bagua/result``.

    Args:
        writer: a SummaryWriter of torch.utils.tensorboard or tensorboardX, or another object with
            add_scalar, add_text and flush; may be None on ranks other than 0.
    """

    def __init__(self, writer: Any) -> None:
        self._writer = writer

    def __call__(self, tuning: Tuning | Stored) -> None:
        if tuning.rank != 0:
            return
        for name, value in _figures(tuning).items():
            self._writer.add_scalar(f"{PREFIX}/{name}", value, tuning.at_step)
        configuration = json.dumps(tuning.configuration.to_json(), indent=2)
        text = f"{_words(tuning)}\n\n```json\n{configuration}\n```"
        self._writer.add_text(f"{PREFIX}/result", text, tuning.at_step)
        self._writer.flush()


class WandB:
    """Writes the figures into the run's summary and the configuration into its config, both
    under ``bagua``. It does not write to the run's history, which has the training's own steps.

    Args:
        run: a run of wandb; None: the run that ``wandb.init`` has started.

    Raises:
        ImportError: wandb is not installed.
    """

    def __init__(self, run: Any = None) -> None:
        if run is None:
            _need("wandb", "wandb")
        self._run = run

    def __call__(self, tuning: Tuning | Stored) -> None:
        if tuning.rank != 0:
            return
        run = self._run
        if run is None:
            import wandb

            run = wandb.run
        if run is None:
            raise RuntimeError("there is no run of wandb on rank 0: call wandb.init() first")
        run.config.update({PREFIX: tuning.configuration.to_json()}, allow_val_change=True)
        told = {**_figures(tuning), "state": tuning.state, "result": _words(tuning)}
        for name, value in told.items():
            run.summary[f"{PREFIX}/{name}"] = value


class MLflow:
    """Writes the figures as metrics ``bagua.speedup`` and so on, whose step is the round, and the
    result and each knob as tags: a later round may change them, as it could no parameter.

    Args:
        run_id: None: of the run that is active by then on the training thread.

    Raises:
        ImportError: mlflow is not installed.
    """

    def __init__(self, run_id: str | None = None) -> None:
        _need("mlflow", "mlflow-skinny")
        self._run_id = run_id

    def __call__(self, tuning: Tuning | Stored) -> None:
        if tuning.rank != 0:
            return
        import mlflow

        run_id, active = self._run_id, mlflow.active_run()
        if run_id is None and active is None:
            raise RuntimeError("mlflow has no active run on rank 0: call mlflow.start_run() first")
        run_id = run_id or active.info.run_id
        figures = {f"{PREFIX}.{name}": float(value) for name, value in _figures(tuning).items()}
        mlflow.log_metrics(figures, step=tuning.round, run_id=run_id)
        knobs = {name: str(value) for name, value in tuning.configuration.to_json().items()}
        tags = {**knobs, "state": tuning.state, "result": _words(tuning)}
        client = mlflow.MlflowClient()
        for name, text in tags.items():
            client.set_tag(run_id, f"{PREFIX}.{name}", text[:MOST_TAG_CHARACTERS])


def _figures(tuning: Tuning | Stored) -> dict[str, float]:
    """The figures that are known."""
    if tuning.state != "finished":
        return {}
    if isinstance(tuning, Stored):
        values = tuning.figures
    else:
        values = {name: getattr(tuning, name) for name in FIGURES}
    return {name: value for name, value in values.items() if value is not None}


def _words(tuning: Tuning | Stored) -> str:
    return str(tuning) if tuning.state != "finished" else tuning.summary


def _need(library: str, package: str) -> None:
    if find_spec(library) is None:
        raise ImportError(f"{library} is not installed; pip install {package}")
