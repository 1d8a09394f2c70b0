"""Starts an unmodified training script, in which our class stands under the name of torch's.

``python -m bagua_client`` (``script``) and ``bagua-run`` start the programs; ``flags`` has the
options of both. Through the ``job_environment`` every process of the job replaces torch's class
when it imports torch.
"""

from bagua_client.integrations.replacement import replace_torchs_class

__all__ = ["replace_torchs_class"]
