"""The Kubernetes examples agree with the image, the service and the client."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import requests
import yaml
from click import Context
from torch.distributed.run import get_args_parser

from bagua_autotune.app import LARGEST_BODY_BYTES, create_app
from bagua_autotune.cli import main as cli
from bagua_autotune.connections import MOST_BUFFERED_BYTES
from bagua_autotune.settings import ENVIRONMENT, Settings
from bagua_autotune.store import Store
from bagua_client import environment
from tests.deploy.image import TOKEN, address_of, run_container

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy" / "kubernetes"
PODS = ("sidecar.yaml", "cluster.yaml", "elastic.yaml", "restore.yaml")
SERVED = PODS[:2]


def resources(name: str) -> dict[str, dict[str, Any]]:
    """By kind."""
    return {found["kind"]: found for found in yaml.safe_load_all((FOLDER / name).read_text())}


def pod(name: str) -> dict[str, Any]:
    found = resources(name)
    template: dict[str, Any] = (found.get("Job") or found["Deployment"])["spec"]["template"]
    return template


def volumes(name: str) -> dict[str, dict[str, Any]]:
    """By the names that its containers mount them by."""
    return {volume["name"]: volume for volume in pod(name)["spec"]["volumes"]}


def mounted(name: str, container: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The volumes of a container, by their paths in it."""
    return {mount["mountPath"]: volumes(name)[mount["name"]] for mount in container["volumeMounts"]}


def containers(name: str) -> Iterator[dict[str, Any]]:
    spec = pod(name)["spec"]
    yield from spec.get("initContainers", [])
    yield from spec["containers"]


@pytest.mark.parametrize("name", PODS)
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


@pytest.mark.parametrize("name", SERVED)
def test_the_service_s_container_is_the_image_s(name: str) -> None:
    dockerfile = (FOLDER.parents[1] / "Dockerfile").read_text()
    user = pod(name)["spec"]["securityContext"]["runAsUser"]
    assert f"USER {user}:{user}" in dockerfile
    (service,) = [found for found in containers(name) if found["name"] == "autotune"]
    assert {variable["name"] for variable in service["env"]} <= set(ENVIRONMENT.values())
    assert [port["containerPort"] for port in service["ports"]] == [Settings().port]
    assert pod(name)["metadata"]["annotations"]["prometheus.io/port"] == str(Settings().port)
    paths = mounted(name, service)
    assert set(paths) == {"/data", "/tmp"}
    assert paths["/data"] != paths["/tmp"]
    assert "VOLUME /data\n" in dockerfile


@pytest.mark.parametrize("name", SERVED)
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
    (served,) = containers("cluster.yaml")
    paths = mounted("cluster.yaml", served)
    assert paths["/data"]["persistentVolumeClaim"]["claimName"] == claim
    assert "emptyDir" in paths["/tmp"]  # nothing of it is worth keeping
    # Rules and dashboards go by it; the operator takes it from the service.
    assert found["Service"]["metadata"]["labels"][monitor["jobLabel"]] == "bagua-autotune"


def test_a_copy_is_restored_on_the_service_s_volume() -> None:
    restore, service = pod("restore.yaml"), pod("cluster.yaml")
    assert restore["spec"]["securityContext"] == service["spec"]["securityContext"]
    (container,), (served,) = restore["spec"]["containers"], service["spec"]["containers"]
    # It takes no requests, whose bodies the service keeps in /tmp.
    data = mounted("cluster.yaml", served)["/data"]
    assert mounted("restore.yaml", container) == {"/data": data}
    program, command, file = container["command"]
    assert program == "bagua-autotune"
    assert cli.get_command(Context(cli), command) is not None
    page = (ROOT / "docs" / "operating.md").read_text()
    assert f"bagua-autotune backup {file}\n" in page
    name = service["metadata"]["labels"]["app.kubernetes.io/name"]
    assert f"--selector app.kubernetes.io/name={name}\n" in page
    assert restore["metadata"]["labels"]["app.kubernetes.io/name"] != name


def test_the_cron_job_asks_the_service_and_is_not_taken_for_it() -> None:
    template = resources("cronjob.yaml")["CronJob"]["spec"]["jobTemplate"]["spec"]["template"]
    (prune,) = template["spec"]["containers"]
    program, *arguments = prune["command"]
    assert program == "bagua-autotune"
    name, command, rest = cli.resolve_command(Context(cli), arguments)
    assert command is not None
    given = command.make_context(name, rest).params
    service = resources("cluster.yaml")["Service"]
    assert given["url"] == f"http://{service['metadata']['name']}:{Settings().port}"
    assert (name, given["days"]) == ("prune", 90)
    assert [found["name"] for found in prune["env"]] == [ENVIRONMENT["token"]]
    # The NetworkPolicy would keep it from asking, and the Service would send it requests.
    selector = service["spec"]["selector"]
    assert not selector.items() <= template["metadata"]["labels"].items()
    (deployed,) = pod("cluster.yaml")["spec"]["containers"]
    assert prune["image"] == deployed["image"]
    assert prune["securityContext"] == deployed["securityContext"]


@pytest.mark.parametrize("name", SERVED)
def test_tmp_and_memory_are_bounded(name: str) -> None:
    (service,) = (found for found in containers(name) if found["name"] == "autotune")
    assert service["resources"]["limits"]["memory"] in ("1Gi", "2Gi")
    size_mib = int(mounted(name, service)["/tmp"]["emptyDir"]["sizeLimit"].removesuffix("Mi"))
    assert size_mib * 1024**2 > MOST_BUFFERED_BYTES


def test_the_ingress_leads_to_the_service_by_tls() -> None:
    service = resources("cluster.yaml")["Service"]
    ingress = resources("ingress.yaml")["Ingress"]
    spec = ingress["spec"]
    ((rule,), (tls,)) = spec["rules"], spec["tls"]
    assert tls["hosts"] == [rule["host"]]
    (path,) = rule["http"]["paths"]
    assert path["backend"]["service"]["name"] == service["metadata"]["name"]
    assert path["backend"]["service"]["port"]["name"] in {
        p["name"] for p in service["spec"]["ports"]
    }
    limit = ingress["metadata"]["annotations"]["nginx.ingress.kubernetes.io/proxy-body-size"]
    assert limit == f"{LARGEST_BODY_BYTES // 1024**2}m"


def test_the_pod_monitor_finds_the_sidecars() -> None:
    monitor = resources("podmonitor.yaml")["PodMonitor"]["spec"]
    template = pod("sidecar.yaml")
    assert monitor["selector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
    (endpoint,) = monitor["podMetricsEndpoints"]
    (sidecar,) = template["spec"]["initContainers"]
    assert endpoint["port"] in {port["name"] for port in sidecar["ports"]}
    assert endpoint["path"] == template["metadata"]["annotations"]["prometheus.io/path"]
    (relabelling,) = endpoint["relabelings"]
    scraped = yaml.safe_load((ROOT / "dashboards/prometheus/prometheus.yml").read_text())
    assert relabelling == {
        "targetLabel": "job",
        "replacement": scraped["scrape_configs"][0]["job_name"],
    }


def trainings() -> Iterator[tuple[str, list[str], list[dict[str, Any]]]]:
    """The file, the command and the variables of each container that trains."""
    for name in ("sidecar.yaml", "elastic.yaml"):
        (found,) = pod(name)["spec"]["containers"]
        yield name, found["command"], found["env"]
    trainer = resources("trainjob.yaml")["TrainJob"]["spec"]["trainer"]
    yield "trainjob.yaml", trainer["command"], trainer["env"]


@pytest.mark.parametrize(("name", "command", "variables"), list(trainings()))
def test_a_training_s_command_is_torchrun_s_and_its_variables_are_the_client_s(
    name: str, command: list[str], variables: list[dict[str, Any]]
) -> None:
    program, *arguments = command
    assert program == "torchrun"
    assert get_args_parser().parse_args(arguments).training_script == "train.py"
    given = {variable["name"]: variable.get("value", "a-token") for variable in variables}
    assert set(given) <= set(re.findall(r'"(BAGUA_\w+)"', inspect.getsource(environment)))
    read = environment.Environment.read(given)
    assert (read.autotune, read.token) == (True, "a-token")
    # The service of cluster.yaml, by its name in the namespace, or the one beside it.
    service = resources("cluster.yaml")["Service"]["metadata"]["name"]
    host = "127.0.0.1" if name == "sidecar.yaml" else service
    assert read.url == f"http://{host}:{Settings().port}"


def test_the_pods_of_the_elastic_training_meet_under_a_name_that_they_have() -> None:
    found = resources("elastic.yaml")
    job, service = found["Job"], found["Service"]
    (training,) = pod("elastic.yaml")["spec"]["containers"]
    config = get_args_parser().parse_args(training["command"][1:])
    first_pod = f"{job['metadata']['name']}-0.{service['metadata']['name']}"
    assert config.rdzv_endpoint.partition(":")[0] == first_pod
    assert pod("elastic.yaml")["spec"]["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"].items() <= pod("elastic.yaml")["metadata"]["labels"].items()
    assert config.nnodes == f"1:{job['spec']['completions']}"


def test_its_container_runs_the_service_and_wants_the_token(tmp_path: Path) -> None:
    (found,) = containers("cluster.yaml")
    # By the name of its Service, which a service without a token would not answer to.
    headers = {"Host": "bagua-autotune.training.svc.cluster.local"}
    with run_container(found, tmp_path) as service:
        url = address_of(service)
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            path = found[probe]["httpGet"]["path"]
            assert requests.get(url + path, timeout=10).status_code == 200
        annotations = pod("cluster.yaml")["metadata"]["annotations"]
        metrics = url + annotations["prometheus.io/path"]
        assert requests.get(metrics, headers=headers, timeout=10).status_code == 200
        jobs = f"{url}/api/v2/jobs"
        assert requests.get(jobs, headers=headers, timeout=10).status_code == 401
        headers["Authorization"] = f"Bearer {TOKEN}"
        assert requests.get(jobs, headers=headers, timeout=10).status_code == 200
