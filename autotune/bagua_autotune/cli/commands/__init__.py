"""The commands of ``bagua-autotune``, each in the module of its name."""
