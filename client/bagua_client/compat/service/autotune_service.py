"""Bagua's protocol from Python: a client of it, and this project's service behind Bagua's class."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import requests
from requests.adapters import HTTPAdapter
from urllib3.util import Retry

from bagua_client.compat.bagua_define import BaguaCoreTelemetrySpan, TensorDeclaration
from bagua_wire import limits

if TYPE_CHECKING:
    from flask import Flask

NO_PROXIES = {"http": "", "https": ""}
RETRIES = 3
"""How often a request is repeated whose connection fails: a server closes one that was idle."""


class AutotuneService:
    """This project's service with Bagua's arguments, to be served by an application of yours.

    It needs ``pip install bagua-autotune[service]``. The store is where BAGUA_AUTOTUNE_DATABASE
    says; without it, jobs are kept for later runs as with ``bagua-autotune serve``.

    Args:
        world_size: ranks of each job.
        autotune_level: 0: every job keeps its default; from 1 on they are tuned.
        max_samples: most trials of a job.
        sampling_confidence_time_s: most seconds of a trial.
        warmup_time_s: most seconds before the first.
        is_output_autotune_log: write a line of CSV for each trial in the working directory.
        default_bucket_size: in bytes, of a job's default.
    """

    def __init__(
        self,
        world_size: int,
        autotune_level: int = 0,
        max_samples: int = limits.SAMPLES,
        sampling_confidence_time_s: float = 5.0,
        warmup_time_s: float = 30.0,
        is_output_autotune_log: bool = False,
        default_bucket_size: int = 10 * 1024**2,
    ) -> None:
        self._settings = {
            "world_size": world_size,
            "max_samples": max_samples if autotune_level >= 1 else 1,
            "trial_seconds": sampling_confidence_time_s,
            "warmup_seconds": warmup_time_s,
            "csv_log": is_output_autotune_log,
            "default_bucket_bytes": default_bucket_size,
            # Who serves it chose the address.
            "trust_network": True,
        }
        self._lock = threading.Lock()
        self._application: Callable[..., Iterable[bytes]] | None = None

    def setup_app(self, app: Flask) -> Flask:
        """Make ``app`` answer what begins with ``/api/v1/``; returns it."""
        answer_others = app.wsgi_app

        def answer(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
            is_ours = str(environ.get("PATH_INFO", "")).startswith("/api/v1/")
            application = self._ours() if is_ours else answer_others
            return application(environ, start_response)

        app.wsgi_app = answer  # type: ignore[method-assign]
        return app

    def _ours(self) -> Callable[..., Iterable[bytes]]:
        """Return the application, made by the first request: the process that serves may be forked
        from that which set it up, and neither threads nor a database's connections go along.
        """
        with self._lock:
            if self._application is None:
                from bagua_autotune.app import create_app
                from bagua_autotune.settings import Settings
                from bagua_autotune.store import Store

                settings = Settings.load(os.environ, **self._settings)
                self._application = create_app(settings, Store(settings.database)).wsgi_app
            return self._application


class AutotuneClient:
    """Asks a service by Bagua's protocol. One thread at a time.

    Each method but :meth:`health_check` returns the answer, whatever its status, and raises
    ``requests.ConnectionError`` where there is none.

    Args:
        proxies: as requests takes them; by default none is used, whatever the environment says.
    """

    def __init__(
        self, service_addr: str, service_port: int, proxies: Mapping[str, str] = NO_PROXIES
    ) -> None:
        self.autotune_service_addr = f"{service_addr}:{service_port}"
        self.session = requests.Session()
        self.session.trust_env = False
        self.session.proxies.update(proxies)
        retry = Retry(total=RETRIES, allowed_methods=None, status=0, backoff_factor=0.1)
        self.session.mount("http://", HTTPAdapter(max_retries=retry))

    def register_tensors(
        self,
        model_name: str,
        tensor_list: Sequence[TensorDeclaration],
        whether_to_bucket: bool = True,
    ) -> requests.Response:
        """Name the model's tensors; the answer has the hyperparameters to begin with."""
        return self._post(
            "register_tensors",
            model_name=model_name,
            tensor_list=list(tensor_list),
            whether_to_bucket=whether_to_bucket,
        )

    def report_metrics(
        self,
        model_name: str,
        rank: int,
        train_iter: int,
        hyperparameters: Mapping[str, Any],
        speed: float,
    ) -> requests.Response:
        """Tell how fast this rank was; higher is better."""
        return self._post(
            "report_metrics",
            model_name=model_name,
            rank=rank,
            train_iter=train_iter,
            hyperparameters=dict(hyperparameters),
            speed=speed,
        )

    def ask_hyperparameters(self, model_name: str, rank: int, train_iter: int) -> requests.Response:
        """Ask what to use from this iteration on."""
        return self._post(
            "ask_hyperparameters", model_name=model_name, rank=rank, train_iter=train_iter
        )

    def report_tensor_execution_order(
        self, spans: Sequence[BaguaCoreTelemetrySpan]
    ) -> requests.Response:
        """Tell when each tensor became ready."""
        return self._post("report_tensor_execution_order", spans=list(spans))

    def health_check(self) -> bool:
        """Whether a service answers."""
        try:
            self.session.get(self._url("health_check"))
        except requests.ConnectionError:
            return False
        return True

    def _post(self, what: str, **message: Any) -> requests.Response:
        return self.session.post(self._url(what), json=message)

    def _url(self, what: str) -> str:
        return f"http://{self.autotune_service_addr}/api/v1/{what}"
