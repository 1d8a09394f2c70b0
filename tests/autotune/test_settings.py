from __future__ import annotations

import pytest
from pydantic import ValidationError

from bagua_autotune.model.job import Limits
from bagua_autotune.settings import Settings


def test_bagua_s_variables_and_defaults_are_kept() -> None:
    settings = Settings.load({})
    assert (settings.host, settings.port, settings.max_samples) == ("127.0.0.1", 8123, 60)
    assert (settings.trial_seconds, settings.warmup_seconds) == (5.0, 30.0)
    assert settings.default_bucket_bytes == 10 * 1024**2
    assert settings.database.startswith("sqlite:///")
    environment = {
        "BAGUA_SERVICE_PORT": "9000",
        "BAGUA_AUTOTUNE_MAX_SAMPLES": "12",
        "BAGUA_AUTOTUNE_SAMPLING_CONFIDENCE_TIME_S": "2.5",
        "BAGUA_AUTOTUNE_WARMUP_TIME_S": "0",
        "BAGUA_IS_OUTPUT_AUTOTUNE_LOG": "1",
        "WORLD_SIZE": "8",
        "BAGUA_AUTOTUNE_DATABASE": "sqlite:////data/a.db",
    }
    settings = Settings.load(environment)
    assert (settings.port, settings.world_size, settings.csv_log) == (9000, 8, True)
    assert settings.database == "sqlite:////data/a.db"
    assert settings.limits == Limits(max_samples=12, trial_seconds=2.5, warmup_seconds=0.0)


@pytest.mark.parametrize(
    ("value", "is_on"),
    [
        *((value, True) for value in ("1", "true", "Yes", "on", "/tmp/log", "2")),
        *((value, False) for value in ("0", "False", "no", " OFF ")),
    ],
)
def test_the_csv_log_is_on_for_any_text_that_does_not_say_off(value: str, is_on: bool) -> None:
    assert Settings.load({"BAGUA_IS_OUTPUT_AUTOTUNE_LOG": value}).csv_log is is_on


def test_several_processes_share_a_database_that_is_not_in_memory_and_have_no_parent() -> None:
    """That of PostgreSQL may have no name in its URL."""
    environment = {"BAGUA_AUTOTUNE_DATABASE": "postgresql://somebody@somewhere"}
    assert Settings.load(environment, processes=2).processes == 2
    for given, words in (
        ({"processes": 0}, "greater than or equal to 1"),
        ({"processes": 2, "database": "sqlite://"}, "a database that is not in memory"),
        ({"processes": 2, "parent_pid": 1}, "ends with its parent has one process"),
    ):
        with pytest.raises(ValidationError, match=words):
            Settings.load(environment, **given)


def test_what_is_given_goes_before_the_environment() -> None:
    environment = {"BAGUA_SERVICE_PORT": "9000", "WORLD_SIZE": ""}
    settings = Settings.load(environment, port=0, world_size=None)
    assert (settings.port, settings.world_size) == (0, None)
    assert Settings.load({"BAGUA_SERVICE_PORT": "-1"}).port == 8123


def test_a_previous_token_follows_another() -> None:
    """Alone it would guard nothing."""
    with pytest.raises(ValidationError, match=r"previous_token\n.*needs BAGUA_AUTOTUNE_TOKEN"):
        Settings.load({"BAGUA_AUTOTUNE_PREVIOUS_TOKEN": "old"})


@pytest.mark.parametrize("value", ["x", "-2", "70000"])
def test_nonsense_is_refused(value: str) -> None:
    with pytest.raises(ValidationError, match="port"):
        Settings.load({"BAGUA_SERVICE_PORT": value})
