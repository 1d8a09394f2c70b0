"""Families in the store, which keeps what is known of one as JSON."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from bagua_autotune.bagua.family import Family
from bagua_autotune.store import Store


def register(store: Store, alias: str, key: str, new: Family) -> None:
    """Bind the alias to the family of this key, which is created as ``new`` if there is none."""
    store.add_family(alias, key, _content(new))


def load(store: Store, key: str) -> tuple[Family, list[str]]:
    """A family and its ready order.

    Raises:
        UnknownFamily: there is none of this key.
    """
    content, order = store.family(key)
    return Family.model_validate(content), order


def update(store: Store, key: str, change: Callable[[Family], Family]) -> Family:
    """Replace a family by ``change`` of it, in one transaction.

    Raises:
        UnknownFamily: there is none of this key.
    """

    def changed(content: dict[str, Any]) -> dict[str, Any]:
        return _content(change(Family.model_validate(content)))

    return Family.model_validate(store.change_family(key, changed))


def _content(family: Family) -> dict[str, Any]:
    return family.model_dump(mode="json")
