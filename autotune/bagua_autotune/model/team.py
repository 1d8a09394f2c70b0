"""A team: whose token reaches its own jobs only."""

from __future__ import annotations

import hashlib
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, SecretStr, TypeAdapter, model_validator

TeamName = Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,64}$")]


class Team(BaseModel):
    """An entry of the file of teams. It has either the token, or its SHA-256 in hexadecimal.

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
