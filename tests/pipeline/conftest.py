"""Set Prefect up as the command does, before any test imports it, and away from the user's own Prefect."""

import os
import tempfile

from flows.local_server import quiet_prefect

quiet_prefect()
os.environ.setdefault("PREFECT_HOME", tempfile.mkdtemp(prefix="headrace-test-prefect-"))
