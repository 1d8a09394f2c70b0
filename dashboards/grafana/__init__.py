"""Grafana dashboards as a program: what it writes is committed, and is what Grafana loads."""
