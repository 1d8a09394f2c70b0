"""The service's settings, from the environment and the command line, and its teams.

Bagua's variables keep their names and defaults.
"""

from __future__ import annotations

import hashlib
import ipaddress
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SecretStr,
    TypeAdapter,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from bagua_autotune.model.job import Limits, TeamName
from bagua_autotune.store.engine.location import default_url, is_in_memory, parse
from bagua_wire.limits import MOST_SAMPLES, SAMPLES


class Team(BaseModel):
    """An entry of the file of teams: its token reaches its own jobs only. It has either the token,
    or its SHA-256 in hexadecimal.

    ``most_jobs``: how many jobs it may have that have not ended; None: any number.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    name: TeamName
    token: SecretStr | None = Field(default=None, min_length=1)
    token_sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")] | None = None
    most_jobs: int | None = Field(default=None, ge=1)

    @model_validator(mode="after")
    def _has_one_token(self) -> Team:
        if (self.token is None) == (self.token_sha256 is None):
            raise ValueError("needs either a token or a token_sha256")
        if self.digest == digest_of(b""):
            raise ValueError("token_sha256 is that of an empty token, which everybody has")
        return self

    @property
    def digest(self) -> bytes:
        """The SHA-256 of its token."""
        if self.token is None:
            return bytes.fromhex(self.token_sha256 or "")
        return digest_of(self.token.get_secret_value().encode())


TEAMS = TypeAdapter(tuple[Team, ...])


def digest_of(token: bytes) -> bytes:
    return hashlib.sha256(token).digest()


ENVIRONMENT = {
    "port": "BAGUA_SERVICE_PORT",
    "database": "BAGUA_AUTOTUNE_DATABASE",
    "token": "BAGUA_AUTOTUNE_TOKEN",
    "previous_token": "BAGUA_AUTOTUNE_PREVIOUS_TOKEN",
    "teams": "BAGUA_AUTOTUNE_TEAMS",
    "allowed_hosts": "BAGUA_AUTOTUNE_ALLOWED_HOSTS",
    "world_size": "WORLD_SIZE",
    "thin_days": "BAGUA_AUTOTUNE_THIN_DAYS",
    "keep_days": "BAGUA_AUTOTUNE_KEEP_DAYS",
    "upkeep_minutes": "BAGUA_AUTOTUNE_UPKEEP_MINUTES",
    "csv_log": "BAGUA_IS_OUTPUT_AUTOTUNE_LOG",
    "default_bucket_bytes": "BAGUA_DEFAULT_BUCKET_SIZE",
    "max_samples": "BAGUA_AUTOTUNE_MAX_SAMPLES",
    "trial_seconds": "BAGUA_AUTOTUNE_SAMPLING_CONFIDENCE_TIME_S",
    "warmup_seconds": "BAGUA_AUTOTUNE_WARMUP_TIME_S",
}
# The client reads BAGUA_AUTOTUNE in the same way, in any case.
OFF = ("", "0", "false", "no", "off")


def host_name(host: str) -> str:
    """The name in a Host header, or the address, without its port; empty where there is none."""
    try:
        name = urlsplit(f"//{host.strip()}").hostname or ""
    except ValueError:
        return ""
    return name.rstrip(".")


def read_teams(path: Path) -> tuple[Team, ...]:
    """The teams of a JSON file. Raises ValueError, which says what is wrong but no token."""
    try:
        return TEAMS.validate_json(path.read_bytes())
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    except ValidationError as error:
        wrong = error.errors(include_url=False, include_input=False, include_context=False)[0]
        where = ".".join(map(str, wrong["loc"]))
        raise ValueError(f"{path}: {where}: {wrong['msg']}") from None


class Settings(BaseModel):
    """All settings of the service, checked."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    host: str = "127.0.0.1"
    port: int = Field(default=8123, ge=0, le=65535)
    database: str = Field(default_factory=default_url)
    token: SecretStr | None = None
    # Accepted, too, while trainings are given a new token one after the other.
    previous_token: SecretStr | None = None
    # Whose tokens reach their own jobs only; given as the path of a JSON file.
    teams: tuple[Team, ...] = ()
    # Further host names of this service, such as that of a reverse proxy.
    allowed_hosts: tuple[str, ...] = ()
    searcher: str = "bayesian"
    trust_network: bool = False
    parent_pid: int | None = None
    # Each is like a replica, with threads and a pool of connections to the database of its own.
    processes: int = Field(default=1, ge=1, le=64)
    csv_log: bool = False
    # A job of 8 ranks takes 0.1 to 2 MB, and 0.1 MB when thinned: 100 a day take 0.9 to 2.2 GB.
    thin_days: float = Field(default=7.0, ge=0, le=36_500)
    keep_days: float = Field(default=90.0, ge=0, le=36_500)
    upkeep_minutes: float = Field(default=60.0, ge=0.01, le=1440)
    # For /api/v1 only: its protocol sends neither these limits nor the world size.
    world_size: int | None = Field(default=None, ge=1)
    default_bucket_bytes: int = Field(default=10 * 1024**2, ge=1, le=2**53)
    max_samples: int = Field(default=SAMPLES, ge=1, le=MOST_SAMPLES)
    trial_seconds: float = Field(default=5.0, gt=0, le=86_400)
    warmup_seconds: float = Field(default=30.0, ge=0, le=86_400)

    @field_validator("port", mode="before")
    @classmethod
    def _unset_port(cls, port: Any) -> Any:
        return 8123 if port == "-1" else port  # Bagua's way of saying unset

    @field_validator("processes")
    @classmethod
    def _can_be_several(cls, processes: int, info: ValidationInfo) -> int:
        if processes > 1 and is_in_memory(parse(info.data.get("database", ""))):
            raise ValueError("several processes need a database that is not in memory")
        if processes > 1 and info.data.get("parent_pid") is not None:
            raise ValueError("a service that ends with its parent has one process")
        return processes

    @field_validator("previous_token")
    @classmethod
    def _follows_another(cls, token: SecretStr | None, info: ValidationInfo) -> SecretStr | None:
        if token is not None and info.data.get("token") is None:
            raise ValueError("needs BAGUA_AUTOTUNE_TOKEN, the token that takes its place")
        return token

    @field_validator("teams", mode="before")
    @classmethod
    def _in_a_file(cls, teams: Any) -> Any:
        return read_teams(Path(teams)) if isinstance(teams, str) else teams

    @field_validator("teams")
    @classmethod
    def _can_be_told_apart(cls, teams: tuple[Team, ...], info: ValidationInfo) -> tuple[Team, ...]:
        own = [info.data.get("token"), info.data.get("previous_token")]
        tokens = [digest_of(token.get_secret_value().encode()) for token in own if token]
        if teams and not tokens:
            raise ValueError("needs BAGUA_AUTOTUNE_TOKEN, the token of whoever runs the service")
        tokens += [team.digest for team in teams]
        for what, values in (("name", [team.name for team in teams]), ("token", tokens)):
            if len(set(values)) < len(values):
                raise ValueError(f"two teams, or a team and the service, have the same {what}")
        return teams

    @field_validator("allowed_hosts", mode="before")
    @classmethod
    def _listed(cls, hosts: Any) -> Any:
        return tuple(hosts.replace(",", " ").split()) if isinstance(hosts, str) else hosts

    @field_validator("allowed_hosts")
    @classmethod
    def _are_names(cls, hosts: tuple[str, ...]) -> tuple[str, ...]:
        for host in hosts:
            if not host_name(host) or "/" in host:
                raise ValueError(f"{host!r} is not the name of a host")
        return hosts

    @field_validator("csv_log", mode="before")
    @classmethod
    def _any_text_is_on(cls, value: Any) -> Any:
        # Bagua reads any text as on, even "0"; here "0" and its like mean off.
        return value.strip().lower() not in OFF if isinstance(value, str) else value

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach the service, judging by its host."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    @property
    def limits(self) -> Limits:
        """The limits of jobs whose protocol sends none."""
        return Limits(
            max_samples=self.max_samples,
            trial_seconds=self.trial_seconds,
            warmup_seconds=self.warmup_seconds,
        )

    @classmethod
    def load(cls, environment: Mapping[str, str], **given: Any) -> Settings:
        """Read the settings from the environment; a given value that is not None or empty overrides
        it.

        Raises:
            pydantic.ValidationError: a value is out of range or of a wrong type.
        """
        values: dict[str, Any] = {
            name: environment[variable]
            for name, variable in ENVIRONMENT.items()
            if environment.get(variable, "") != ""
        }
        return cls(
            **{**values, **{key: value for key, value in given.items() if value not in (None, ())}}
        )
