"""Whether the code that a stage process runs is the code that the run was planned with: else its key would be a lie."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from stages.contract import Refused, StageConfig, StageSpec
from stages.fingerprint import CodeError, Fingerprint, difference, stage_fingerprint


def check_code(spec: StageSpec, config: StageConfig) -> dict[str, Any]:
    """The code's fingerprint for the record; refuses code that is not what was planned.

    Raises:
        Refused: it changed since, or the user's code is missing or not Python.
    """
    planned = spec.record.get("code") or {}
    try:
        now = code_of(spec, config)
    except CodeError as error:
        raise Refused(str(error)) from None
    if planned.get("digest") not in (None, now.digest):
        where = difference(planned.get("files", {}), now.files)
        raise Refused(f"the code changed after the run was planned{': ' + where if where else ''}; run it again")
    return {"digest": now.digest, "files": now.files} | planned


def code_of(spec: StageSpec, config: StageConfig) -> Fingerprint:
    """The fingerprint of the stage's code as it is now, and of the user's.

    Raises:
        CodeError: the user's code is missing or not Python.
    """
    return stage_fingerprint(spec.stage, config.user_code(), [Path(folder) for folder in spec.python_path])


def check_late_code(spec: StageSpec, config: StageConfig, loaded: set[str]) -> None:
    """Refuse a result when a module was imported during the run after it had been edited.

    Modules that were loaded before the stage began run as they were, so an edit of those does no harm.

    Args:
        loaded: names of the modules that were loaded then.

    Raises:
        Refused: there is one.
    """
    late = {_source(name) for name in set(sys.modules) - loaded}
    planned = (spec.record.get("code") or {}).get("files")
    if not planned:
        return
    try:
        now = code_of(spec, config).files
    except CodeError:
        return  # broken by an edit after everything was loaded
    for path in planned.keys() & now.keys():
        if planned[path]["sha256"] != now[path]["sha256"] and any(file.endswith("/" + path) for file in late):
            raise Refused(f"the code changed while the step ran: {path} was edited and then imported; run it again")


def _source(module: str) -> str:
    return str(getattr(sys.modules.get(module), "__file__", None) or "").replace(os.sep, "/")
