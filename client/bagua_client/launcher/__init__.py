"""Starts an unmodified training script, in which our class stands under the name of torch's.

``python -m bagua_client`` and ``bagua-run`` start the programs; ``flags`` has the options of both.
Through ``inheritance`` every process of the job does the ``replacement`` when it imports torch.
"""

from bagua_client.launcher.replacement import replace_torchs_class

__all__ = ["replace_torchs_class"]
