"""The commands of ``bagua-autotune``, each in the module of its name but ``backup``, ``restore``
and ``doctor``, which are in ``maintenance``."""
