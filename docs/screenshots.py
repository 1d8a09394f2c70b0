"""Makes the pictures of the page in docs/images: real service, real browser, simulated jobs.

Run in the root of the repository as ``python -m docs.screenshots``; it needs the development
requirements and Chromium.  The jobs are those of the simulator, driven through the real tuner, and
end at the present moment.  ``--only NAME`` makes one picture, ``--folder`` puts them elsewhere,
``--all`` adds the cases that a change of the page is looked at with (few trials, many trials, few
tensors, many, a long name, narrow screens).
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import click
from PIL import Image
from playwright.sync_api import Browser, FloatRect, sync_playwright

from bagua_autotune.model.job import Event
from bagua_autotune.store import Store
from bagua_autotune.tuning.tuner import Tuner
from bagua_simulator import Simulator
from bagua_simulator.cluster import Cluster, parse_bandwidth
from bagua_simulator.workloads import load
from tests.autotune.server import ServeProcess
from tests.autotune.simulated_job import SimulatedJob
from tests.browser import launched

IMAGES = Path(__file__).parent / "images"
WIDE, NARROW = (1280, 900), (375, 800)
LONG_NAME = "a-training-of-someone-who-puts-everything-into-the-name_" * 3


@dataclass(frozen=True)
class Sketch:
    """A job to be shown: what it trains, where, for how long it has run, and how long ago."""

    job_id: str
    model: str = "resnet50"
    nodes: int = 4
    ranks_per_node: int = 4
    bandwidth: str = "10Gbit"
    steps: int = 4000
    ended: bool = False
    until_tuned: bool = False
    tensors: int | None = None
    seconds_ago: float = 0.0

    def simulator(self) -> Simulator:
        workload = load(self.model)
        if self.tensors is not None:
            tensors, ready = (
                workload.tensors[: self.tensors],
                workload.ready_seconds[: self.tensors],
            )
            workload = replace(workload, tensors=tensors, ready_seconds=ready)
        bandwidth = parse_bandwidth(self.bandwidth)
        return Simulator(workload, Cluster(self.nodes, self.ranks_per_node, bandwidth, 50e-6))


@dataclass(frozen=True)
class Picture:
    """``path`` is the page's; ``until`` is the last element to be seen, by default the page's."""

    name: str
    path: str
    size: tuple[int, int] = WIDE
    scheme: str = "light"
    until: str = "body"
    is_extra: bool = False


# The last one ends now, so that it looks alive.
JOBS = (
    Sketch("gpt2-medium-owt", model="gpt2-medium", nodes=8, ranks_per_node=8, bandwidth="100Gbit"),
    Sketch("resnet50-imagenet", steps=2500),
    Sketch("vgg16-ablation", model="vgg16", nodes=2, bandwidth="25Gbit", steps=60, ended=True),
    Sketch(LONG_NAME, model="bert-large", nodes=16, ranks_per_node=8, steps=160),
    Sketch("gpt2-small-finetune", model="gpt2-small", steps=14),
    Sketch("resnet50-on-512", nodes=64, ranks_per_node=8, bandwidth="100Gbit", steps=40),
    Sketch("three-tensors", steps=60, tensors=3, seconds_ago=150.0),
    Sketch("bert-base-pretraining", "bert-base", 4, 8, bandwidth="40Gbit", until_tuned=True),
)
PICTURES = (
    Picture("page-light", "jobs/bert-base-pretraining", until="#knob-panel"),
    Picture("page-dark", "jobs/bert-base-pretraining", scheme="dark", is_extra=True),
    Picture("page-narrow", "jobs/bert-base-pretraining", NARROW, is_extra=True),
    Picture("jobs", "", is_extra=True),
    Picture("whole", "jobs/bert-base-pretraining", is_extra=True),
    Picture("whole-narrow", "jobs/bert-base-pretraining", NARROW, is_extra=True),
    Picture("jobs-dark", "", scheme="dark", is_extra=True),
    Picture("jobs-narrow", "", NARROW, is_extra=True),
    Picture("finished", "jobs/resnet50-imagenet", is_extra=True),
    Picture("ended-dark", "jobs/vgg16-ablation", scheme="dark", is_extra=True),
    Picture("many-ranks", "jobs/gpt2-medium-owt", is_extra=True),
    Picture("some-of-many-ranks", "jobs/resnet50-on-512", is_extra=True),
    Picture("no-such-job", "jobs/nobody", is_extra=True),
    Picture("just-started", "jobs/gpt2-small-finetune", is_extra=True),
    Picture("three-tensors", "jobs/three-tensors", is_extra=True),
    Picture("long-name", "jobs/long-name", is_extra=True),
    Picture("long-name-narrow", "jobs/long-name", NARROW, is_extra=True),
)


@click.command(help=__doc__)
@click.option("--only", multiple=True, metavar="NAME")
@click.option("--folder", type=click.Path(path_type=Path, file_okay=False), default=IMAGES)
@click.option("--all", "with_extras", is_flag=True)
def main(only: tuple[str, ...], folder: Path, with_extras: bool) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    wanted = [p for p in PICTURES if (p.name in only if only else with_extras or not p.is_extra)]
    with served_jobs() as url, sync_playwright() as playwright, launched(playwright) as browser:
        for picture in wanted:
            take(browser, url, picture, folder / f"{picture.name}.png")
            click.echo(f"{picture.name}.png")


@contextmanager
def served_jobs() -> Iterator[str]:
    """A service on a database with the jobs; its address."""
    with tempfile.TemporaryDirectory() as folder:
        database = Path(folder) / "jobs.db"
        for sketch in JOBS:
            run_job(database, sketch)
        with ServeProcess(database, "--log-level", "error") as service:
            yield service.url


def take(browser: Browser, url: str, picture: Picture, file: Path) -> None:
    width, height = picture.size
    context = browser.new_context(
        viewport={"width": width, "height": height},
        color_scheme="dark" if picture.scheme == "dark" else "light",
        reduced_motion="reduce",
        device_scale_factor=1 if width > 500 else 2,
    )
    page = context.new_page()
    page.goto(f"{url}/{picture.path}")
    page.locator("main").filter(visible=True).wait_for()
    page.wait_for_timeout(1500)
    box = page.locator(picture.until).bounding_box()
    assert box
    clip = FloatRect(x=0, y=0, width=width, height=box["y"] + box["height"] + 16)
    page.screenshot(path=file, full_page=True, clip=clip if picture.until != "body" else None)
    context.close()
    # Few colours, so a palette holds them all, in a third of the bytes.
    with Image.open(file) as image:
        palette = image.convert("RGB").quantize(
            256, Image.Quantize.MAXCOVERAGE, kmeans=2, dither=Image.Dither.NONE
        )
        palette.save(file, optimize=True)


def run_job(database: Path, sketch: Sketch) -> None:
    """Twice: the first time tells how long it takes, so that the second ends when it shall."""
    seconds = _run(Store("sqlite://"), sketch, 0.0)
    store = Store(f"sqlite:///{database}")
    _run(store, sketch, time.time() - seconds - sketch.seconds_ago)
    store.close()


def _run(store: Store, sketch: Sketch, began: float) -> float:
    now = began
    clock: Callable[[], float] = lambda: now  # noqa: E731
    tuner = Tuner(store, clock=clock)
    job_id = "long-name" if sketch.job_id == LONG_NAME else sketch.job_id
    job = SimulatedJob(
        tuner, sketch.simulator(), job_id, seed=1, noise=0.02,
        fingerprint=sketch.job_id[:100], name=sketch.job_id,
    )  # fmt: skip
    for _ in range(sketch.steps):
        job.run(1)
        now += job.true_seconds(job.configuration)
        if job.is_finished and (sketch.ended or sketch.until_tuned):
            break
    if sketch.ended:
        tuner.take_event(job_id, Event("ended", None, job.step))
    return now - began


if __name__ == "__main__":
    main()
