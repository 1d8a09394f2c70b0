"""Keeps a copy of the tuning on every node, as a service beside rank 0 is lost with its host.

After each trial rank 0 gets a copy of a few kilobytes from its service, and sends it with the next
command; the first rank of each node writes it to a file. When the training is started again, the
nodes offer their copies over the store of the process group, and rank 0 gives the newest one to its
service. If any of this fails, the job is tuned without the copy.
"""

from __future__ import annotations

import base64
import hashlib
import json
import logging
import os
import tempfile
import threading
import time
import zlib
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from bagua_client.communication.communicator import Communicator
from bagua_client.environment import Environment
from bagua_client.torch_private import groups as torch_groups

logger = logging.getLogger(__name__)

LARGEST_BYTES = 256 * 1024
"""The largest size of a copy as it is kept; a larger one, of a model with very many tensors, is
not."""
LARGEST_TEXT_BYTES = 64 * LARGEST_BYTES
MOST_FILES = 100
"""The oldest go first; there is one for each job's name."""


class Handover:
    """Hands over one model's copy, on one rank.

    With ``BAGUA_AUTOTUNE_URL`` there is nothing to hand over: that service outlives the job. One
    that begins afresh takes nothing over, and leaves what it finds as ever.

    Args:
        name: the job's.

    Attributes:
        is_needed: whether there is anything to hand over.
        is_across: whether it has to reach other nodes.
    """

    def __init__(self, name: str, communicator: Communicator, environment: Environment) -> None:
        nodes = communicator.topology.nodes
        self._rank = communicator.rank
        self._nodes = len(nodes)
        self._node = next((n for n, ranks in enumerate(nodes) if ranks[0] == self._rank), None)
        self._is_too_large = False
        self._is_fresh = environment.fresh
        self.is_needed = environment.url is None
        self.is_across = self.is_needed and self._nodes > 1
        self._place = f"bagua/copies/{communicator.name}/{name}"
        self._file = _folder() / f"{hashlib.sha256(name.encode()).hexdigest()[:32]}.copy"

    def offer(self) -> None:
        """Offer rank 0 what this node kept. All ranks come here before they next wait for one
        another, and rank 0 takes it after that."""
        store = torch_groups.store()
        if not self.is_needed or self._is_fresh or self._node is None or store is None:
            return
        try:
            kept = _read(self._file)
            if kept is not None:
                # Last its time: whoever finds that finds the copy.
                store.set(f"{self._place}/{self._node}", base64.b64encode(kept).decode())
                store.set(f"{self._place}/{self._node}/at", str(_stamp(kept)))
        except Exception as error:
            logger.info("autotune: this node cannot send its copy of earlier runs (%r)", error)

    def take(self) -> dict[str, Any] | None:
        """Return, on rank 0, the newest copy that was offered."""
        store = torch_groups.store()
        if not self.is_needed or self._is_fresh or store is None:
            return None
        try:
            places = [f"{self._place}/{node}" for node in range(self._nodes)]
            offered = [place for place in places if store.check([f"{place}/at"])]
            stamps = {place: float(store.get(f"{place}/at")) for place in offered}
            if not stamps:
                return None
            newest = max(stamps, key=lambda place: stamps[place])
            return unpack(base64.b64decode(store.get(newest)))
        except Exception as error:
            logger.info("autotune: the nodes' copies of earlier runs cannot be read (%r)", error)
            return None

    def share(self, copy: Mapping[str, Any]) -> str | None:
        """Keep the copy on rank 0's node; return the text that other nodes need, if there
        are any.
        """
        text = pack(copy)
        if text is None:
            if not self._is_too_large:
                logger.info(
                    "autotune: the tuning's data are too large to be copied to the other nodes, "
                    "and are lost with the host of rank 0. A service of its own "
                    "(BAGUA_AUTOTUNE_URL) would keep them"
                )
            self._is_too_large = True
            return None
        self.write(text)
        return text if self.is_across else None

    def keep(self, text: str | None) -> None:
        """Keep on each node what rank 0 sent; its own wrote it already. Never waits."""
        if text and self._node is not None and self._rank != 0:
            threading.Thread(target=self.write, args=[text], daemon=True).start()

    def write(self, text: str) -> None:
        """Write it to this node's file. May take long, if the disk does."""
        try:
            _write(self._file, base64.b64decode(text))
        except (OSError, ValueError) as error:
            logger.info("autotune: this node cannot write its copy of the tuning (%s)", error)


def pack(copy: Mapping[str, Any]) -> str | None:
    """The copy as text, with its time; None: it is too large."""
    packed = zlib.compress(json.dumps(copy, separators=(",", ":")).encode())
    stamped = f"{time.time():.6f}\n".encode() + packed
    return base64.b64encode(stamped).decode() if len(stamped) <= LARGEST_BYTES else None


def unpack(stamped: bytes) -> dict[str, Any]:
    """The copy that was packed. Raises ValueError if it is none."""
    _stamp(stamped)
    inflater = zlib.decompressobj()
    try:
        text = inflater.decompress(stamped.partition(b"\n")[2], LARGEST_TEXT_BYTES)
        copy = json.loads(text) if inflater.eof else None
    except (zlib.error, RecursionError) as error:
        raise ValueError(f"it is damaged: {error}") from error
    if not isinstance(copy, dict):
        raise ValueError("it is not a copy of a tuning")
    return copy


def is_of(copy: Mapping[str, Any], description: Mapping[str, Any]) -> bool:
    """Whether it is of the model that is described: another may have the same name by now."""

    def sizes(tensors: Any) -> list[Any]:
        return [(tensor["bytes"], tensor["dtype"], tensor["group"]) for tensor in tensors]

    try:
        return sizes(copy["tensors"]) == sizes(description["tensors"])
    except (KeyError, TypeError):
        return False


def _stamp(stamped: bytes) -> float:
    at = float(stamped[:32].partition(b"\n")[0])
    if not 0 <= at < 1e12:
        raise ValueError(f"its time is not valid: {at}")
    return at


def _folder() -> Path:
    """Return the folder of copies, beside the database of a service that rank 0 starts."""
    home = os.environ.get("XDG_DATA_HOME", "")
    folder = Path(home) if os.path.isabs(home) else Path(os.path.expanduser("~/.local/share"))
    return folder / "bagua-autotune" / "copies"


def _read(file: Path) -> bytes | None:
    with suppress(OSError, ValueError), file.open("rb") as opened:
        kept = opened.read(LARGEST_BYTES + 1)
        unpack(kept)
        return kept if len(kept) <= LARGEST_BYTES else None
    return None


def _write(file: Path, stamped: bytes) -> None:
    """Readable by this user alone; whole or not at all, and never in the place of a newer one."""
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    kept = _read(file)
    if kept is not None and _stamp(kept) > _stamp(stamped):
        return
    handle, temporary = tempfile.mkstemp(dir=file.parent)
    try:
        with os.fdopen(handle, "wb") as opened:
            opened.write(stamped)
        os.replace(temporary, file)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise
    _forget_oldest(file.parent)


def _forget_oldest(folder: Path) -> None:
    by_age = sorted(folder.glob("*.copy"), key=lambda file: file.stat().st_mtime)
    for file in by_age[:-MOST_FILES]:
        with suppress(OSError):
            file.unlink()
