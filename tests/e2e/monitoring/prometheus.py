"""A real Prometheus: one that scrapes a service, or one that holds what a test scraped of it."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import requests
import yaml

from tests.e2e.service import unused_port
from tests.waiting import wait_until

DATA = "tsdb"
# A trial of the tests takes half a second, and its step times are known in the end of it only.
SCRAPE_MILLISECONDS = 250
RULES = Path(__file__).parents[3] / "dashboards" / "prometheus" / "rules"


class Prometheus:
    """Context manager: Debian's server on a free port.

    Args:
        folder: that has its configuration, ``prometheus.yml``, and its data, if there are any.
        options: of the command line.
    """

    def __init__(self, program: str, folder: Path, *options: str) -> None:
        address = f"127.0.0.1:{unused_port()}"
        self.url = f"http://{address}"
        self._log = (folder / "prometheus.log").open("w")
        self._command = [
            program,
            f"--config.file={folder / 'prometheus.yml'}",
            f"--storage.tsdb.path={folder / DATA}",
            f"--web.listen-address={address}",
            *options,
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

        Points are at whole seconds, as those that Grafana asks for.

        Raises:
            AssertionError: Prometheus refused the expression.
        """
        now = time.time()
        if past_seconds:
            found = self.over_time(expression, now // 1 - past_seconds, now // 1, 1)
        else:
            found = self.at(expression, now)
        samples = [float(value) for series in found for _, value in _samples(series)]
        return [value for value in samples if value == value]

    def at(self, expression: str, moment: float) -> list[dict[str, Any]]:
        """The series of that moment: ``metric`` has the labels, ``value`` time and value."""
        return list(self._get("query", {"query": expression, "time": moment})["result"])

    def over_time(
        self, expression: str, start: float, end: float, step: float
    ) -> list[dict[str, Any]]:
        """The series of that time: ``metric`` has the labels, ``values`` times and values."""
        parameters = {"query": expression, "start": start, "end": end, "step": step}
        return list(self._get("query_range", parameters)["result"])

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


def scraping(program: str, folder: Path, target: str) -> Prometheus:
    """With the project's rules, scraping host and port of a service all the time."""
    (folder / "rules").mkdir()
    for path in _rule_files():
        document = yaml.safe_load(path.read_text())
        for group in document["groups"]:
            group["interval"] = "1s"
        (folder / "rules" / path.name).write_text(yaml.safe_dump(document))
    scrape = {"job_name": "bagua-autotune", "static_configs": [{"targets": [target]}]}
    configuration = {
        "global": {"scrape_interval": f"{SCRAPE_MILLISECONDS}ms", "evaluation_interval": "1s"},
        "rule_files": ["rules/*.yml"],
        "scrape_configs": [scrape],
    }
    (folder / "prometheus.yml").write_text(yaml.safe_dump(configuration))
    return Prometheus(program, folder)


def holding(program: str, folder: Path, scrapes: Mapping[int, str]) -> Prometheus:
    """With these scrapes, by their times, as its past; exact at these times only.

    A sample is looked for just before the moment that is asked about, as nothing says in such a
    past that a series ended.
    """
    lines = [
        f"{line} {moment}\n"
        for moment, text in scrapes.items()
        for line in text.splitlines()
        if line.startswith("bagua_")
    ]
    (folder / "scrapes").write_text("".join([*lines, "# EOF\n"]))
    command = ["promtool", "tsdb", "create-blocks-from", "openmetrics", "scrapes", DATA]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    (folder / "prometheus.yml").write_text("{}")
    return Prometheus(program, folder, "--query.lookback-delta=1s")


def _samples(series: Mapping[str, Any]) -> list[tuple[float, str]]:
    return list(series["values"]) if "values" in series else [series["value"]]
