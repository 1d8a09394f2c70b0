"""The Kubernetes examples agree with the image, the service and the client."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import yaml

from bagua_autotune.app import create_app
from bagua_autotune.settings import ENVIRONMENT, Settings
from bagua_autotune.store import Store
from bagua_client import environment

FOLDER = Path(__file__).parents[2] / "deploy" / "kubernetes"
PODS = ("sidecar.yaml", "cluster.yaml")


def resources(name: str) -> dict[str, dict[str, Any]]:
    """By kind."""
    return {found["kind"]: found for found in yaml.safe_load_all((FOLDER / name).read_text())}


def pod(name: str) -> dict[str, Any]:
    found = resources(name)
    template: dict[str, Any] = (found.get("Job") or found["Deployment"])["spec"]["template"]
    return template


def containers(name: str) -> Iterator[dict[str, Any]]:
    spec = pod(name)["spec"]
    yield from spec.get("initContainers", [])
    yield from spec["containers"]


@pytest.fixture(params=PODS)
def name(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


def test_none_has_rights_that_it_does_not_need(name: str) -> None:
    security = pod(name)["spec"]["securityContext"]
    assert security["runAsNonRoot"] is True
    assert security["seccompProfile"] == {"type": "RuntimeDefault"}
    assert pod(name)["spec"]["automountServiceAccountToken"] is False
    for container in containers(name):
        security = container["securityContext"]
        assert security["readOnlyRootFilesystem"] is True
        assert security["allowPrivilegeEscalation"] is False
        assert security["capabilities"] == {"drop": ["ALL"]}


def test_the_service_s_container_is_the_image_s(name: str) -> None:
    dockerfile = (FOLDER.parents[1] / "Dockerfile").read_text()
    user = pod(name)["spec"]["securityContext"]["runAsUser"]
    assert f"USER {user}:{user}" in dockerfile
    (service,) = [found for found in containers(name) if found["name"] == "autotune"]
    assert {variable["name"] for variable in service["env"]} <= set(ENVIRONMENT.values())
    assert [port["containerPort"] for port in service["ports"]] == [Settings().port]
    assert pod(name)["metadata"]["annotations"]["prometheus.io/port"] == str(Settings().port)
    (mount,) = service["volumeMounts"]
    assert f"VOLUME {mount['mountPath']}" in dockerfile
    assert mount["name"] in {volume["name"] for volume in pod(name)["spec"]["volumes"]}


def test_it_is_asked_for_what_it_answers(name: str) -> None:
    with closing(Store("sqlite://")) as store:
        routes = {str(rule) for rule in create_app(Settings(), store).url_map.iter_rules()}
    (service,) = [found for found in containers(name) if found["name"] == "autotune"]
    probes = {key: probe["httpGet"] for key, probe in service.items() if key.endswith("Probe")}
    assert {"startupProbe", "livenessProbe"} <= set(probes)
    ports = {port["name"] for port in service["ports"]}
    assert all(probe["path"] in routes and probe["port"] in ports for probe in probes.values())
    # A database that is away must not have the service killed, and again and again.
    assert probes["livenessProbe"]["path"] == "/healthz"
    assert pod(name)["metadata"]["annotations"]["prometheus.io/path"] in routes


def test_the_sidecar_s_training_asks_it_on_loopback() -> None:
    spec = pod("sidecar.yaml")["spec"]
    (sidecar,), (training,) = spec["initContainers"], spec["containers"]
    assert sidecar["restartPolicy"] == "Always"
    variables = {found["name"]: found.get("value") for found in training["env"]}
    assert variables["BAGUA_AUTOTUNE_URL"] == f"http://127.0.0.1:{Settings().port}"
    read = inspect.getsource(environment)
    assert all(f'"{variable}"' in read for variable in variables)
    tokens = [
        found["valueFrom"]
        for container in (sidecar, training)
        for found in container["env"]
        if found["name"] == "BAGUA_AUTOTUNE_TOKEN"
    ]
    assert tokens[0] == tokens[1]


def test_the_cluster_s_parts_find_each_other() -> None:
    found = resources("cluster.yaml")
    labels = pod("cluster.yaml")["metadata"]["labels"]
    assert found["Service"]["spec"]["selector"] == labels
    assert found["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"] == labels
    monitor = resources("servicemonitor.yaml")["ServiceMonitor"]["spec"]
    assert monitor["selector"]["matchLabels"] == found["Service"]["metadata"]["labels"]
    ports = {port["name"] for port in found["Service"]["spec"]["ports"]}
    assert {endpoint["port"] for endpoint in monitor["endpoints"]} <= ports
    claim = found["PersistentVolumeClaim"]["metadata"]["name"]
    (volume,) = pod("cluster.yaml")["spec"]["volumes"]
    assert volume["persistentVolumeClaim"]["claimName"] == claim
    # Rules and dashboards go by it; the operator takes it from the service.
    assert found["Service"]["metadata"]["name"] == "bagua-autotune"
