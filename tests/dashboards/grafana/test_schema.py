"""The dashboards against Grafana's own types, by its compiler: unknown, missing, mistyped keys."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.dashboards.grafana.dashboards import FILES
from tests.outside import GRAFANA, folder_of

pytestmark = pytest.mark.slow

# Of the Grafana that the Foundation SDK is for. The types name enumerations where JSON has their
# values, and lack what the SDK and the Prometheus plug-in know of variables and annotations.
TYPES = """
import type { AnnotationQuery, Dashboard as Board, VariableModel } from "@grafana/schema";
type Plain<T> = T extends string ? `${T}` : T extends object ? { [K in keyof T]: Plain<T[K]> } : T;
type OfPlugin = { expr?: string; titleFormat?: string; step?: string; useValueForTime?: boolean };
type Annotation = AnnotationQuery & OfPlugin & { builtIn?: number };
type Variable = VariableModel & { auto?: boolean; auto_count?: number; auto_min?: string };
export type Dashboard = Plain<Omit<Board, "annotations" | "templating">> & {
  annotations?: { list?: Plain<Annotation>[] };
  templating: { list: Plain<Variable>[] };
};
"""
OPTIONS = ["--noEmit", "--strict", "--skipLibCheck", "--module", "esnext"]
RESOLUTION = ["--moduleResolution", "bundler"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With Grafana's types and their compiler."""
    if shutil.which("node") is None:
        pytest.skip("node is not installed")
    made = tmp_path_factory.mktemp("schema")
    (made / "node_modules").symlink_to(folder_of(GRAFANA) / "node_modules")
    (made / "types.ts").write_text(TYPES)
    return made


def compiled(folder: Path, name: str, text: str) -> str:
    """What the compiler complains of in a dashboard; empty if nothing."""
    code = f'import type {{ Dashboard }} from "./types";\nexport const it: Dashboard = {text};\n'
    (folder / name).write_text(code)
    command = ["node", "node_modules/typescript/bin/tsc", *OPTIONS, *RESOLUTION, name]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False).stdout


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_grafana_knows_every_key(path: Path, folder: Path) -> None:
    assert compiled(folder, "dashboard.ts", path.read_text()) == ""


def test_a_mistake_is_found(folder: Path) -> None:
    broken = FILES[0].read_text().replace('"gridPos"', '"gridPosition"', 1)
    assert "gridPosition" in compiled(folder, "broken.ts", broken)
