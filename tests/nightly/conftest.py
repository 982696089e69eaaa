"""Nights run in this process against a temporary Prefect server, each test on a store of its own."""

from __future__ import annotations

from flows.service.local_server import quiet_prefect

quiet_prefect()
