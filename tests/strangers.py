"""Packages of strangers, as pip would install them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


def lay(
    folder: Path, files: Mapping[str, str], entry_points: Mapping[str, Mapping[str, str]]
) -> None:
    """Lay a package into a folder: its files, and its entry points by group."""
    for name, text in files.items():
        (folder / name).write_text(text)
    about = folder / "stranger-1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: stranger\nVersion: 1\n")
    groups = {
        group: [f"{name} = {value}" for name, value in entries.items()]
        for group, entries in entry_points.items()
    }
    lines = [line for group, entries in groups.items() for line in (f"[{group}]", *entries)]
    (about / "entry_points.txt").write_text("\n".join(lines) + "\n")
