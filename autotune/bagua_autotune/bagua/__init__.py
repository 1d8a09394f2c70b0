"""Bagua 0.9's own protocol, ``/api/v1``, all of it: routes, messages, how its ranks are tuned by
the shared core, and what is stored for that. The rest of the service knows of it where ``app.py``
wires it, and by the letters "v1" where jobs of both protocols stand in one table.
"""
