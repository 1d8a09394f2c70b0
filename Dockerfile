# The tuning service as a sidecar: no torch, no compiler, not root.
#   docker build -t bagua-autotune .
#   docker run -p 8123:8123 -v autotune:/data -e BAGUA_AUTOTUNE_TOKEN=... bagua-autotune
# It listens on all interfaces, so it wants a token; `--trust-network` (as an argument of the
# container) does without, for workers of Bagua 0.9, which cannot send one.
ARG BASE=python:3.11-slim

FROM ${BASE} AS build
WORKDIR /source
COPY pyproject.toml constraints.txt README.md LICENSE ./
# A layer of its own: the requirements change less often than the code.
RUN python3 -c 'import tomllib; \
extras = tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]; \
print(*extras["service"], *extras["postgresql"], sep="\n")' > service.txt \
    && python3 -m venv /venv \
    && /venv/bin/pip install --no-cache-dir --disable-pip-version-check \
        --requirement service.txt --constraint constraints.txt
COPY autotune autotune
COPY client client
# --no-deps: the distribution's own requirement is torch, which only the client uses.
RUN /venv/bin/pip install --no-cache-dir --disable-pip-version-check --no-deps . \
    && /venv/bin/pip uninstall --yes --quiet pip

FROM ${BASE}
COPY --from=build /venv /venv
RUN useradd --uid 10001 --home-dir /data --shell /usr/sbin/nologin autotune \
    && mkdir -p /data && chown autotune /data
USER 10001
WORKDIR /data
VOLUME /data
ENV PATH=/venv/bin:$PATH PYTHONUNBUFFERED=1
EXPOSE 8123
HEALTHCHECK --interval=30s --timeout=5s --start-period=20s CMD ["python", "-c", \
    "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8123/healthz', timeout=4)"]
ENTRYPOINT ["bagua-autotune", "serve", "--host", "0.0.0.0", "--port", "8123", \
    "--database", "sqlite:////data/autotune.db"]
