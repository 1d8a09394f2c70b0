"""The documentation's site builds without a warning, is complete, and fetches nothing."""

from __future__ import annotations

import html
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import bagua_client
from bagua_autotune.api.openapi import document
from tests.docs.pages import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.e2e]

LOADED = re.compile(r"<(?:script|img|source|iframe|link)\b[^>]*?(?:src|href|srcset)=\"([^\"]*)\"")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("sphinx", reason="the development requirements")
    folder = tmp_path_factory.mktemp("site")
    command = ["sphinx", "--quiet", "--fail-on-warning", "--builder", "html"]
    done = subprocess.run(
        [sys.executable, "-m", *command, str(ROOT / "docs"), str(folder)],
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return folder


def text_of(page: Path) -> str:
    return " ".join(html.unescape(re.sub(r"<[^>]*>", "", page.read_text())).split())


def test_each_page_is_in_the_site_and_in_its_contents(site: Path) -> None:
    contents = (site / "index.html").read_text()
    for page in (ROOT / "docs").rglob("*.md"):
        built = page.relative_to(ROOT / "docs").with_suffix(".html")
        assert (site / built).is_file()
        assert built.name == "index.html" or f'href="{built}"' in contents


def test_what_pages_load_is_part_of_the_site(site: Path) -> None:
    loaded = [
        (page, address)
        for page in site.rglob("*.html")
        if "_static" not in page.parts  # the theme's templates
        for address in LOADED.findall(page.read_text())
    ]
    assert len(loaded) > 100
    for page, address in loaded:
        assert (page.parent / address.partition("?")[0].partition("#")[0]).exists(), address


def test_the_reference_has_every_public_name_of_the_client(site: Path) -> None:
    page = (site / "reference" / "python.html").read_text()
    for name in bagua_client.__all__:
        assert f'id="bagua_client.{name}"' in page or f'id="module-bagua_client.{name}"' in page


def test_the_reference_has_every_request_and_message_of_the_service(site: Path) -> None:
    text = text_of(site / "reference" / "http.html")
    described = document()
    for path, methods in described["paths"].items():
        for method, operation in methods.items():
            assert f"{method.upper()} {path}" in text
            assert operation["summary"] in text
    for name, schema in described["components"]["schemas"].items():
        assert name in text
        for field in schema.get("properties", {}):
            assert field in text
