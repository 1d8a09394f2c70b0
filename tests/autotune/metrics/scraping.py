"""Scrapes as Prometheus reads them."""

from __future__ import annotations

from flask.testing import FlaskClient
from prometheus_client.parser import text_string_to_metric_families

Samples = dict[tuple[str, ...], float]


def parsed(text: str) -> Samples:
    """By the sample's name and its labels' values, in the order of their names."""
    return {
        (sample.name, *(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def scrape(client: FlaskClient) -> Samples:
    response = client.get("/metrics")
    assert response.status_code == 200
    return parsed(response.text)


def of(samples: Samples, name: str) -> dict[tuple[str, ...], float]:
    """The samples of this name, by the values of their labels."""
    return {key[1:]: value for key, value in samples.items() if key[0] == f"bagua_autotune_{name}"}
