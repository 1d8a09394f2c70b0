"""What every Python of a job finds at its start, where the job was started by one of our commands.

The folder stands first on ``PYTHONPATH``, which children inherit. Its ``sitecustomize`` acts when
torch has been imported, as its variables say: ``bagua-autotune system`` and ``check`` have the
steps timed, ``check`` and the launcher have ours put in the place of torch's
DistributedDataParallel.
"""

REPLACES_VARIABLE = "BAGUA_REPLACES_DDP"
"""1: torch's class is replaced."""
