"""The names under which Bagua workers register a model.

By default Bagua names a model ``<class>_<id(module)>``: another name in every process, and so
another model for every rank.  Here the number is cut off, and what remains is one job.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable

from bagua_autotune.model.buckets import Tensor

# id() is an address: on 64-bit systems CPython's objects lie in mapped memory, at addresses of
# 12 digits (39 bits) to 15 (48 bits).  Versions, dates and times in seconds are shorter and stay.
_ADDRESS = re.compile(r"(.+)_[1-9]\d{11,14}")


def stem(model_name: str) -> str:
    """The name without a trailing ``_<address>``.

    >>> stem("DistributedDataParallel_V1_9_0_140234234234234")
    'DistributedDataParallel_V1_9_0'
    >>> stem("resnet_50")
    'resnet_50'
    """
    match = _ADDRESS.fullmatch(model_name)
    return match[1] if match else model_name


def family_key(
    model_name: str, tensors: Iterable[Tensor], world_size: int | None, default_bucket_bytes: int
) -> str:
    """A digest of what two names of the same model have in common.

    That is the stem, the tensors in any order, and what the job is tuned with.
    """
    facts = sorted((tensor.name, tensor.elements, tensor.dtype) for tensor in tensors)
    text = json.dumps([stem(model_name), world_size, default_bucket_bytes, facts])
    return hashlib.sha256(text.encode()).hexdigest()
