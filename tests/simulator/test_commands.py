"""``simulate``, and ``export --profile`` that it reads."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import asdict
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from bagua_autotune.model.job import Event, Observation
from bagua_autotune.store import Store
from bagua_autotune.tuning.tuner import Tuner
from bagua_simulator.algorithms import WAYS
from tests.autotune.cli.conftest import run
from tests.autotune.support import make_spec, present
from tests.simulator.jobs import MIB, SMALL

pytestmark = pytest.mark.slow

NETWORK = ["--nodes", "16", "--ranks-per-node", "8", "--bandwidth", "25Gbit", "--latency", "100us"]
TWO_HOSTS = Path(__file__).parent / "recorded" / "vgg16_two_hosts.json"


def output(*arguments: str) -> str:
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


@cache
def of_file(model: Path, *options: str) -> str:
    """What is said of a file that no test changes: some tests ask the same."""
    return output("simulate", "--model", str(model), *options)


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A job with profiles of its baseline and one that was never profiled."""
    url = f"sqlite:///{tmp_path_factory.mktemp('simulate') / 'a.db'}"
    tuner = Tuner(Store(url))
    tensors = [asdict(tensor) for tensor in SMALL.workload.tensors]
    spec = make_spec(name="digits", tensors=tensors, world_size=8, ranks_per_node=[2] * 4)
    for job in ("profiled", "bare"):
        tuner.register(job, spec)
    trial = present(tuner.open_trial("profiled"))
    for step in range(3):
        assert tuner.store.profiles.add(
            "profiled", trial.index, SMALL.profile(trial.configuration, step), at=1.0
        )
    seconds = SMALL.step_seconds(trial.configuration)
    steps = [Observation(100 + step, (0.9 * seconds,) * 7 + (seconds,)) for step in range(99)]
    # In one step the other ranks' reports are missing.
    tuner.observe("profiled", trial.index, [*steps, Observation(199, (seconds, *[None] * 7))])
    following = present(tuner.open_trial("profiled"))
    assert following.index != trial.index
    tuner.observe("profiled", following.index, [Observation(220, (seconds,) * 8)])
    tuner.take_event("profiled", Event("infeasible", following.index, 221, "out of memory"))
    tuner.store.close()
    return url


@pytest.fixture(scope="module")
def exported(database: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("exported") / "digits.json"
    path.write_text(output("export", "profiled", "--profile", "--database", database))
    return path


def test_several_clusters_have_a_row_for_each_algorithm_in_the_table_and_in_json() -> None:
    """What the table says besides is in the documentation's example."""
    places = ["--nodes", "1,2", "--ranks-per-node", "8", "--bandwidth", "10Gbit,100Gbit"]
    arguments = ["simulate", "--model", "vgg16", *places, "--latency", "50us"]
    _, _, *lines = output(*arguments).splitlines()
    assert "these gradients are on CPUs" not in "\n".join(lines)
    rows = [line.split("\t") for line in lines if "\t" in line]
    # The network between nodes is no matter where there is one node.
    links = [("1 x 8", "-"), ("2 x 8", "10 Gbit/s, 50 us"), ("2 x 8", "100 Gbit/s, 50 us")]
    assert len(rows) == len(links) * len(WAYS)
    _, slow, fast = ({r[2]: float(r[3]) for r in rows if (r[0], r[1]) == link} for link in links)
    assert all(fast[way] <= slow[way] for way in WAYS)
    document = json.loads(output(*arguments, "--json"))
    assert [each["nodes"] for each in document["clusters"]] == [1, 2, 2]
    for way in document["clusters"][1]["ways"]:
        assert way["step_seconds"] * 1e3 == pytest.approx(slow[way["way"]], rel=1e-3)


def test_a_recorded_jobs_algorithms_are_compared_on_its_own_cluster(exported: Path) -> None:
    own = json.loads(of_file(exported, "--json"))
    (cluster,) = json.loads(of_file(exported, "--algorithms", "--json"))["clusters"]
    assert (cluster["nodes"], cluster["ranks_per_node"]) == (4, 2)
    assert cluster["ways"][0]["step_seconds"] == own["default"]["step_seconds"]
    assert "these gradients are on CPUs" in of_file(exported, "--algorithms")


def test_it_draws_png_and_svg(tmp_path: Path) -> None:
    for name, beginning in (("a.png", b"\x89PNG"), ("a.svg", b"<?xml")):
        output("simulate", "--model", "vgg16", "--plot", str(tmp_path / name), *NETWORK)
        assert (tmp_path / name).read_bytes().startswith(beginning)


def test_a_plot_that_cannot_be_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ending = run("simulate", "--model", "vgg16", "--plot", "a.jpg", *NETWORK)
    assert "must end in .png or .svg" in ending.output
    nowhere = run("simulate", "--model", "vgg16", "--plot", str(tmp_path / "x/a.png"), *NETWORK)
    assert "cannot be written: No such file or directory" in nowhere.output
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    missing = run("simulate", "--model", "vgg16", "--plot", str(tmp_path / "a.png"), *NETWORK)
    assert "pip install matplotlib" in missing.output
    assert {ending.exit_code, nowhere.exit_code, missing.exit_code} == {1}


def test_an_exported_job_is_simulated_on_its_own_network(exported: Path) -> None:
    found = json.loads(of_file(exported, "--json"))
    truth = SMALL.step_seconds(SMALL.default)
    assert (found["nodes"], found["ranks_per_node"], found["model"]) == (4, 2, "digits")
    assert found["default"]["step_seconds"] == pytest.approx(truth, rel=0.02)


def test_an_exported_job_is_asked_what_another_network_would_bring(exported: Path) -> None:
    def seconds(*options: str) -> float:
        found = json.loads(of_file(exported, "--json", *options))
        return float(found["default"]["step_seconds"])

    now = seconds()
    assert seconds("--bandwidth", "100Gbit") < now
    assert seconds("--latency", "50ms") > now
    assert seconds("--nodes", "1") < now
    assert seconds("--bandwidth", "100Mbit", "--latency", "1ms") > 2 * now


def test_both_options_together_keep_what_else_was_measured(exported: Path) -> None:
    def document(*options: str) -> dict[str, Any]:
        return dict(json.loads(of_file(exported, "--json", *options)))

    own = document()
    bandwidth, latency = own["bandwidth_bytes_per_second"], own["latency_seconds"]
    again = document("--bandwidth", f"{bandwidth!r}B", "--latency", f"{latency!r}s")
    assert again == own
    assert own["inside_bandwidth_bytes_per_second"] != 100e9


def test_it_says_what_one_channel_reaches_and_whether_the_file_tells(exported: Path) -> None:
    assert "one channel is taken to fill the link" in of_file(exported)
    several = TWO_HOSTS, "--ranks-per-node", "2"
    measured, named = of_file(*several), of_file(*several, "--bandwidth", "100Gbit")
    alone = r"\none channel: 2[01]\.\d Gbit/s between nodes"
    assert re.search(f"{alone}; the figure above is what several reach", measured)
    assert re.search(f"{alone}\n", named)
    found = json.loads(of_file(*several, "--json"))
    assert found["channel_bytes_per_second"] < found["bandwidth_bytes_per_second"] / 2


def test_what_communicating_costs_computing_is_the_jobs_own(exported: Path, tmp_path: Path) -> None:
    def seconds(**change: float) -> float:
        path = tmp_path / "job.json"
        path.write_text(json.dumps({**json.loads(exported.read_text()), **change}))
        found = json.loads(output("simulate", "--model", str(path), "--json"))
        assert {name: found[name] for name in change} == change
        return float(found["default"]["step_seconds"])

    free = seconds(contention=0.0, launch_seconds=0.0)
    assert seconds(contention=0.0, launch_seconds=0.01) > free
    assert seconds(contention=2.0, launch_seconds=0.0) > free


def test_a_profile_says_how_long_the_steps_of_measured_trials_took(exported: Path) -> None:
    """On the slowest rank, without those of the one that ran out of memory."""
    [times] = json.loads(exported.read_text())["step_times"]
    assert times["steps"] == 100
    assert times["seconds"] == pytest.approx(SMALL.step_seconds(times["configuration"]))


def test_the_default_is_the_jobs_own(exported: Path, tmp_path: Path) -> None:
    """Of a file of an earlier release, which does not say it, torch's."""
    own = json.loads(exported.read_text())
    assert own["default"] == {"bucket_bytes": 25 * MIB, "hierarchical": "off"}
    path = tmp_path / "job.json"

    def simulated(default: dict[str, Any] | None) -> tuple[str, dict[str, Any]]:
        path.write_text(json.dumps({**own, "default": default}))
        arguments = ["simulate", "--model", str(path)]
        return output(*arguments), dict(json.loads(output(*arguments, "--json")))

    said, document = simulated({"bucket_bytes": MIB, "hierarchical": "leaders"})
    usual_said, usual = simulated(None)
    assert "\ndefault: bucket 1 MiB, hierarchical: " in said
    assert "\ndefault: bucket 25 MiB, flat: " in usual_said
    assert document["default"]["configuration"]["bucket_bytes"] == MIB
    assert document["best"] == usual["best"]
    ratio = document["default"]["step_seconds"] / document["best"]["step_seconds"]
    assert document["speedup"] == pytest.approx(ratio)
    assert document["speedup"] != usual["speedup"]
    path.write_text(json.dumps({**own, "default": {"channels": 0}}))
    assert "channels is 0" in run("simulate", "--model", str(path)).output


def test_a_job_without_profiles_is_said(database: str) -> None:
    result = run("export", "bare", "--profile", "--database", database)
    assert result.exit_code == 1
    assert "job digits: no step of this job has been profiled" in result.output


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--model", "vgg16"], "need --nodes, --ranks-per-node, --bandwidth and --latency"),
        (["--model", "vgg17", *NETWORK], "there is no file 'vgg17', nor is it one of the models"),
        (["--model", "vgg16", "--bandwidth", "25Gb"], "'25Gb' is no bandwidth; write it like"),
        (["--model", "vgg16", "--latency", "5"], "'5' is no latency; write it like"),
        (["--model", "vgg16", *NETWORK, "--nodes", "0"], "0 is not in the range"),
        (["--model", "vgg16", *NETWORK, "--nodes", "2,x"], "'x' is not a valid integer range"),
        (
            ["--model", "vgg16", *NETWORK, "--algorithms", "--plot", "a.png"],
            "--plot draws one network and no algorithms",
        ),
        ([], "Missing option '--model'"),
    ],
)
def test_what_is_wrong_is_said_in_a_sentence(arguments: list[str], complaint: str) -> None:
    result = run("simulate", *arguments)
    assert result.exit_code != 0
    assert complaint in result.output
    assert isinstance(result.exception, SystemExit), "a sentence, not a traceback"


def test_a_bad_file_is_said_with_the_place(exported: Path, tmp_path: Path) -> None:
    broken = json.loads(exported.read_text())
    broken["tensors"][3]["bytes"] = -4
    (tmp_path / "broken.json").write_text(json.dumps(broken))
    result = run("simulate", "--model", str(tmp_path / "broken.json"))
    assert result.exit_code == 1
    said = "is not a file of 'bagua-autotune export JOB --profile': tensors.3: "
    assert f"{said}Value error, bytes is -4; it must be" in result.output


def test_a_file_without_measured_reductions_needs_the_network(
    exported: Path, tmp_path: Path
) -> None:
    record = {**json.loads(exported.read_text()), "traffic": []}
    path = tmp_path / "bare.json"
    path.write_text(json.dumps(record))
    result = run("simulate", "--model", str(path))
    assert result.exit_code == 2
    assert "give --bandwidth and --latency" in result.output
    output("simulate", "--model", str(path), "--bandwidth", "1Gbit", "--latency", "1ms")
    one_node = {**json.loads(exported.read_text()), "ranks_per_node": [8]}
    path.write_text(json.dumps(one_node))
    output("simulate", "--model", str(path))
    assert "ran on one node" in run("simulate", "--model", str(path), "--nodes", "2").output


def test_the_examples_of_the_documentation_run_as_printed() -> None:
    page = Path(__file__).parents[2] / "docs" / "simulating.md"
    blocks = [
        [line[4:] for line in block.splitlines()]
        for block in page.read_text().split("\n\n")
        if block.startswith("    ")
    ]
    examples = [
        (command[0].split()[1:], printed)
        for command, printed in pairwise(blocks)
        if len(command) == 1 and "--nodes" in command[0]
    ]
    assert len(examples) == 3
    for arguments, printed in examples:
        lines = output(*arguments).splitlines()
        assert [line for line in printed if line != "..." and line not in lines] == []


def test_recomputed_blocks_are_told_with_the_memory_that_fewer_take() -> None:
    one = ["--nodes", "1", "--ranks-per-node", "1", "--bandwidth", "25Gbit", "--latency", "10us"]
    asked = ["simulate", "--model", "gpt2-medium", *one, "--recomputed", "24"]
    room = ["--block-memory", "1536MiB", "--free-memory", "20GiB"]
    done = run(*asked, *room)
    assert done.exit_code == 0, done.output
    rows = [line.split("\t") for line in done.stdout.splitlines()[2:-1]]
    assert [row[0] for row in rows] == ["24", "20", "17", "14", "10"]
    assert [row[2] for row in rows] == ["0 B", "4.5 GiB", "9 GiB", "13.5 GiB", "19.5 GiB"]
    assert "best: 10 recomputed, 1.17x over all, 2.5 ms for each GiB" in done.stdout
    found = json.loads(run(*asked, "--json").stdout)
    assert [row["recomputed"] for row in found["rows"]] == [24, 18, 12, 6, 0]
    for wrong in (["--free-memory", "much"], ["--algorithms"], ["--plot", "a.png"]):
        assert run(*asked, *wrong).exit_code == 2
