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

# id() is an address.  Nine digits and more: the heap of a 64-bit process lies above 100 MB,
# while a version or a date (20240131) at the end of a name is shorter and stays.
_ADDRESS = re.compile(r"(.+)_\d{9,20}")


def stem(model_name: str) -> str:
    """The name without a trailing ``_<address>``.

    >>> stem("DistributedDataParallel_V1_9_0_140234234234234")
    'DistributedDataParallel_V1_9_0'
    >>> stem("resnet_50")
    'resnet_50'
    """
    match = _ADDRESS.fullmatch(model_name)
    return match[1] if match else model_name


def family(model_name: str, tensors: Iterable[Tensor]) -> str:
    """What two names of the same model have in common: the stem, and a digest of the tensors.

    The tensors' order does not matter.
    """
    facts = sorted((tensor.name, tensor.elements, tensor.dtype) for tensor in tensors)
    return f"{stem(model_name)}:{digest(json.dumps(facts))}"


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]
