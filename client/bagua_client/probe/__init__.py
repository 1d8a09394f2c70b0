"""What `bagua-autotune system` puts into the processes of a job that it runs, to time its steps.

The folder holds a ``sitecustomize`` and nothing else, so that it can stand on ``PYTHONPATH``.
"""
