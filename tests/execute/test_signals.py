"""Which signals stop a run: those that were not ignored when the command started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flows.signals import SIGNALS, interrupting, stopping

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


class Stops:
    """Counts how often an execution is told to stop."""

    def __init__(self) -> None:
        self.told: list[bool] = []

    def stop(self, *, kill: bool = False) -> None:
        self.told.append(kill)


def test_each_signal_stops_a_run_and_the_second_kills(handlers: None) -> None:
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    stops: Any = Stops()
    with stopping(stops, lambda count: None):
        os.kill(os.getpid(), signal.SIGHUP)
        os.kill(os.getpid(), signal.SIGTERM)
    assert stops.told == [False, True]
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_what_nohup_or_a_script_had_ignored_stays_ignored() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    stops: Any = Stops()
    with interrupting(), stopping(stops, lambda count: None):
        os.kill(os.getpid(), signal.SIGHUP)
        os.kill(os.getpid(), signal.SIGINT)
    assert stops.told == []
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN


KEPT_WAITING = """
import os, signal, time
from flows import signals
signals.LEAVE_SECONDS = 0.2
with signals.interrupting(lambda: print("left", flush=True)):
    try:
        os.kill(os.getpid(), signal.NUMBER)
    except KeyboardInterrupt:
        pass
    WAIT
print("ended", flush=True)
"""


@pytest.mark.parametrize("number", SIGNALS)
def test_who_waits_for_somebody_that_does_not_answer_leaves_all_the_same(number: signal.Signals) -> None:
    for wait, code, said in (("time.sleep(60)", 128 + number, "left\n"), ("pass", 0, "ended\n")):
        program = KEPT_WAITING.replace("NUMBER", number.name).replace("WAIT", wait)
        done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=50)
        assert (done.returncode, done.stdout) == (code, said), done.stderr
