"""Cells of the gain bench: one model on one network, tuned live and measured against the rest.

``cell`` says what a cell is and what is measured in it, ``selection`` what of that is measured
twice; ``run`` runs one, ``jobs`` its jobs, and ``kept`` is what is kept beside its figures.
``figures`` are what it showed, ``goals`` whether that is enough; ``report`` prints it.
``sharded`` has what cells of sharded models share; ``occupancy`` says what GPUs were busy
with.

A cell's JSON file holds::

    cell        the fields of Cell, and its name
    effort      the fields of Effort
    conditions  the link as measured, kernel, processor, commit, load before and after
    fallback    why it ran over loopback; null if over a shaped network
    arms        name -> what ran, as in the specification of jobs/measure.py
    sweep       stage 1: what jobs/measure.py wrote; arms: name -> [[seconds, ...] of each round]
    run_off     stage 2: the same of the arms that the results rest on, in more rounds
    tuning      the live tuning: what jobs/tune.py wrote, and "stored": what the service keeps of it
    allowed     the same of a second tuning in which 16 bits on the wire are allowed, or null
    seconds     what each part took, and the whole: "total"

The cell's folder beside it keeps specifications, logs, the service's database, everything stored of
the tuned job (``job.json``) and its profile for the simulator (``profile.json``). Until all is
measured its name is that of the cell with ``.unfinished``.
"""
