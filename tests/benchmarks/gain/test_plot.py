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
    names = {network: image.name for network, image in images.items()}
    assert names == {"1gbit": "gain-1gbit.png", "unshaped": "gain-unshaped.png"}
    assert all(image.read_bytes()[:4] == b"\x89PNG" for image in images.values())


def test_cells_on_gpus_have_images_of_their_own_with_a_line_for_each_number_of_channels(
    tmp_path: Path,
) -> None:
    cell = Cell("vgg16", "unshaped", ranks_per_node=1, device="cuda")
    assert plot_networks([figures(cell)], tmp_path)["unshaped"].name == "gain-gpus-unshaped.png"
    legend = {text.get_text() for text in draw("unshaped", [figures(cell)]).legends[0].get_texts()}
    assert {f"ours, flat, {channels} channels" for channels in (2, 4, 8)} <= legend


@pytest.mark.parametrize("panels", [1, 2, 3])
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


def test_a_cell_that_was_tuned_again_shows_what_it_was_tuned_to_in_the_run_off() -> None:
    result = made_up_cell(Cell("resnet50", "1gbit"), GOOD)
    del result["sweep"]["arms"]["tuned"]
    found = figures_of(result)
    assert found.sweep["tuned"] == found.run_off["tuned"]
    assert len(draw("1gbit", [found]).axes) == 1


def test_one_rank_on_each_node_leaves_one_line(tmp_path: Path) -> None:
    cell = Cell("vgg16", "1gbit", nodes=4, ranks_per_node=1)
    flat = {name: time for name, time in GOOD.items() if not name.startswith("leaders")}
    figure = draw("1gbit", [figures_of(made_up_cell(cell, flat, Configuration(5 * MIB)))])
    entries = [text.get_text() for text in figure.legends[0].get_texts()]
    assert [entry for entry in entries if entry.startswith("ours")] == [
        "ours, flat: all ranks at once"
    ]


def test_a_panel_says_what_the_tuning_gained_over_the_default_and_over_the_best_of_stock_ddp() -> (
    None
):
    figure = draw("1gbit", [figures(Cell("resnet50", "1gbit"))])
    title = figure.axes[0].title.get_text()
    assert "at its best size 1000 ms" in title
    assert "1.39 and 0.99 times as fast" in title
