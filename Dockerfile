# The tuning service alone: no torch, no compiler, not root; docs/operating.md runs it. The service's
# environment has no pip; that of the base image stays where it was, and nothing uses it.
#   docker build -t bagua-autotune:0.2.0 .
# It listens on all interfaces, so it needs BAGUA_AUTOTUNE_TOKEN. Workers of Bagua 0.9 cannot send a
# token; for them give the container the argument `--trust-network`.
# deploy/pin_images.sh keeps the digest up to date.
ARG BASE=python:3.11.15-slim-bookworm@sha256:b18992999dbe963a45a8a4da40ac2b1975be1a776d939d098c647482bcad5cba

FROM ${BASE} AS build
WORKDIR /source
# Files with other hashes than those are not installed; deploy/pin_requirements.sh writes them.
COPY deploy/requirements.txt deploy/requirements-build.txt ./
# A layer of its own: the requirements change less often than the code. Their own tests are a
# fifth of it, and nothing else imports them.
RUN python3 -m venv --without-pip /venv \
    && python3 -m pip --python /venv/bin/python install --no-cache-dir \
        --disable-pip-version-check --require-hashes --requirement requirements.txt \
    && find /venv/lib -type d -name tests -prune -exec rm -r {} + \
    && python3 -m venv --without-pip /build \
    && python3 -m pip --python /build/bin/python install --no-cache-dir \
        --disable-pip-version-check --require-hashes --requirement requirements-build.txt
COPY pyproject.toml README.md LICENSE ./
COPY autotune autotune
COPY client client
# --no-deps: the distribution's own requirement is torch, which only the client uses.
RUN python3 -m pip --python /build/bin/python wheel --no-cache-dir \
        --disable-pip-version-check --no-index --no-build-isolation --no-deps --wheel-dir /wheels . \
    && python3 -m pip --python /venv/bin/python install --no-cache-dir \
        --disable-pip-version-check --no-index --no-deps /wheels/*.whl

FROM ${BASE}
LABEL org.opencontainers.image.title="bagua-autotune" \
      org.opencontainers.image.description="Tunes the gradient exchange of running PyTorch jobs" \
      org.opencontainers.image.licenses="MIT"
COPY --from=build /venv /venv
RUN mkdir /data && chown 10001:10001 /data
# A number: Kubernetes cannot tell of a name that it is not root.
USER 10001:10001
# The only place that must be writable; temporary files go there where /tmp is not.
WORKDIR /data
VOLUME /data
ENV PATH=/venv/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 HOME=/data \
    BAGUA_AUTOTUNE_DATABASE=sqlite:////data/autotune.db
EXPOSE 8123
HEALTHCHECK --interval=30s --timeout=5s --start-period=20s CMD ["python", "-c", \
    "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8123/healthz', timeout=4)"]
ENTRYPOINT ["bagua-autotune", "serve", "--host", "0.0.0.0", "--port", "8123"]
