"""The page's files: what is sent with them, and what they may not hold."""

from __future__ import annotations

import re
from urllib.parse import urljoin

import pytest
from flask.testing import FlaskClient

from bagua_autotune.api.open_routes import FOLDER

SHELLS = ("/", "/jobs/any-id")
REFERENCE = re.compile(r'(?:src|href)="([^"]+)"')
IMPORT = re.compile(r'from "([^"]+)"')
OWN = [path for path in FOLDER.rglob("*.js") if "vendor" not in path.parts]


@pytest.mark.parametrize("shell", SHELLS)
def test_all_that_a_shell_needs_is_served(client: FlaskClient, shell: str) -> None:
    response = client.get(shell)
    assert response.status_code == 200
    found = REFERENCE.findall(response.text)
    assert len(found) > 5
    # Relative, so that the page works below any path of a reverse proxy.
    assert not [reference for reference in found if reference.startswith("/")]
    wanted = [urljoin(shell, reference) for reference in found]
    seen: set[str] = set()
    while wanted:
        path = wanted.pop()
        if path in seen:
            continue
        seen.add(path)
        answer = client.get(path)
        assert answer.status_code == 200, path
        if path.endswith(".js"):
            assert answer.content_type.startswith("text/javascript")
            if "vendor" not in path:
                wanted += [urljoin(path, module) for module in IMPORT.findall(answer.text)]


def test_no_module_is_left_over() -> None:
    found = [(module, name) for module in OWN for name in IMPORT.findall(module.read_text())]
    imported = {(module.parent / name).resolve() for module, name in found}
    entries = {FOLDER / "static/js/jobs.js", FOLDER / "static/js/job.js"}
    assert {path.resolve() for path in OWN} == imported | entries


@pytest.mark.parametrize("path", [*SHELLS, "/static/js/api.js", "/static/css/base.css"])
def test_every_answer_is_protected_and_may_be_kept(client: FlaskClient, path: str) -> None:
    response = client.get(path)
    policy = response.headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "frame-ancestors 'none'" in policy
    assert "unsafe" not in policy
    assert response.headers["X-Content-Type-Options"] == "nosniff"
    assert response.headers["Referrer-Policy"] == "no-referrer"
    assert response.headers["Cache-Control"] == "no-cache"
    again = client.get(path, headers={"If-None-Match": response.headers["ETag"]})
    assert again.status_code == 304


@pytest.mark.parametrize("path", ["/static/../job.html", "/static/%2e%2e/__init__.py", "/static/"])
def test_nothing_else_is_served(client: FlaskClient, path: str) -> None:
    assert client.get(path).status_code in (400, 404)


def test_nothing_is_inline_and_nothing_is_made_of_text() -> None:
    for shell in FOLDER.glob("*.html"):
        text = shell.read_text()
        assert not re.search(r"<script(?![^>]*src=)|<style|\son\w+=|\sstyle=", text), shell
        assert "//" not in text.replace("<!doctype html>", ""), shell  # no other host
    for module in OWN:
        text = module.read_text()
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", text)
        assert "://" not in text.replace("http://www.w3.org/2000/svg", "")  # a namespace


def test_uplot_comes_with_its_licence() -> None:
    vendored = FOLDER / "static/vendor/uplot"
    assert "MIT License" in (vendored / "LICENSE").read_text()
    assert "v1.6.32" in (vendored / "uPlot.iife.min.js").read_text()[:100]
    assert (vendored / "uPlot.min.css").stat().st_size > 1000
