"""A real Prometheus that scrapes a service every second."""

from __future__ import annotations

import socket
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import requests
import yaml

from tests.e2e.conftest import wait_until

RULES = Path(__file__).parents[2] / "dashboards" / "prometheus" / "rules"


class Prometheus:
    """Context manager: Debian's server on a free port, with the project's rules.

    Args:
        target: host and port of the service.
    """

    def __init__(self, program: str, folder: Path, target: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{probe.getsockname()[1]}"
        self.url = f"http://{address}"
        self._log = (folder / "prometheus.log").open("w")
        self._command = [
            program,
            f"--config.file={_configured(folder, target)}",
            f"--storage.tsdb.path={folder / 'tsdb'}",
            f"--web.listen-address={address}",
        ]

    def __enter__(self) -> Prometheus:
        self._process = subprocess.Popen(
            self._command, stdout=self._log, stderr=subprocess.STDOUT, text=True
        )
        wait_until(self._is_ready, "Prometheus")
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        self._log.close()

    def values(self, expression: str, past_seconds: float = 0) -> list[float]:
        """All samples of now, or of the time until now, but those that are not a number.

        Raises:
            AssertionError: Prometheus refused the expression.
        """
        now = time.time()
        parameters: dict[str, str | float] = {"query": expression}
        if past_seconds:
            parameters |= {"start": now - past_seconds, "end": now, "step": 1}
        path = "query_range" if past_seconds else "query"
        answer = self._get(path, parameters)
        found = [sample for series in answer["result"] for sample in _samples(series)]
        return [value for value in map(float, found) if value == value]

    def failing_rules(self) -> list[dict[str, Any]]:
        """Rules that Prometheus cannot evaluate."""
        groups = self._get("rules", {})["groups"]
        return [rule for group in groups for rule in group["rules"] if rule["health"] != "ok"]

    def _get(self, path: str, parameters: Mapping[str, str | float]) -> Any:
        response = requests.get(f"{self.url}/api/v1/{path}", params=parameters, timeout=30)
        assert response.ok, f"{parameters.get('query')}: {response.text}"
        return response.json()["data"]

    def _is_ready(self) -> bool:
        assert self._process.poll() is None, Path(self._log.name).read_text()
        try:
            return requests.get(f"{self.url}/-/ready", timeout=5).ok
        except requests.ConnectionError:
            return False


def rules() -> list[dict[str, Any]]:
    """Recording rules and alerts, as the files have them."""
    groups = [
        group for path in _rule_files() for group in yaml.safe_load(path.read_text())["groups"]
    ]
    return [rule for group in groups for rule in group["rules"]]


def _rule_files() -> list[Path]:
    return sorted(RULES.glob("*.yml"))


def _configured(folder: Path, target: str) -> Path:
    """The project's rules, and its scrape job, at an interval of one second."""
    (folder / "rules").mkdir()
    for path in _rule_files():
        document = yaml.safe_load(path.read_text())
        for group in document["groups"]:
            group["interval"] = "1s"
        (folder / "rules" / path.name).write_text(yaml.safe_dump(document))
    scrape = {"job_name": "bagua-autotune", "static_configs": [{"targets": [target]}]}
    configuration = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": ["rules/*.yml"],
        "scrape_configs": [scrape],
    }
    path = folder / "prometheus.yml"
    path.write_text(yaml.safe_dump(configuration))
    return path


def _samples(series: Mapping[str, Any]) -> list[str]:
    pairs = series["values"] if "values" in series else [series["value"]]
    return [value for _, value in pairs]
