"""Set Prefect up as the command does, before any test imports it."""

from flows.local_server import quiet_prefect

quiet_prefect()
