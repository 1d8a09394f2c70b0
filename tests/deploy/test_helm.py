"""The Helm chart, by helm itself where it is installed; and the manifests that are made of it."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import requests
import yaml

from tests.deploy.image import address_of, run_container

pytestmark = pytest.mark.slow

tomllib = pytest.importorskip("tomllib", reason="Python 3.11 and newer")

ROOT = Path(__file__).parents[2]
CHART = ROOT / "deploy" / "helm" / "bagua-autotune"
MANIFESTS = ROOT / "deploy" / "kubernetes"
# Of whose resources Kubernetes knows nothing.
OPERATORS = ("monitoring.coreos.com/", "trainer.kubeflow.org/")
POSTGRESQL = "secret.database=postgresql+pg8000://user@host/autotune"
FROM = "networkPolicy.from[0].namespaceSelector.matchLabels.team=vision"
NODE_TERM = (
    "affinity.nodeAffinity.requiredDuringSchedulingIgnoredDuringExecution.nodeSelectorTerms[0]"
    ".matchExpressions[0]"
)
OWN_SECRET = ("secret.existing=own",)
DIGEST = f"sha256:{'0' * 64}"
# A name for each way in which the chart is used, and what is set for it.
WAYS = {
    "own secret": OWN_SECRET,
    "token as a value": ("secret.token=a-token",),
    "replicas": ("secret.token=a-token", POSTGRESQL, "replicas=3", FROM),
    "teams": ("secret.token=a-token", "teams.enabled=true", "secret.teams=[]"),
    "nothing stays": (*OWN_SECRET, "persistence.enabled=false", "networkPolicy.enabled=false"),
    "a claim of one's own": (*OWN_SECRET, "persistence.existingClaim=mine"),
    "everything": (
        *OWN_SECRET,
        "image.tag=1.2.3",
        "imagePullSecrets[0].name=registry",
        "persistence.storageClass=fast",
        "persistence.size=500Mi",
        "retention.thinDays=0",
        "retention.keepDays=30",
        "extraArgs={--searcher,random}",
        "extraEnv[0].name=BAGUA_IS_OUTPUT_AUTOTUNE_LOG,extraEnv[0].value=on",
        "service.type=LoadBalancer,service.port=80,service.annotations.a=b",
        f"image.digest={DIGEST}",
        "ingress.enabled=true,ingress.className=nginx,ingress.tlsSecret=tls",
        "ingress.annotations.cert-manager\\.io/cluster-issuer=own",
        "serviceMonitor.enabled=true,serviceMonitor.labels.release=prometheus",
        "prometheusRule.enabled=true,prometheusRule.labels.release=prometheus",
        "prune.enabled=true,prune.schedule=@daily,prune.olderThanDays=30",
        "podAnnotations.a=b,podLabels.a=b,nodeSelector.a=b",
        "tolerations[0].key=a,tolerations[0].operator=Exists",
        f"{NODE_TERM}.key=a,{NODE_TERM}.operator=Exists",
        "fullnameOverride=tuner",
    ),
}
REFUSED = {
    "it needs a token": (),
    "several replicas share a PostgreSQL": (*OWN_SECRET, "replicas=2"),
    "replicas": (*OWN_SECRET, "replicas=0"),
    "tokn": ("secret.tokn=a",),
    "database": ("secret.token=a", "secret.database=sqlite:////data/autotune.db"),
    "extraEnv": (*OWN_SECRET, "extraEnv[0].name=WORLD_SIZE,extraEnv[0].value=8"),
    "pullPolicy": (*OWN_SECRET, "image.pullPolicy=Sometimes"),
    "name a version": (*OWN_SECRET, "image.tag=latest"),
    "digest": (*OWN_SECRET, "image.digest=sha256:123"),
    "networkPolicy": (*OWN_SECRET, "networkPolicy.from[0].namespace=vision"),
    "olderThanDays": (*OWN_SECRET, "prune.enabled=true,prune.olderThanDays=0"),
}


def helm(*arguments: str, settings: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    if shutil.which("helm") is None:
        pytest.skip("helm is not installed")
    sets = [word for setting in settings for word in ("--set", setting)]
    return subprocess.run(["helm", *arguments, *sets], capture_output=True, text=True, check=False)


def render(settings: tuple[str, ...], release: str = "bagua-autotune") -> dict[str, dict[str, Any]]:
    """The resources, by kind."""
    done = helm("template", release, str(CHART), settings=settings)
    assert done.returncode == 0, done.stderr
    return {found["kind"]: found for found in yaml.safe_load_all(done.stdout) if found}


def container(resources: dict[str, dict[str, Any]]) -> dict[str, Any]:
    (found,) = resources["Deployment"]["spec"]["template"]["spec"]["containers"]
    return dict(found)


@pytest.fixture(params=WAYS, ids=lambda name: name.replace(" ", "-"))
def settings(request: pytest.FixtureRequest) -> tuple[str, ...]:
    return WAYS[request.param]


def test_what_it_makes_is_what_kubernetes_takes(settings: tuple[str, ...]) -> None:
    done = helm("lint", "--strict", str(CHART), settings=settings)
    assert done.returncode == 0, done.stdout + done.stderr
    validator = pytest.importorskip("kubernetes_validate")
    known = 0
    for resource in render(settings).values():
        if not resource["apiVersion"].startswith(OPERATORS):
            validator.validate(resource, validator.latest_version(), strict=True)
            known += 1
    assert known >= 2


@pytest.mark.parametrize("name", sorted(path.name for path in MANIFESTS.glob("*.yaml")))
def test_the_plain_manifests_are_what_kubernetes_takes(name: str) -> None:
    validator = pytest.importorskip("kubernetes_validate")
    for resource in yaml.safe_load_all((MANIFESTS / name).read_text()):
        if not resource["apiVersion"].startswith(OPERATORS):
            validator.validate(resource, validator.latest_version(), strict=True)


def test_names_and_labels_lead_to_one_another(settings: tuple[str, ...]) -> None:
    found = render(settings, "training-tuner")
    name = "tuner" if "fullnameOverride=tuner" in settings else "training-tuner-bagua-autotune"
    assert {resource["metadata"]["name"] for resource in found.values()} == {name}
    labels = found["Deployment"]["spec"]["selector"]["matchLabels"]
    assert labels.items() <= found["Deployment"]["spec"]["template"]["metadata"]["labels"].items()
    assert found["Service"]["spec"]["selector"] == labels
    secrets = {
        variable["valueFrom"]["secretKeyRef"]["name"]
        for variable in container(found)["env"]
        if "valueFrom" in variable
    }
    assert secrets == {found["Secret"]["metadata"]["name"] if "Secret" in found else "own"}
    claims = [
        volume["persistentVolumeClaim"]["claimName"]
        for volume in found["Deployment"]["spec"]["template"]["spec"]["volumes"]
        if "persistentVolumeClaim" in volume
    ]
    made = [found["PersistentVolumeClaim"]["metadata"]["name"]] if (
        "PersistentVolumeClaim" in found
    ) else []  # fmt: skip
    assert claims == made or claims == ["mine"]


def test_several_replicas_reach_postgresql_and_claim_no_volume() -> None:
    found = render(WAYS["replicas"])
    assert "PersistentVolumeClaim" not in found
    assert found["Secret"]["stringData"]["database"] == POSTGRESQL.partition("=")[2]
    policy, of_one = (each["NetworkPolicy"]["spec"] for each in (found, render(OWN_SECRET)))
    assert policy["policyTypes"] == ["Ingress"]
    assert of_one["policyTypes"] == ["Ingress", "Egress"]
    # Who may reach the service can be named.
    (rule,), (anyone,) = policy["ingress"], of_one["ingress"]
    assert rule["from"] == [{"namespaceSelector": {"matchLabels": {"team": "vision"}}}]
    assert "from" not in anyone
    assert anyone["ports"] == rule["ports"]


def test_several_replicas_are_spread_and_go_one_at_a_time() -> None:
    found, alone = render(WAYS["replicas"]), render(OWN_SECRET)
    assert found["PodDisruptionBudget"]["spec"]["maxUnavailable"] == 1
    labels = found["Deployment"]["spec"]["selector"]["matchLabels"]
    assert found["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"] == labels
    spread = found["Deployment"]["spec"]["template"]["spec"]["topologySpreadConstraints"]
    assert [each["topologyKey"].partition("/")[2] for each in spread] == ["hostname", "zone"]
    assert all(each["labelSelector"]["matchLabels"] == labels for each in spread)
    strategy = found["Deployment"]["spec"]["strategy"]
    assert strategy["rollingUpdate"] == {"maxSurge": 0, "maxUnavailable": 1}
    assert alone["Deployment"]["spec"]["strategy"] == {"type": "Recreate"}
    # A budget would only keep the node of a single one from being drained.
    assert "PodDisruptionBudget" not in alone
    assert "topologySpreadConstraints" not in alone["Deployment"]["spec"]["template"]["spec"]


def test_the_image_is_that_of_the_release_and_can_be_pinned() -> None:
    version = yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"]
    assert container(render(OWN_SECRET))["image"] == f"bagua-autotune:{version}"
    made = render(WAYS["everything"])
    (prune,) = made["CronJob"]["spec"]["jobTemplate"]["spec"]["template"]["spec"]["containers"]
    assert container(made)["image"] == prune["image"] == f"bagua-autotune:1.2.3@{DIGEST}"


def test_the_rules_are_those_of_prometheus_without_an_operator() -> None:
    groups = render(WAYS["everything"])["PrometheusRule"]["spec"]["groups"]
    files = sorted((ROOT / "dashboards" / "prometheus" / "rules").glob("*.yml"))
    assert groups == [g for file in files for g in yaml.safe_load(file.read_text())["groups"]]


def test_the_ingress_ends_tls_unless_it_is_told_not_to_and_limits_bodies() -> None:
    (tls,) = render((*OWN_SECRET, "ingress.enabled=true"))["Ingress"]["spec"]["tls"]
    assert tls == {"hosts": ["autotune.example.com"], "secretName": "bagua-autotune-tls"}
    plain = render((*OWN_SECRET, "ingress.enabled=true,ingress.tlsSecret="))
    assert "tls" not in plain["Ingress"]["spec"]
    # Beside other annotations it keeps its limit of bodies.
    assert set(render(WAYS["everything"])["Ingress"]["metadata"]["annotations"]) == {
        "cert-manager.io/cluster-issuer",
        "nginx.ingress.kubernetes.io/proxy-body-size",
    }


def test_a_long_name_is_one_that_a_cron_job_may_have() -> None:
    made = render((*OWN_SECRET, "prune.enabled=true", f"fullnameOverride={'a' * 63}"))
    assert len(made["CronJob"]["metadata"]["name"]) <= 52
    assert len(made["Service"]["metadata"]["name"]) == 63


def test_another_token_starts_the_pods_anew() -> None:
    made = [render((f"secret.token={token}",)) for token in ("one", "two")]
    templates = [found["Deployment"]["spec"]["template"] for found in made]
    assert templates[0]["metadata"]["annotations"] != templates[1]["metadata"]["annotations"]


def test_the_file_of_teams_is_where_the_service_looks_for_it() -> None:
    made = render(WAYS["teams"])
    pod = made["Deployment"]["spec"]["template"]["spec"]
    (its_container,) = pod["containers"]
    env = {each["name"]: each.get("value") for each in its_container["env"]}
    (mounted,) = (each for each in its_container["volumeMounts"] if each["name"] == "teams")
    (volume,) = (each["secret"] for each in pod["volumes"] if each["name"] == "teams")
    (item,) = volume["items"]
    assert env["BAGUA_AUTOTUNE_TEAMS"] == f"{mounted['mountPath']}/{item['path']}"
    assert made["Secret"]["metadata"]["name"] == volume["secretName"]
    assert made["Secret"]["stringData"][item["key"]] == "[]"


@pytest.mark.parametrize("why", REFUSED)
def test_wrong_values_are_refused_with_the_reason(why: str) -> None:
    done = helm("template", "bagua-autotune", str(CHART), settings=REFUSED[why])
    assert done.returncode != 0
    assert why in done.stderr


def test_the_manifests_for_kubectl_are_the_chart_s(tmp_path: Path) -> None:
    if shutil.which("helm") is None:
        pytest.skip("helm is not installed")
    subprocess.run([str(MANIFESTS / "render.sh"), str(tmp_path)], check=True)
    for made in tmp_path.iterdir():
        now, then = (
            [found for found in yaml.safe_load_all(path.read_text()) if found]
            for path in (made, MANIFESTS / made.name)
        )
        assert now == then, f"run deploy/kubernetes/render.sh: {made.name} is not the chart's"
    assert len(list(tmp_path.iterdir())) == 5


def test_it_is_of_the_release_that_it_installs() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["version"] == chart["appVersion"] == project["version"]


def test_its_container_runs_the_service_with_everything_set(tmp_path: Path) -> None:
    with run_container(container(render(WAYS["everything"])), tmp_path) as service:
        assert requests.get(f"{address_of(service)}/readyz", timeout=10).status_code == 200
