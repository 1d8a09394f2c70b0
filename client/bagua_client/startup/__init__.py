"""The folder that our commands put first on ``PYTHONPATH`` of a job, which its processes inherit.

Python imports its ``sitecustomize`` at the start, which acts once torch has been imported. What it
does its variables say: for ``bagua-autotune system`` and ``check`` it times the steps; for
``check`` and the launcher it puts our class in the place of torch's DistributedDataParallel.
"""

REPLACES_VARIABLE = "BAGUA_REPLACES_DDP"
"""1: torch's class is replaced."""
