"""Nights run in this process against a temporary Prefect server, each test on a store of its own."""

from __future__ import annotations

import os
import tempfile

from flows.local_server import quiet_prefect

quiet_prefect()
os.environ.setdefault("PREFECT_HOME", tempfile.mkdtemp(prefix="headrace-test-prefect-"))
