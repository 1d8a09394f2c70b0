"""Puts the service together. Decides nothing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from flask import Flask

from bagua_autotune.api import admission, errors, health, page, refusals, teams, v2
from bagua_autotune.api.bodies import LARGEST_BODY_BYTES
from bagua_autotune.bagua import routes as bagua
from bagua_autotune.bagua.tuning import BaguaTuning
from bagua_autotune.csv_log import CsvLog
from bagua_autotune.metrics import Metrics
from bagua_autotune.metrics.siblings import Siblings
from bagua_autotune.settings import Settings
from bagua_autotune.store import Store
from bagua_autotune.tuning.background import Pool
from bagua_autotune.tuning.listener import TunerListener
from bagua_autotune.tuning.tuner import Tuner
from bagua_autotune.views import Overviews, Summaries


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
    metrics = Metrics(store, summaries, siblings, settings.teams)
    app.extensions[Metrics.__name__] = metrics
    listeners = [*listeners, metrics]
    if settings.csv_log:
        listeners.append(CsvLog(Path.cwd()))
    tuner = Tuner(store, settings.searcher, listeners, background=Pool())
    overviews = Overviews(store, settings.searcher, tuner.knowledge, summaries, tuner.is_deciding)
    errors.install(app, metrics.service.count_store_error)
    metrics.service.watch(app)
    admission.install(app, settings)
    refusals.install(app)
    teams.install(app, store)
    app.register_blueprint(health.blueprint(store, metrics))
    app.register_blueprint(page.blueprint())
    app.register_blueprint(v2.blueprint(tuner, overviews))
    v1 = BaguaTuning(tuner, settings.limits, settings.world_size, settings.default_bucket_bytes)
    app.register_blueprint(bagua.blueprint(v1))
    return app
