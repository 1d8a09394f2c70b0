"""Serves Bagua's own service in the same way as the first rank of a Bagua job does.

Runs in Bagua's environment; prints ``address:port`` when it listens. It does what
``run_flask_app`` of ``bagua/torch_api/communication.py`` does, which itself cannot be imported
without CUDA, and reads the same environment variables by Bagua's own functions.
"""

from __future__ import annotations

import argparse
import runpy
from pathlib import Path

import bagua  # type: ignore[import-not-found]
from bagua.service.autotune_service import AutotuneService  # type: ignore[import-not-found]
from flask import Flask
from gevent.pywsgi import WSGIServer  # type: ignore[import-not-found,import-untyped,unused-ignore]


def make_service() -> AutotuneService:
    # Its package needs CUDA; this file of it needs nothing.
    env = runpy.run_path(str(Path(bagua.__file__).parent / "torch_api" / "env.py"))
    return AutotuneService(
        world_size=env["get_world_size"](),
        autotune_level=env["get_autotune_level"](),
        max_samples=env["get_autotune_max_samples"](),
        sampling_confidence_time_s=env["get_autotune_sampling_confidence_time_s"](),
        warmup_time_s=env["get_autotune_warmup_time_s"](),
        is_output_autotune_log=env["get_is_output_autotune_log"](),
        default_bucket_size=env["get_default_bucket_size"](),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--host", required=True)
    options = parser.parse_args()
    app = make_service().setup_app(Flask(__name__))
    server = WSGIServer((options.host, 0), app, log=None)
    server.start()
    print(f"{options.host}:{server.server_port}", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
