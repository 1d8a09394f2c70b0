"""How a training script that knows nothing of us is started: with our class under torch's name.

``python -m bagua_client`` and ``bagua-run`` start the programs, ``flags`` are what both take,
``inheritance`` has the processes of the job do the ``replacement`` when they import torch.
"""

from bagua_client.launcher.replacement import replace_torchs_class

__all__ = ["replace_torchs_class"]
