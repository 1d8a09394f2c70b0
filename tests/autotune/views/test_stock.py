"""What is taken away: the Python for PyTorch's own class."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from bagua_autotune.model.job import Job, Trial
from bagua_autotune.views.stock import stock_ddp_line, stock_ddp_snippet, stock_setting
from bagua_wire.configuration import Configuration
from tests.autotune.support import MIB
from tests.autotune.views.jobs import DEFAULT, FASTER, RESULT, SLOWER, job, reading, trial

FLAT = Configuration(bucket_bytes=4 * MIB, hierarchical="off")
LACKS_HIERARCHY = "stock DDP cannot do the rest of the best configuration: hierarchical"
KEPT = replace(RESULT, configuration=DEFAULT, kept="baseline", speedup=1.0, low=1.0, high=1.0)


def line(of: Job, trials: list[Trial]) -> str:
    return stock_ddp_line(stock_setting(reading(of, trials)))


@pytest.mark.parametrize(
    ("of", "trials", "megabytes", "remark"),
    [
        (
            # Not 1 MiB, the size of the hierarchical one.
            job("finished", RESULT),
            [trial(0, DEFAULT, 0.3), trial(1, FASTER, 0.2), trial(2, FLAT, 0.25)],
            "4",
            "1.20x (1.18 to 1.22) over the default, by trials of the search, not confirmed; "
            + LACKS_HIERARCHY,
        ),
        (
            job("finished", RESULT),
            [trial(0, DEFAULT, 0.3), trial(1, FASTER, 0.2), trial(2, FLAT, 0.298)],
            "",
            "nothing that stock DDP can do is known to be clearly faster than the default; "
            + LACKS_HIERARCHY,
        ),
        (
            job("finished", replace(RESULT, configuration=FLAT)),
            [trial(0, DEFAULT, 0.3), trial(1, FLAT, 0.25), trial(2, SLOWER, 0.2)],
            "4",
            "1.56x (1.51 to 1.60) over the default",
        ),
        (
            # What the search promised, the confirmation did not hold.
            job("finished", KEPT),
            [trial(0, DEFAULT, 0.3), trial(1, FLAT, 0.25)],
            "",
            "nothing is known to be clearly faster than the default",
        ),
        (
            # The machine became twice as fast: half of that was not the setting.
            job(),
            [trial(0, DEFAULT, 0.3), trial(1, FLAT, 0.15), trial(2, DEFAULT, 0.15)],
            "4",
            "1.41x (1.39 to 1.44) over the default, by trials of the search, not confirmed",
        ),
        (job(), [], "", "nothing is known to be clearly faster than the default"),
    ],
)  # fmt: skip
def test_the_line_names_the_best_flat_setting_and_its_own_speed_up(
    of: Job, trials: list[Trial], megabytes: str, remark: str
) -> None:
    change = f"DistributedDataParallel(model, bucket_cap_mb={megabytes})  # "
    assert line(of, trials) == (change if megabytes else "leave your code as it is: ") + remark


@pytest.mark.parametrize(
    ("more", "missing"),
    [
        ({"channels": 1, "first_bucket_bytes": 0, "last_bucket_bytes": 0, "buckets": ()}, ""),
        ({"channels": 2}, "2 channels"),
        ({"buckets": (3, 2)}, "2 explicit buckets"),
        ({"hierarchical": "shards"}, "hierarchical (sharded)"),
        ({"wire_precision": "bf16"}, "bf16 on the wire (changes the numbers)"),
    ],
)
def test_only_what_stock_ddp_can_do_is_flat(more: dict[str, object], missing: str) -> None:
    tried = Configuration({**FLAT, **more})  # type: ignore[dict-item]
    found = stock_setting(reading(job(), [trial(0, DEFAULT, 0.3), trial(1, tried, 0.2)]))
    assert found.missing == missing
    assert found.configuration == (DEFAULT if missing else tried)


def test_what_torch_does_without_arguments_is_pasted_without() -> None:
    """With them all buckets are of one size, and without the first is of 1 MiB."""
    default = Configuration(bucket_bytes=25 * MIB, hierarchical="off", first_bucket_bytes=MIB)
    of = replace(job("finished", replace(KEPT, configuration=default)), baseline=default)
    found = stock_setting(reading(of, [trial(0, default, 0.3)]))
    assert found.missing == ""
    found = found.model_copy(update={"speedup": 1.2})
    assert stock_ddp_line(found).startswith("DistributedDataParallel(model)  # 1.20x")
    smaller = Configuration(default, bucket_bytes=4 * MIB)
    trials = [trial(0, default, 0.3), trial(1, smaller, 0.2)]
    assert stock_setting(reading(replace(of, phase="tuning", result=None), trials)).missing == (
        "first bucket 1 MiB"
    )


def test_the_snippet_is_python() -> None:
    trials = [trial(0, DEFAULT, 0.3), trial(1, FASTER, 0.2), trial(2, FLAT, 0.25)]
    text = stock_ddp_snippet(stock_setting(reading(job("finished", RESULT), trials)))
    compile(text, "snippet", "exec")
    assert f"# S{LACKS_HIERARCHY[1:]}.\nmodel = DistributedDataParallel(model, bucket" in text


SHARDED = {"bucket_bytes": 700, "channels": 1, "kept_units": 0, "prefetch": 0}


def _sharded(**changes: Any) -> Configuration:
    return Configuration({**SHARDED, **changes})


def test_a_sharded_model_gets_calls_of_its_own() -> None:
    kept = _sharded(kept_units=4, prefetch=2, kept_over_micro_batches="on", deferred_reduction="on")
    striped = _sharded(kept_units=4, channels=8)
    of = replace(
        job("finished", replace(RESULT, configuration=striped)),
        baseline=_sharded(),
        software={"sharding": "fully_shard"},
    )
    trials = [trial(0, _sharded(), 0.3), trial(1, striped, 0.2), trial(2, kept, 0.25)]
    setting = stock_setting(reading(of, trials))
    assert (setting.is_sharded, setting.missing) == (True, "8 channels")
    snippet = stock_ddp_snippet(setting)
    assert "DistributedDataParallel" not in snippet
    assert "unit.set_reshard_after_forward(False, recurse=False) for unit in units[-4:]" in snippet
    assert "set_modules_to_forward_prefetch(units[i + 1 : i + 1 + 2])" in snippet
    assert (
        "reshard_after_backward(is_last, recurse=False) for unit in (model, *units[-4:])]"
        in snippet
    )
    assert "# before each micro-batch: model.set_requires_gradient_sync(is_last)" in snippet.lower()
    compile(snippet, "snippet", "exec")
    assert "Torch alone cannot do the rest of the best configuration: 8 channels" in snippet
    assert stock_ddp_line(setting).startswith("units = ")
    assert "\n" not in stock_ddp_line(setting)


def test_an_engine_of_deepspeed_gets_lines_for_its_file() -> None:
    default = Configuration(bucket_bytes=4_000_000, prefetch_bytes=0)
    larger = Configuration(bucket_bytes=8_000_000, prefetch_bytes=2000)
    of = replace(
        job("finished", replace(RESULT, configuration=larger)),
        baseline=default,
        software={"engine": "DeepSpeed 0.19.8, ZeRO stage 3", "element_bytes": "2"},
    )
    setting = stock_setting(reading(of, [trial(0, default, 0.3), trial(1, larger, 0.25)]))
    assert setting.missing == ""
    snippet = stock_ddp_snippet(setting)
    config: dict[str, dict[str, int]] = {"zero_optimization": {"stage": 3}}
    exec(snippet, {"config": config})
    found = {"stage": 3, "reduce_bucket_size": 4_000_000, "stage3_prefetch_bucket_size": 1000}
    assert config == {"zero_optimization": found}
    assert stock_ddp_line(setting).startswith('config["zero_optimization"].update(')
    kept = replace(of, result=replace(RESULT, configuration=default, kept="baseline"))
    nothing = stock_setting(reading(kept, [trial(0, default, 0.3)]))
    assert stock_ddp_snippet(nothing).startswith("# Leave your code as it is.\n# Nothing is known")
    assert stock_ddp_line(nothing).startswith("leave your code as it is: nothing is known")


def test_what_a_client_tells_of_an_engine_is_never_an_error() -> None:
    default = Configuration(bucket_bytes=4000)
    for told in ("", "none", "0", "-3"):
        of = replace(
            job("finished", replace(RESULT, configuration=Configuration(bucket_bytes=1))),
            baseline=default,
            software={"engine": "DeepSpeed", "element_bytes": told},
        )
        assert "reduce_bucket_size=1" in stock_ddp_line(stock_setting(reading(of, [])))


@pytest.mark.parametrize(
    ("count", "words"),
    [
        (4, ("blocks[:4] in checkpoint_wrapper", "= False on layers[4:]", "the layers below 4")),
        (0, ("no block recomputed", "gradient_checkpointing=False", 'mode = "none"')),
    ],
)
@pytest.mark.parametrize("others", [{}, {"bucket_bytes": 4 * MIB, "hierarchical": "off"}])
def test_fewer_recomputed_blocks_are_told_for_what_trainings_use(
    count: int, words: tuple[str, ...], others: dict[str, int | str]
) -> None:
    default, fewer = (Configuration({**others, "recomputed_blocks": n}) for n in (12, count))
    of = replace(job("finished", replace(RESULT, configuration=fewer)), baseline=default)
    setting = stock_setting(reading(of, [trial(0, default, 0.3), trial(1, fewer, 0.25)]))
    text, one = stock_ddp_snippet(setting), stock_ddp_line(setting)
    compile(text, "snippet", "exec")
    assert all(each in text and each in one for each in words)
    assert ("DistributedDataParallel(" in text) == ("DistributedDataParallel(" in one)
    assert ("DistributedDataParallel(" in text) == bool(others)
