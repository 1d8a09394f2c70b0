"""Bagua's protocol from Python: what its workers and its service tell each other, a client, this
project's service behind Bagua's class, and Bagua's optimizer of a few named parameters."""

from __future__ import annotations

import enum
import math
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, ClassVar, TypedDict

import requests
from requests.adapters import HTTPAdapter
from urllib3.util import Retry

from bagua_wire import limits

if TYPE_CHECKING:
    from flask import Flask

Application = Callable[..., Iterable[bytes]]
SERVICE = "bagua_compat.service"
"""The group of entry points in which the service gives what makes an application of its settings:
Bagua's class serves it, and imports nothing of it."""
NO_PROXIES = {"http": "", "https": ""}
RETRIES = 3
"""How often a request is repeated whose connection fails: a server closes one that was idle."""


class TensorDtype(str, enum.Enum):
    """Types of a tensor's elements, by their names in the protocol."""

    F32 = "f32"
    F16 = "f16"
    U8 = "u8"
    I64 = "i64"


class TensorDeclaration(TypedDict):
    """A tensor as the service knows it; ``dtype`` is a :class:`TensorDtype` or its value."""

    name: str
    num_elements: int
    dtype: str


class BaguaCoreTelemetrySpan(TypedDict):
    """When a tensor became ready; times in milliseconds."""

    trace_id: int
    action: str
    tensor_name: str
    start_time: int
    end_time: int


_ELEMENT_BYTES = {TensorDtype.F32: 4, TensorDtype.F16: 2, TensorDtype.U8: 1, TensorDtype.I64: 8}


def get_tensor_declaration_bytes(td: TensorDeclaration) -> int:
    """The tensor's size."""
    return td["num_elements"] * _ELEMENT_BYTES[TensorDtype(td["dtype"])]


@dataclass
class BaguaHyperparameter:
    """What the service recommends.

    Attributes:
        buckets: the tensors of each.
        bucket_size: in bytes, of which they were cut.
        is_hierarchical_reduce: whether ranks reduce inside their nodes first.
    """

    buckets: list[list[TensorDeclaration]] = field(default_factory=list)
    bucket_size: int = 0
    is_hierarchical_reduce: bool = False

    def update(self, param_dict: Mapping[str, Any]) -> BaguaHyperparameter:
        """Take over what has a name of ours, and leave out the rest; returns itself."""
        for name in self.dict().keys() & param_dict.keys():
            setattr(self, name, param_dict[name])
        return self

    def dict(self) -> dict[str, Any]:
        """The values as they are sent."""
        return asdict(self)


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
        self._application: Application | None = None

    def setup_app(self, app: Flask) -> Flask:
        """Make ``app`` answer what begins with ``/api/v1/``; returns it."""
        answer_others = app.wsgi_app

        def answer(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
            is_ours = str(environ.get("PATH_INFO", "")).startswith("/api/v1/")
            application = self._ours() if is_ours else answer_others
            return application(environ, start_response)

        app.wsgi_app = answer  # type: ignore[method-assign]
        return app

    def _ours(self) -> Application:
        """Return the application, made by the first request: the process that serves may be forked
        from that which set it up, and neither threads nor a database's connections go along.
        """
        with self._lock:
            if self._application is None:
                found = next(iter(entry_points(group=SERVICE)), None)
                if found is None:
                    raise RuntimeError(
                        "AutotuneService needs the service: pip install bagua-autotune[service]"
                    )
                self._application = found.load()(**self._settings)
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


@dataclass
class IntParam:
    """A whole number; both ends of ``space_dimension`` are included."""

    val: int
    space_dimension: tuple[int, int]


@dataclass
class FloatParam:
    """A number."""

    val: float
    space_dimension: tuple[float, float]


@dataclass
class BoolParam:
    """A switch, which is 0 or 1 in what is asked and told."""

    val: bool
    space_dimension: ClassVar[tuple[int, int]] = (0, 1)


class BayesianOptimizer:
    """Proposes parameters, given the scores of earlier ones. It needs scikit-optimize, which
    ``pip install bagua-autotune[service]`` brings.

    Args:
        param_declaration: for each name an :class:`IntParam`, :class:`FloatParam` or
            :class:`BoolParam`.
        n_initial_points: so many are proposed without regard to scores.
        initial_point_generator: how; one of scikit-optimize's.
        random_state: seed; None: another each time.
    """

    def __init__(
        self,
        param_declaration: Mapping[str, IntParam | FloatParam | BoolParam],
        n_initial_points: int = 20,
        initial_point_generator: str = "halton",
        random_state: int | None = 0,
    ) -> None:
        import skopt  # of the extra "service", which a client does without

        self.param_declaration = dict(param_declaration)
        self.bayesian_optimizer = skopt.Optimizer(
            [tuple(param.space_dimension) for param in self.param_declaration.values()],
            n_initial_points=n_initial_points,
            initial_point_generator=initial_point_generator,
            random_state=random_state,
        )

    def tell(self, param_dict: Mapping[str, Any], score: float) -> None:
        """Tell the score of these parameters; higher is better.

        Raises:
            ValueError: the score is no finite number: scikit-optimize would keep it, and fail at
                every later one.
        """
        if not math.isfinite(score):
            raise ValueError(f"the score must be a finite number, not {score}")
        point = [float(param_dict[name]) for name in self.param_declaration]
        self.bayesian_optimizer.tell(point, -score)

    def ask(self) -> dict[str, Any]:
        """The parameters to try next."""
        return dict(zip(self.param_declaration, self.bayesian_optimizer.ask(), strict=True))
