"""The ranks of a stage that several processes run together: started, watched and ended as one.

The stage process forks its ranks when the inputs are there and the stage is imported, and only watches from then on, so
that it can act whatever a rank is waiting for. Each rank finds in its environment which one it is (HEADRACE_RANK,
HEADRACE_WORLD_SIZE) and where all of them meet (HEADRACE_RENDEZVOUS, a file).

Invariants:
- Nothing was computed and no GPU was touched when ranks are forked: OpenMP and CUDA work in them.
- Ranks end together. A signal to the stage process goes to each of them; when one crashes, the others are killed within
  `CRASH_GRACE` seconds; when the stage process dies, the kernel kills them.
- Rank 0 speaks for all: the outcome is its own unless it ended because of another rank.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from stages.children import die_with_parent, end_with
from stages.contract import VERDICTS, ExitCode, StageContext

CRASH_GRACE = 5.0  # seconds that the other ranks get when one has crashed
VERDICT_GRACE = 20.0  # ... when one has ended with a verdict: the others may agree, and be finishing a save
_POLL = 0.02


@dataclass(frozen=True)
class RankEnd:
    """How a rank ended: `outcome` is what it left, None where it was killed by `signal` or died without a word."""

    rank: int
    code: int
    signal: int | None
    outcome: dict[str, Any] | None
    ours: bool  # whether we killed it

    @property
    def crashed(self) -> bool:
        return self.outcome is None or self.code not in {ExitCode.DONE, ExitCode.STOPPED, *VERDICTS}


def run_ranks(
    count: int,
    body: Callable[[int], dict[str, Any]],
    folder: Path,
    stop_requested: Callable[[], bool],
    *,
    while_forking: AbstractContextManager[Any],
) -> RankEnd:
    """Run `body(rank)` in `count` forked processes and wait for all.

    Args:
        count: number of ranks.
        body: runs a rank to its end and returns its outcome, a JSON object with "code" (and "message"); never raises.
        folder: an empty folder for what the ranks leave.
        stop_requested: whether this process was asked to stop; the ranks are then asked too.
        while_forking: holds still what other threads of this process do, for a lock that one holds when a rank is
            forked is never released there.

    Returns:
        How the run ended: the end of rank 0, or that of the rank which brought it down.
    """
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        raise RuntimeError("the stage uses a GPU when it is imported, so no rank can be forked; move that into run")
    with while_forking:
        running = {rank: _start(rank, count, body, folder) for rank in range(count)}
    ended: list[RankEnd] = []
    deadline, killed, told = None, False, False
    try:
        while running:
            for rank, pid in list(running.items()):
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    del running[rank]
                    ended.append(_end(folder, rank, status, killed))
                    deadline = _sooner(deadline, ended[-1])
            if stop_requested() and not told:
                told = True
                _signal(running, signal.SIGTERM)
            if deadline is not None and time.monotonic() > deadline and not killed:
                killed = True
                _signal(running, signal.SIGKILL)
            time.sleep(_POLL)
    finally:
        _signal(running, signal.SIGKILL)
    return _decisive(ended)


def explain(end: RankEnd) -> str:
    """A rank's crash, in a sentence."""
    if end.signal is not None:
        how = f"was killed by {signal.Signals(end.signal).name}"
    elif end.outcome is None:
        how = f"ended with code {end.code} and without a word"
    else:
        how = f"crashed: {end.outcome.get('message', '')}"
    return f"rank {end.rank} {how}; the other ranks were stopped with it, and saved progress is kept"


class _NoWork:
    """The saved progress of a rank that is not the first: none of its own."""

    def save(self, step: int, folder: Path, then: Callable[[], None] | None = None) -> None:
        raise RuntimeError("rank 0 alone saves progress")

    def latest(self) -> tuple[int, Path] | None:
        raise RuntimeError("rank 0 alone reads saved progress, and tells the others where it is")

    def wait(self) -> None:
        """Nothing is in flight."""


def follower_context(
    context: StageContext[Any], folder: Path, rank: int
) -> tuple[StageContext[Any], Callable[[dict[str, Any]], None]]:
    """The context of a rank that is not the first, and how it speaks: what it writes and says is dropped, but errors.

    Args:
        context: that of rank 0.
        folder: a path that does not exist yet, for what the rank writes.
        rank: its number.
    """

    def emit(event: dict[str, Any]) -> None:
        if event.get("level") == "error":
            context.emit(event | {"text": f"rank {rank}: {event['text']}"})

    side = {name: folder / "side" / name for name in context.side_outputs}
    output, scratch = folder / "output", folder / "tmp"
    for path in (output, scratch, *side.values()):
        path.mkdir(parents=True)
    mine = dataclasses.replace(
        context, output=output, scratch=scratch, side_outputs=side, work=_NoWork(), emit=emit, final_metrics={}
    )
    return mine, emit


def _start(rank: int, count: int, body: Callable[[int], dict[str, Any]], folder: Path) -> int:
    parent = os.getpid()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        _run(rank, count, body, folder, parent)
    return pid


def _run(rank: int, count: int, body: Callable[[int], dict[str, Any]], folder: Path, parent: int) -> NoReturn:
    def run() -> int:
        if not die_with_parent(parent, signal.SIGKILL):
            return 1
        os.environ["HEADRACE_RANK"] = str(rank)
        os.environ["HEADRACE_WORLD_SIZE"] = str(count)
        os.environ["HEADRACE_RENDEZVOUS"] = str((folder / "rendezvous").absolute())
        outcome = body(rank)
        temporary = folder / f"{rank}.tmp"
        temporary.write_text(json.dumps(outcome))
        os.replace(temporary, folder / f"{rank}.json")
        return int(outcome["code"])

    end_with(run)


def _end(folder: Path, rank: int, status: int, killed: bool) -> RankEnd:
    code = os.waitstatus_to_exitcode(status)
    try:
        outcome = json.loads((folder / f"{rank}.json").read_text())
    except (OSError, ValueError):
        outcome = None
    if code < 0:
        return RankEnd(rank, 1, -code, None, killed)
    return RankEnd(rank, code, None, outcome, False)


def _sooner(deadline: float | None, end: RankEnd) -> float | None:
    """Until when the other ranks may run, now that this one has ended."""
    if end.crashed:
        limit = time.monotonic() + CRASH_GRACE
    elif end.code in (ExitCode.NONFINITE, ExitCode.REFUSED) and not (end.outcome or {}).get("together"):
        limit = time.monotonic() + VERDICT_GRACE
    else:  # the ends that all ranks decide on together; rank 0 may take its time to save and publish
        return deadline
    return limit if deadline is None else min(deadline, limit)


def _decisive(ended: list[RankEnd]) -> RankEnd:
    """The end that says why, of all ranks' in the order in which they came."""
    main = next(end for end in ended if end.rank == 0)
    if not main.crashed:
        return main
    crashes = [end for end in ended if end.crashed]
    for end in ended:
        if not end.crashed and end.code in VERDICTS:
            return end
    # What was killed from outside comes first: the others crash because a connection breaks.
    killed = [end for end in crashes if end.signal is not None and not end.ours]
    return (killed or crashes)[0]


def _signal(pids: dict[int, int], number: int) -> None:
    for pid in pids.values():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
