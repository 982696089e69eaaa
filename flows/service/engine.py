"""A flow run's process: Prefect's engine, with what it prints in a log file. A worker starts it as a module.

A worker reads its runs' output through a pipe. When the worker dies the pipe breaks, and Prefect's console, writing the
next warning, ends the run. So the output goes to a file of the run's own, and a run outlives its worker. It outlives
the loss of its deployment's slot too (`flows.flow_run.slots`). It stands in a process group of its own: Ctrl-C in the
worker's terminal reaches the worker alone, which tells the run to stop once.
"""

from __future__ import annotations

import contextlib
import os
import runpy
import time
import warnings
from pathlib import Path

from flows.service.installation import home

KEPT_SECONDS = 14 * 86400.0


def main() -> None:
    """Run the flow run that the environment names."""
    with contextlib.suppress(OSError):  # it leads a group already
        os.setpgid(0, 0)
    folder = home() / "logs" / "runs"
    folder.mkdir(parents=True, exist_ok=True)
    _sweep(folder)
    log = os.open(
        folder / f"{os.environ.get('PREFECT__FLOW_RUN_ID', 'run')}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND
    )
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    from flows.flow_run.slots import outlive_lost_slots

    outlive_lost_slots()
    warnings.filterwarnings("ignore", message=".*prefect.engine.*found in sys.modules", category=RuntimeWarning)
    runpy.run_module("prefect.engine", run_name="__main__", alter_sys=True)


def _sweep(folder: Path) -> None:
    """Remove the logs of runs that ended long ago; Prefect and the store have theirs."""
    for path in folder.glob("*.log"):
        try:
            if time.time() - path.stat().st_mtime > KEPT_SECONDS:
                path.unlink()
        except OSError:
            continue


if __name__ == "__main__":
    main()
