"""Which images are named, and how: by digest where one is published, never by `latest`."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import requests
import yaml

from tests.e2e.service import unused_port
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

tomllib = pytest.importorskip("tomllib", reason="Python 3.11 and newer")

ROOT = Path(__file__).parents[2]
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
PINNED = re.compile(r"[\w./-]+:[\w.-]+@sha256:[0-9a-f]{64}")
# Built by whoever runs it: no digest is known before.
OWN = f"bagua-autotune:{VERSION}"
USERS = "your-training:1.0"
TEMPLATES = ROOT / "deploy" / "helm" / "bagua-autotune" / "templates"
MANIFEST_TYPE = "application/vnd.docker.distribution.manifest.v2+json"
REGISTRY = """
version: 0.1
storage: {{filesystem: {{rootdirectory: {folder}}}}}
http: {{addr: "127.0.0.1:{port}"}}
"""


def named() -> Iterator[tuple[str, str]]:
    """File and reference of every image."""
    manifests = sorted((ROOT / "deploy" / "kubernetes").glob("*.yaml"))
    for path in (ROOT / "compose.yaml", *manifests):
        for document in yaml.safe_load_all(path.read_text()):
            yield from ((path.name, image) for image in images(document))
    for base in re.findall(r"^ARG BASE=(\S+)", (ROOT / "Dockerfile").read_text(), re.MULTILINE):
        yield "Dockerfile", base


def images(document: object) -> Iterator[str]:
    if isinstance(document, dict):
        for key, value in document.items():
            if key == "image" and isinstance(value, str):
                yield value
            yield from images(value)
    elif isinstance(document, list):
        for item in document:
            yield from images(item)


@pytest.mark.parametrize(("file", "image"), list(named()))
def test_an_image_of_somebody_else_is_pinned_by_digest(file: str, image: str) -> None:
    assert image in (OWN, USERS) or PINNED.fullmatch(image), f"{file}: {image}"


def test_every_kind_of_file_that_names_images_was_looked_at() -> None:
    assert {file for file, _ in named()} >= {"Dockerfile", "compose.yaml", "cluster.yaml"}
    for template in TEMPLATES.glob("*.yaml"):
        for value in re.findall(r"^\s*(?:- )?image: (.*)", template.read_text(), re.MULTILINE):
            assert value == '{{ include "autotune.image" . | quote }}', template.name


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[str]:
    """A real one on loopback; its host and port."""
    for program in ("docker-registry", "skopeo"):
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed (Debian has it)")
    address = f"127.0.0.1:{unused_port()}"
    configuration = tmp_path / "registry.yml"
    port = address.partition(":")[2]
    configuration.write_text(REGISTRY.format(folder=tmp_path / "registry", port=port))
    command = ["docker-registry", "serve", str(configuration)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_until(lambda: is_there(f"http://{address}/v2/"), "the registry")
        yield address
    finally:
        process.terminate()
        process.wait()


def is_there(url: str) -> bool:
    try:
        return requests.get(url, timeout=5).ok
    except requests.ConnectionError:
        return False


def push(registry: str, tag: str, architecture: str) -> str:
    """An image without layers; its digest."""
    config = json.dumps({"architecture": architecture, "os": "linux"}).encode()
    digest = f"sha256:{hashlib.sha256(config).hexdigest()}"
    begun = requests.post(f"http://{registry}/v2/team/app/blobs/uploads/", timeout=5)
    requests.put(
        begun.headers["Location"], params={"digest": digest}, data=config, timeout=5
    ).raise_for_status()
    layer = {"mediaType": "application/vnd.docker.container.image.v1+json"}
    manifest = {
        "schemaVersion": 2,
        "mediaType": MANIFEST_TYPE,
        "config": {**layer, "size": len(config), "digest": digest},
        "layers": [],
    }
    answer = requests.put(
        f"http://{registry}/v2/team/app/manifests/{tag}",
        data=json.dumps(manifest),
        headers={"Content-Type": MANIFEST_TYPE},
        timeout=5,
    )
    answer.raise_for_status()
    return answer.headers["Docker-Content-Digest"]


def pin(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(ROOT / "deploy" / "pin_images.sh"), *arguments],
        env={**os.environ, "ROOT": str(folder), "SKOPEO_OPTIONS": "--tls-verify=false"},
        capture_output=True,
        text=True,
        check=False,
    )


def test_pins_follow_their_tags(registry: str, tmp_path: Path) -> None:
    image = f"{registry}/team/app:1.0"
    first = push(registry, "1.0", "amd64")
    (tmp_path / "Dockerfile").write_text(f"ARG BASE={image}@{first}\nFROM ${{BASE}}\n")
    compose = tmp_path / "compose.yaml"
    compose.write_text(f"services: {{a: {{image: {image}@{first}}}}}\n")
    assert (pin(tmp_path, "--check").returncode, pin(tmp_path).returncode) == (0, 0)
    second = push(registry, "1.0", "arm64")
    assert second != first
    checked = pin(tmp_path, "--check")
    assert checked.returncode == 1
    assert second in checked.stdout
    assert first in compose.read_text(), "--check writes nothing"
    assert pin(tmp_path).returncode == 0
    for name in ("Dockerfile", "compose.yaml"):
        assert f"{image}@{second}" in (tmp_path / name).read_text()
    compose.write_text(f"services: {{a: {{image: {registry}/team/none:1.0@{first}}}}}\n")
    assert pin(tmp_path).returncode != 0, "the registry does not have it"
    assert first in compose.read_text()
