"""Bagua 0.9's own Python interface, on PyTorch of today and tuned by this project.

``import bagua_client.compat.torch_api as bagua`` is the one line that a Bagua script changes;
``bagua-run --as-bagua`` and ``python -m bagua_client.compat`` run it without any change.
"""
