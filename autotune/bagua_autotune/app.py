"""Puts the service together. Decides nothing.

A protocol beside /api/v2 is a package of its own, found by an entry point: a function that is
called with the application, the tuner and the settings, and adds its routes.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import entry_points
from typing import Any

from flask import Flask

from bagua_autotune.api import admission, errors, open_routes, v2
from bagua_autotune.api.bodies import LARGEST_BODY_BYTES
from bagua_autotune.metrics import Metrics
from bagua_autotune.metrics.exposition import Siblings
from bagua_autotune.settings import Settings
from bagua_autotune.store import Store
from bagua_autotune.tuning.background import Pool, TunerListener
from bagua_autotune.tuning.tuner import Tuner
from bagua_autotune.views.overviews import Overviews
from bagua_autotune.views.summary import Summaries

logger = logging.getLogger(__name__)


def create_app(
    settings: Settings,
    store: Store,
    listeners: Sequence[TunerListener] = (),
    siblings: Siblings | None = None,
) -> Flask:
    """The WSGI application on an open store; the tuner tells the listeners of what it does, and the
    metrics are those of all siblings."""
    app = Flask("bagua_autotune", static_folder=None)
    app.config["MAX_CONTENT_LENGTH"] = LARGEST_BODY_BYTES
    summaries = Summaries(store)
    metrics = Metrics(store, summaries, siblings, [team.name for team in settings.teams])
    app.extensions[Metrics.__name__] = metrics
    tuner = Tuner(store, settings.searcher, [*listeners, metrics], background=Pool())
    overviews = Overviews(store, settings.searcher, tuner.knowledge, summaries, tuner.is_deciding)
    errors.install(app, metrics.service.count_store_error)
    metrics.service.watch(app)
    admission.install(app, settings)
    admission.install_teams(app, store)
    app.register_blueprint(open_routes.health(store, metrics))
    app.register_blueprint(open_routes.page())
    app.register_blueprint(v2.blueprint(tuner, overviews))
    _add_protocols(app, tuner, settings)
    return app


def application(**settings: Any) -> Callable[..., Iterable[bytes]]:
    """The service as an application for somebody else's server, which finds it by an entry point;
    its store is the one that ``settings`` or the variables name."""
    chosen = Settings.load(os.environ, **settings)
    return create_app(chosen, Store(chosen.database)).wsgi_app


def _add_protocols(app: Flask, tuner: Tuner, settings: Settings) -> None:
    added = set()
    for protocol in entry_points(group="bagua_autotune.protocols"):
        try:
            add = protocol.load()
        except ModuleNotFoundError as error:
            if error.name != protocol.module.partition(".")[0]:
                raise
            continue  # its package was left out
        add(app, tuner, settings)
        added.add(protocol.name)
    if "v1" not in added:
        logger.info("Bagua's own protocol, /api/v1, is not served: bagua_v1 is not installed")
