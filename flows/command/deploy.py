"""The verb `deploy`: reads the settings, brings the configured server to them, and says what is there."""

from __future__ import annotations

import asyncio
from pathlib import Path

from flows.command.listing import print_json
from flows.service.deploy_settings import read_settings
from flows.service.local_server import LocalServer, NoServer, serving, start_server


def deploy(settings_file: Path | None, *, as_json: bool) -> int:
    """Deploy to the configured server, or that of a running `headrace up`. Returns the exit code.

    Raises:
        RecipeError: the settings are wrong; nothing was deployed.
        NoServer: there is no server.
    """
    settings = read_settings(settings_file)
    server = start_server()
    if isinstance(server, LocalServer):
        server.stop()
        raise NoServer("there is no Prefect server to deploy to: set PREFECT_API_URL, or run `headrace up`.")
    with serving(server):
        from flows.service.deploy import deploy as bring
        from flows.service.deploy import lines

        names = asyncio.run(bring(settings))
    if as_json:
        print_json({"deployments": names, "work_pool": settings.work_pool, "store": settings.store})
    else:
        print("\n".join(lines(names, settings)))
    return 0
