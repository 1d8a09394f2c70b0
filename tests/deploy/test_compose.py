"""compose.yaml and the files that it mounts, as far as that goes without an engine."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from bagua_autotune.connections import MOST_BUFFERED_BYTES
from bagua_autotune.settings import ENVIRONMENT, Settings

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "compose.yaml").read_text()
SERVICES = ("autotune", "prometheus", "grafana")


def load(path: str) -> Any:
    return yaml.safe_load((ROOT / path).read_text())


@pytest.fixture(scope="module")
def services() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = yaml.safe_load(TEXT)["services"]
    return found


def mounts(service: dict[str, Any]) -> dict[str, str]:
    """What is mounted, by where."""
    return {where: what for what, where, *_ in (text.split(":") for text in service["volumes"])}


@pytest.mark.parametrize("name", SERVICES)
def test_none_has_rights_or_memory_that_it_does_not_need(
    services: dict[str, dict[str, Any]], name: str
) -> None:
    service = services[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert "no-new-privileges:true" in service["security_opt"]
    assert all(port.startswith("${BIND_ADDRESS:-127.0.0.1}:") for port in service["ports"])
    assert service["healthcheck"]["test"][0] == "CMD"
    assert re.fullmatch(r"[12]g", service["mem_limit"])
    (tmp,) = service["tmpfs"]
    (size,) = re.fullmatch(r"/tmp:size=(\d+)m", tmp).groups()  # type: ignore[union-attr]
    assert int(size) * 1024**2 > MOST_BUFFERED_BYTES


def test_what_is_mounted_is_there(services: dict[str, dict[str, Any]]) -> None:
    volumes = yaml.safe_load(TEXT)["volumes"]
    for service in services.values():
        for what in mounts(service).values():
            assert (ROOT / what).exists() if what.startswith(".") else what in volumes


def test_every_secret_comes_from_a_file_that_is_never_committed() -> None:
    example = (ROOT / "deploy/compose/example.env").read_text()
    variables = set(re.findall(r"\$\{(\w+)", TEXT))
    assert variables == set(re.findall(r"^#?(\w+)=", example, re.MULTILINE))
    # An empty one is as good as none: compose says so and starts nothing.
    for secret in ("BAGUA_AUTOTUNE_TOKEN", "GRAFANA_ADMIN_PASSWORD"):
        assert f"${{{secret}:?" in TEXT
        assert re.search(rf"^{secret}=$", example, re.MULTILINE)
    assert "/.env" in (ROOT / ".gitignore").read_text().splitlines()


def test_the_service_is_told_what_it_knows(services: dict[str, dict[str, Any]]) -> None:
    service = services["autotune"]
    assert set(service["environment"]) <= set(ENVIRONMENT.values())
    port = str(Settings().port)
    assert service["ports"][0].endswith(f":{port}:{port}")
    assert f"http://127.0.0.1:{port}/" in service["healthcheck"]["test"][-1]


def test_prometheus_is_set_up_as_without_containers(services: dict[str, dict[str, Any]]) -> None:
    compose = load("deploy/compose/prometheus.yml")
    alone = load("dashboards/prometheus/prometheus.yml")
    targets = compose["scrape_configs"][0]["static_configs"][0].pop("targets")
    assert targets == [f"autotune:{Settings().port}"]
    del alone["scrape_configs"][0]["static_configs"][0]["targets"]
    assert compose == alone
    where = mounts(services["prometheus"])
    folder = Path("/etc/prometheus") / Path(*Path(compose["rule_files"][0]).parts[:-1])
    assert list((ROOT / where[str(folder)]).glob(Path(compose["rule_files"][0]).name))


def test_grafana_finds_prometheus_and_the_dashboards(services: dict[str, dict[str, Any]]) -> None:
    grafana, where = services["grafana"], mounts(services["grafana"])
    provisioning = where["/etc/grafana/provisioning"]
    (source,) = (ROOT / provisioning / "datasources").iterdir()
    (provider,) = (ROOT / provisioning / "dashboards").iterdir()
    port = services["prometheus"]["ports"][0].rpartition(":")[2]
    assert load(str(source))["datasources"][0]["url"] == f"http://prometheus:{port}"
    folder = load(str(provider))["providers"][0]["options"]["path"]
    home = Path(grafana["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"])
    assert str(home.parent) == folder
    assert (ROOT / where[folder] / home.name).is_file()
