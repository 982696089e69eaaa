"""Set Prefect up as the command does, before any test imports it."""

from flows.service.local_server import quiet_prefect

quiet_prefect()
