"""One job that cannot be read must not hide the others."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol, TypeVar

from sqlalchemy.exc import SQLAlchemyError

from bagua_autotune.store.errors import UnknownJob

logger = logging.getLogger(__name__)

Answer = TypeVar("Answer")


class _Identified(Protocol):
    @property
    def id(self) -> str: ...


Item = TypeVar("Item", bound=_Identified)


def read_each(items: Iterable[Item], read: Callable[[Item], Answer]) -> Iterator[Answer]:
    """What ``read`` makes of each job; those it fails on are logged and left out.

    Raises:
        SQLAlchemyError: the store failed, which is nothing of one job's.
    """
    for item in items:
        try:
            answer = read(item)
        except UnknownJob:  # deleted since it was listed
            continue
        except SQLAlchemyError:
            raise
        except Exception as error:
            logger.error("job %s cannot be read and is left out: %r", item.id, error)
            continue
        yield answer
