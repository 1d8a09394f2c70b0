"""The committed dashboards, and every expression in them as Grafana would send it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

FOLDER = Path(__file__).parents[3] / "dashboards" / "grafana"
FILES = sorted(FOLDER.glob("*.json"))


class Expression(NamedTuple):
    """PromQL, where it stands, and whether Grafana asks for a moment or for a range."""

    where: str
    text: str
    instant: bool


def load(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text(encoding="utf-8")))


def panels(dashboard: Mapping[str, Any]) -> list[dict[str, Any]]:
    """All but the headings."""
    return [panel for panel in dashboard["panels"] if panel["type"] != "row"]


def expressions(path: Path) -> Iterator[Expression]:
    """Of panels, annotations and variables (as the series that a variable's values are of)."""
    dashboard = load(path)
    for panel in panels(dashboard):
        for target in panel["targets"]:
            where = f"{path.stem}: {panel['title']}: {target['refId']}"
            yield Expression(where, target["expr"], bool(target["instant"]))
    for annotation in dashboard.get("annotations", {}).get("list", []):
        yield Expression(f"{path.stem}: {annotation['name']}", annotation["expr"], False)
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":
            found = re.fullmatch(r"label_values\((.*), \w+\)", variable["query"]["query"])
            assert found, variable["query"]
            yield Expression(f"{path.stem}: variable {variable['name']}", found[1], True)


def substituted(expression: str, values: Mapping[str, str]) -> str:
    """With values for ``$name`` and ``${name:raw}``, as Grafana's; no variable is left.

    Raises:
        KeyError: a variable has no value.
    """
    return re.sub(
        r"\$(?:(\w+)|\{(\w+):raw\})", lambda found: values[found[1] or found[2]], expression
    )
