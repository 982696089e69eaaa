"""What a flow and a stage on another machine tell each other: objects in the store, which both of them reach.

    logs/<name>/luggage.tar      the spec and the user's code, put before the stage is asked for
    logs/<name>/000001.jsonl     what the stage said, batch by batch; the last batch ends with an event `end`
    logs/<name>/beat.json        renewed by the flow while it lives
    logs/<name>/stop.json        there once the stage shall save and stop, with the seconds that it may take

Invariants:
- A batch is put once and never changes; numbers have no gaps. So whoever reads them in order has everything, once.
- The flow removes the channel when it has read the end. What a killed flow leaves is a log of no run: `gc` removes it.
"""

from __future__ import annotations

import json
import re
import time
import uuid
from typing import Any

from stages.artifacts import NotInStore, Store, redact


class Channel:
    """One attempt's channel. Every method raises `StoreError` where the store cannot be used."""

    def __init__(self, store: Store, name: str) -> None:
        if not re.fullmatch(r"[\w][\w.@+-]{0,199}", name, re.ASCII):
            raise ValueError(f"{name!r} is not the name of a channel")
        self.store, self.name = store, name

    @classmethod
    def new(cls, store: Store, run: str, step: str) -> Channel:
        """A channel that nobody else has."""
        return cls(store, f"{run[:80]}@{step[:60]}@{uuid.uuid4().hex[:12]}.relay")

    def _key(self, object_name: str) -> str:
        return f"logs/{self.name}/{object_name}"

    # The flow's side

    def pack(self, luggage: bytes) -> None:
        """Give the stage what it needs to start."""
        self.store.put(self._key("luggage.tar"), luggage)

    def beat(self) -> None:
        """Say that the flow lives."""
        self.store.put(self._key("beat.json"), json.dumps({"beat": uuid.uuid4().hex}).encode())

    def ask_to_stop(self, grace: float) -> None:
        """Have the stage save and stop, in at most `grace` seconds."""
        self.store.put(self._key("stop.json"), json.dumps({"grace": grace}).encode())

    def receive(self, number: int) -> list[dict[str, Any]] | None:
        """Batch `number`, from 1 on; None while it is not there."""
        try:
            data = self.store.get(self._key(f"{number:06d}.jsonl"))
        except NotInStore:
            return None
        return [json.loads(line) for line in data.split(b"\n") if line]

    def remove(self) -> None:
        """Remove every object of the channel."""
        for info in list(self.store.list(self._key(""))):
            self.store.delete(info.key)

    # The stage's side

    def unpack(self) -> bytes:
        """What `pack` was given."""
        return self.store.get(self._key("luggage.tar"))

    def send(self, number: int, events: list[dict[str, Any]]) -> None:
        """Put batch `number`; an empty one says that the stage lives. Secrets are blanked, as in every log."""
        lines = "".join(json.dumps(event, ensure_ascii=False, default=str) + "\n" for event in events)
        self.store.put(self._key(f"{number:06d}.jsonl"), redact(lines).encode("utf-8", "backslashreplace"))

    def asked_to_stop(self) -> float | None:
        """The seconds that the stage may take to save, once it shall stop; None before."""
        try:
            return float(json.loads(self.store.get(self._key("stop.json")))["grace"])
        except NotInStore:
            return None

    def last_beat(self) -> str:
        """Another text after each `beat`; "" where there is none, or the channel is gone."""
        try:
            return self.store.get(self._key("beat.json")).decode()
        except NotInStore:
            return ""


class Beats:
    """Whether somebody who gives signs of life still does, by the clock of this process alone."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._sign: object = None
        self._seen = time.monotonic()

    def see(self, sign: object) -> None:
        """Note the newest sign; only one that differs from the last counts."""
        if sign != self._sign:
            self._sign, self._seen = sign, time.monotonic()

    @property
    def stopped(self) -> bool:
        return time.monotonic() - self._seen > self._seconds
