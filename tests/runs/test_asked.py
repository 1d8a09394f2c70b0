"""What the options ask for, alone and together."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from bagua_runs.asked import Asked, Options, asked_settings, searched
from bagua_runs.presets import PRESETS
from bagua_runs.space import Condition

pytestmark = pytest.mark.slow

MEGATRON = ("torchrun", "pretrain_gpt.py", "--use-distributed-optimizer", "--overlap-grad-reduce")


def ask(command: tuple[str, ...] = ("job",), **options: Any) -> Asked:
    return asked_settings(Options(**options), command, {"NCCL_BUFFSIZE": "1MiB"})


@pytest.fixture
def ds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "ds.json"
    path.write_text(
        json.dumps({"zero_optimization": {"stage": 2, "reduce_bucket_size": 2e8, "x": "auto"}})
    )
    return path


DEEPSPEED = ("deepspeed", "train.py", "--deepspeed", "--deepspeed_config", "ds.json")


def test_options_name_their_settings(ds: Path) -> None:
    asked = ask(
        ("job", "--x=2", "ds.json"),
        variables=["NCCL_BUFFSIZE=1MiB,2MiB"],
        arguments=["--x=1..4", "--fast"],
        json_keys=["./ds.json:zero_optimization.x=1,2", "ds.json:zero_optimization.stage=1,2"],
        only_with=[("--x", "--fast=on")],
        takes_memory=["--x"],
    )
    own = {name: setting.own for name, setting in asked.settings.items()}
    assert own == {
        "NCCL_BUFFSIZE": "1MiB",
        "--x": "2",
        "--fast": "off",
        "./ds.json:zero_optimization.x": "auto",
        "./ds.json:zero_optimization.stage": "2",
    }
    assert asked.settings["--x"].takes_memory
    assert asked.settings["--x"].condition == Condition("--fast", ("on",))


def test_what_an_option_names_replaces_the_values_of_a_preset() -> None:
    asked = ask(MEGATRON, presets=["megatron"], arguments=["--ddp-bucket-size=1e6,2e6"])
    setting = asked.settings["--ddp-bucket-size"]
    assert setting.values == ("1000000", "2000000")
    assert setting.condition == Condition("--overlap-grad-reduce", ("on",))


def names(asked: Asked, only: tuple[str, ...] = ()) -> list[str]:
    return [setting.name for setting in searched(asked.settings, only)]


def test_a_condition_comes_before_what_depends_on_it() -> None:
    asked = ask(
        arguments=["--a=1,2", "--b=1,2", "--c"], only_with=[("--a", "--b=1"), ("--b", "--c=on")]
    )
    assert names(asked) == ["--c", "--b", "--a"]


def test_a_condition_on_what_is_not_varied_is_decided_by_the_own_value() -> None:
    options: dict[str, Any] = {
        "arguments": ["--a=1,2", "--b=1,2", "--c"],
        "only_with": [("--a", "--b=1"), ("--b", "--c=on")],
    }
    # Neither --b=1 nor --c is in the command.
    assert names(ask(**options), ("--a",)) == []
    assert names(ask(**options), ("--b",)) == []
    assert names(ask(("job", "--b=1"), **options), ("--a",)) == ["--a"]
    assert names(ask(("job", "--c"), **options), ("--a", "--b")) == ["--b", "--a"]
    [setting] = searched(ask(("job", "--c"), **options).settings, ["--b"])
    assert setting.condition is None


def test_conditions_in_a_circle_are_refused() -> None:
    asked = ask(arguments=["--a=1,2", "--b=1,2"], only_with=[("--a", "--b=1"), ("--b", "--a=1")])
    with pytest.raises(ValueError, match="goes round in a circle: --a, --b"):
        searched(asked.settings)


@pytest.mark.parametrize("stage", ["1", "2", "3"])
def test_a_preset_of_deepspeed_is_for_its_stage(ds: Path, stage: str) -> None:
    if stage == "2":
        assert ask(DEEPSPEED, presets=["deepspeed-zero2"]).settings
        return
    with pytest.raises(ValueError, match=f"stage is {stage}; here it is 2"):
        ask(DEEPSPEED, presets=[f"deepspeed-zero{stage}"])


@pytest.mark.parametrize("option", ["--deepspeed_config=", "--deepspeed ", "--ds-config "])
def test_the_file_of_deepspeed_is_found_in_the_command(ds: Path, option: str) -> None:
    command = ("torchrun", "train.py", *f"{option}ds.json".split())
    assert (
        "ds.json:zero_optimization.overlap_comm"
        in ask(command, presets=["deepspeed-zero2"]).settings
    )


def test_what_may_take_more_memory_or_changes_numbers_is_left_out_and_said(ds: Path) -> None:
    asked = ask(DEEPSPEED, presets=["deepspeed-zero2"])
    prefix = "ds.json:zero_optimization."
    sizes = asked.settings[f"{prefix}reduce_bucket_size"].levels
    assert max(level for level in sizes if isinstance(level, int)) == 200_000_000
    assert names(asked) == [
        f"{prefix}reduce_bucket_size",
        f"{prefix}allgather_bucket_size",
        f"{prefix}reduce_scatter",
        f"{prefix}use_multi_rank_bucket_allreduce",
    ]
    assert asked.left_out == [
        f"{prefix}reduce_bucket_size=500000000,1000000000: may take more memory (--allow memory)",
        f"{prefix}allgather_bucket_size=1000000000,2000000000: may take more memory "
        "(--allow memory)",
        f"{prefix}overlap_comm=true: may take more memory (--allow memory)",
        "ds.json:communication_data_type: changes the numbers (--allow numbers)",
    ]
    more = ask(DEEPSPEED, presets=["deepspeed-zero2"], allowed=["memory", "numbers"])
    assert more.left_out == []
    assert "ds.json:communication_data_type" in names(more)
    assert f"{prefix}overlap_comm" in names(more)


def test_beside_a_word_no_size_is_known_to_take_no_more_memory(ds: Path) -> None:
    content = {"zero_optimization": {"stage": 3, "reduce_bucket_size": "auto"}}
    ds.write_text(json.dumps(content))
    name = "ds.json:zero_optimization.reduce_bucket_size"
    assert name not in names(ask(DEEPSPEED, presets=["deepspeed-zero3"]))
    assert name in names(ask(DEEPSPEED, presets=["deepspeed-zero3"], allowed=["memory"]))


def test_megatrons_settings_depend_on_the_overlap() -> None:
    asked = ask(MEGATRON, presets=["megatron"])
    assert names(asked) == [
        "--overlap-grad-reduce",
        "--ddp-bucket-size",
        "--overlap-param-gather",
        "--ddp-pad-buckets-for-high-nccl-busbw",
    ]
    with pytest.raises(ValueError, match="whose --use-distributed-optimizer is on; here it is off"):
        ask(("torchrun", "pretrain_gpt.py"), presets=["megatron"])
    with pytest.raises(ValueError, match="whose --ddp-num-buckets is not set; here it is 4"):
        ask((*MEGATRON, "--ddp-num-buckets", "4"), presets=["megatron"])


@pytest.mark.parametrize("version", [None, 1, 2])
def test_fsdp_is_for_the_first_version(tmp_path: Path, version: int | None) -> None:
    path = tmp_path / "accelerate.yaml"
    config = {} if version is None else {"fsdp_version": version}
    path.write_text(yaml.safe_dump({"fsdp_config": config}))
    command = ("accelerate", "launch", "--config_file", str(path), "train.py")
    if version == 2:
        with pytest.raises(ValueError, match="fsdp_version is 1 or not set; here it is 2"):
            ask(command, presets=["fsdp"])
        return
    asked = ask(command, presets=["fsdp"], allowed=["memory"])
    assert len(names(asked)) == 3


def test_presets_go_together(ds: Path) -> None:
    asked = ask(DEEPSPEED, presets=["deepspeed-zero2", "nccl-ib"])
    found = names(asked)
    assert "ds.json:zero_optimization.reduce_scatter" in found
    place = found.index("NCCL_IB_QPS_PER_CONNECTION")
    assert found[place + 1] == "NCCL_IB_SPLIT_DATA_ON_QPS"
    # The user's own is 1 MiB.
    assert max(map(int, asked.settings["NCCL_BUFFSIZE"].values)) == 2**20


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_sound(name: str) -> None:
    """Each condition names another entry and some of its values; each value in force is one of
    the values; each has its source."""
    entries = {entry.name: entry for entry in PRESETS[name].entries}
    assert len(entries) == len(PRESETS[name].entries)
    for entry in entries.values():
        assert entry.source.startswith("https://")
        assert entry.assumed is None or entry.assumed in entry.values
        if entry.only_with is not None:
            other = entries[entry.only_with.name]
            assert set(entry.only_with.values) < set(other.values)
            assert other.kind == entry.kind or "switch" in (other.kind, entry.kind)
        if entry.takes_memory and all(value.isdigit() for value in entry.values):
            assert list(map(int, entry.values)) == sorted(map(int, entry.values))
