"""Bagua 0.9's own Python interface, on PyTorch of today and tuned by this project.

``import bagua_compat.torch_api as bagua`` is the one line that a Bagua script changes;
``bagua-run --as-bagua`` and ``python -m bagua_compat`` run it without any change.
"""

__version__ = "0.9.2"
"""The version of Bagua whose interface this is."""
