"""Every network gets an image with a panel for each of its models, and nothing is written twice."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import pytest
from cells.cell import Cell
from cells.figures import Figures, figures_of

from bagua_client import Configuration
from tests.benchmarks.gain.made_up import GOOD, MIB, made_up_cell

pytest.importorskip("matplotlib")

from cells.plot import draw, plot_networks


def figures(cell: Cell) -> Figures:
    return figures_of(made_up_cell(cell, GOOD))


def test_one_image_for_each_network(tmp_path: Path) -> None:
    cells = [
        figures(Cell("resnet50", "1gbit")),
        figures(Cell("vgg16", "1gbit")),
        figures(Cell("vgg16", "unshaped")),
        figures(Cell("vgg16", "unshaped", run=2)),
    ]
    images = plot_networks(cells, tmp_path / "images")
    assert [image.name for image in images] == ["gain-1gbit.png", "gain-unshaped.png"]
    assert all(image.read_bytes()[:4] == b"\x89PNG" for image in images)


@pytest.mark.parametrize("panels", [1, 3])
def test_no_texts_overlap(panels: int) -> None:
    models = ("resnet50", "vgg16", "bert-base")[:panels]
    figure = draw("1gbit", [figures(Cell(model, "1gbit")) for model in models])
    figure.draw_without_rendering()
    boxes = [figure.legends[0].get_window_extent()]
    boxes += [axes.xaxis.label.get_window_extent() for axes in figure.axes]
    boxes += [axes.title.get_window_extent() for axes in figure.axes]
    overlapping = [pair for pair in combinations(boxes, 2) if pair[0].overlaps(pair[1])]
    assert overlapping == []
    width, height = figure.get_size_inches() * figure.dpi
    assert all(box.x0 >= 0 and box.x1 <= width and box.y0 >= 0 for box in boxes)
    assert all(box.y1 <= height for box in boxes)


def test_one_rank_on_each_node_leaves_one_line(tmp_path: Path) -> None:
    cell = Cell("vgg16", "1gbit", nodes=4, ranks_per_node=1)
    flat = {name: time for name, time in GOOD.items() if not name.startswith("leaders")}
    tuned = Configuration(5 * MIB)
    finalists = ("flat 5 MiB", "flat 1 MiB")
    figure = draw("1gbit", [figures_of(made_up_cell(cell, flat, tuned, finalists))])
    entries = [text.get_text() for text in figure.legends[0].get_texts()]
    assert sorted(entries) == [
        "computing alone", "ours, flat", "stock DDP (25: default)", "tuned job"
    ]  # fmt: skip
