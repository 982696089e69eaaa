"""The runners by their names, as `--runner` and the Prefect form give them. Each is imported when it is asked for."""

from __future__ import annotations

from flows.runners.base import Runner, RunnerError

RUNNERS = ("process", "docker", "workpool")


def make_runner(name: str) -> Runner:
    """The runner of that name, with the settings of the environment.

    Raises:
        RunnerError: there is none.
    """
    match name:
        case "process":
            from flows.runners.process import ProcessRunner

            return ProcessRunner()
        case "docker":
            from flows.runners.docker import DockerRunner

            return DockerRunner()
        case "workpool":
            from flows.runners.workpool import WorkPoolRunner

            return WorkPoolRunner()
    raise RunnerError(f"there is no runner {name!r}. Runners: {', '.join(RUNNERS)}")


def check_runner(name: str) -> None:
    """Look whether the runner can start stages at all, so that it is said before anything is begun.

    Raises:
        RunnerError: it cannot; the message says what to change.
    """
    match name:
        case "docker":
            from flows.runners import engine
            from flows.runners.docker import DockerSettings

            client = engine.connect()
            try:
                engine.find_image(client, DockerSettings.of_environment().image)
            finally:
                client.close()
        case "workpool":
            from flows.runners.workpool import check_api

            check_api()
