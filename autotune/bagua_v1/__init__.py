"""Bagua 0.9's own protocol, ``/api/v1``: routes, messages, how the service's tuner tunes its ranks,
and the log that one of Bagua's variables asks for.

The service finds ``routes.install`` by an entry point and imports nothing of this; it knows "v1" as
the protocol of jobs that it stores, and shows those without this package, too.
"""
