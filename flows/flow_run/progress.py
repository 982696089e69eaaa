"""Live progress of a run's steps on its page in Prefect: one progress artifact a step, with its live figures.

Its key is RECIPE-STEP-progress, its value the share done in percent, its description where the step is ("step 281/450 ·
loss 2.41 · 14.2k tok/s · 28 s left"). A thread sends what has changed every few seconds, so that neither a slow server
nor one that is away holds up a stage.
"""

from __future__ import annotations

import contextvars
import threading
import time
from dataclasses import dataclass
from types import TracebackType
from typing import Any
from uuid import UUID

import httpx
from prefect import get_client
from prefect.client.schemas.actions import ArtifactCreate, ArtifactUpdate
from prefect.exceptions import PrefectHTTPStatusError
from prefect.runtime import flow_run

from flows.command.display import Board, Line, says
from flows.flow_run.pages import page_key

EVERY = 3.0  # seconds between two updates of a page


@dataclass
class _Page:
    task_run_id: UUID | None
    percent: float = 0.0
    text: str = ""
    changed: bool = False
    artifact: UUID | None = None


class ProgressPages:
    """The progress artifacts of the current flow run; use it as a context manager inside the flow.

    Args:
        recipe: its name is the beginning of each key.
    """

    def __init__(self, recipe: str) -> None:
        self._recipe = recipe
        self._flow_run_id = UUID(str(flow_run.get_id()))
        self._pages: dict[str, _Page] = {}
        self._board = Board([])
        self._lock = threading.Lock()
        self._over = threading.Event()
        context = contextvars.copy_context()
        self._thread = threading.Thread(target=lambda: context.run(self._run), name="progress pages", daemon=True)

    def __enter__(self) -> ProgressPages:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._over.set()
        self._thread.join(EVERY)

    def begin(self, step: str, task_run_id: str | None) -> None:
        """Say which task run a step is; its page hangs on it."""
        with self._lock:
            self._pages[step] = _Page(UUID(task_run_id) if task_run_id else None)
            self._board.lines[step] = Line(step, "")

    def hear(self, event: dict[str, Any]) -> None:
        """Take an event of the run. A step that was a hit has no page, for it made no progress."""
        kind, step = event.get("type"), str(event.get("step"))
        with self._lock:
            page = self._pages.get(step)
            if page is None:
                return
            self._board.apply(event)
            line = self._board.lines[step]
            if kind in ("progress", "waiting", "resumed", "saved") or (kind == "step" and line.state != "waiting"):
                if kind == "step" and line.state not in ("running", "done", "failed", "stopped"):
                    return
                page.percent = min(100.0, 100.0 * line.done / line.total) if line.total else 0.0
                if line.state == "done":
                    page.percent = 100.0
                told = says(self._board, line, time.time())
                page.text = told if line.state == "running" else f"{line.state}: {told}"
                page.changed = True

    def _run(self) -> None:
        while not self._over.wait(EVERY):
            self._send()
        self._send()

    def _send(self) -> None:
        with self._lock:
            due = [(step, page, page.percent, page.text) for step, page in self._pages.items() if page.changed]
            for _, page, _, _ in due:
                page.changed = False
        try:
            with get_client(sync_client=True) as client:
                for step, page, percent, text in due:
                    if page.artifact is None:
                        made = client.create_artifact(
                            ArtifactCreate(
                                key=page_key(self._recipe, f"{step}-progress"),
                                type="progress",
                                description=f"{step}: {text}",
                                data=percent,
                                flow_run_id=self._flow_run_id,
                                task_run_id=page.task_run_id,
                            )
                        )
                        page.artifact = made.id
                    else:
                        client.update_artifact(
                            page.artifact, ArtifactUpdate(data=percent, description=f"{step}: {text}")
                        )
        except (httpx.HTTPError, PrefectHTTPStatusError, OSError):  # it is away: the next update brings the newest
            with self._lock:
                for _, page, _, _ in due:
                    page.changed = True
