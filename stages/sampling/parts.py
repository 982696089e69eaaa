"""Progress of a stage that works through numbered parts: the finished ones are kept in the work area.

Invariants:
- Part n is a pure function of the stage's config and inputs and of n, so a resumed run ends with the same bytes.
- A stop is honoured between two parts: what is finished is durable before `Stopped` is raised.
"""

from __future__ import annotations

import time
from typing import Any

from stages.contract import StageContext, Stopped


class Parts:
    """The finished parts, as bytes, in order.

    Args:
        context: the stage's context; its work area is read at once and `resumed` is emitted when it holds parts.
        total: how many parts there will be.
        unit: what a part is called in messages.
        save_seconds: save when this long has passed since the last save.
    """

    def __init__(self, context: StageContext[Any], total: int, *, unit: str, save_seconds: float) -> None:
        self.context = context
        self.total = total
        self.unit = unit
        self.save_seconds = save_seconds
        self.done: list[bytes] = []
        self._saved = 0
        self._last_save = time.monotonic()
        saved = context.work.latest()
        if saved is not None:
            step, folder = saved
            self.done = [path.read_bytes() for path in sorted(folder.iterdir())]
            if len(self.done) != step or step > total:
                raise RuntimeError(f"the saved progress holds {len(self.done)} of {total} {unit}s, and says {step}")
            self._saved = step
            context.resumed(step)
            context.log(f"resumed with {step} of {total} {unit}s done")

    def add(self, data: bytes) -> None:
        """Keep the next finished part; saves when it is time.

        Raises:
            Stopped: a stop was asked for; everything up to here is saved.
        """
        self.done.append(data)
        if len(self.done) == self.total:
            return  # what follows is quicker than a save
        if self.context.stop_requested:
            self._save()
            self.context.work.wait()
            raise Stopped(f"saved after {self.unit} {len(self.done)} of {self.total}")
        if time.monotonic() - self._last_save >= self.save_seconds:
            self._save()

    def _save(self) -> None:
        if self._saved == len(self.done):
            return
        begin = time.monotonic()
        folder = self.context.scratch / f"parts-{len(self.done):09d}"
        folder.mkdir(parents=True)
        for number, data in enumerate(self.done):
            (folder / f"{number:09d}").write_bytes(data)
        count, stood_still = len(self.done), time.monotonic() - begin
        self.context.work.save(count, folder, lambda: self.context.saved(count, stood_still))
        self._saved = count
        self._last_save = time.monotonic()
