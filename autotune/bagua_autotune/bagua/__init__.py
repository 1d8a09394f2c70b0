"""All of Bagua 0.9's own protocol, ``/api/v1``: routes, messages, how the shared core tunes its
ranks, and what is stored for that. The rest of the service knows only that ``app.py`` adds it, and
the letters "v1" where one table holds jobs of both protocols.
"""
