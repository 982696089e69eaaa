"""What the questions to an index answer with. Digests are "sha256:<64 hex>", times unix seconds."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class Artifact:
    """One artifact.

    Attributes:
        kind: "" where its manifest is not in the store, or is damaged; `present` is False then.
        size, files: bytes and number of its files.
        time: when its newest making ended, or it was imported; None where neither is known.
        stage, step, output, key, run, seconds: of its newest making; "" and None for imported data. `output` is the
            name of the side output that it is, "" for a main artifact.
    """

    digest: str
    kind: str
    size: int
    files: int
    present: bool
    time: float | None
    stage: str = ""
    step: str = ""
    output: str = ""
    key: str = ""
    run: str = ""
    seconds: float | None = None

    @property
    def name(self) -> str:
        """ "grpo", "grpo/rollouts"; "imported", or "sources" for those of a stage, where no step gave it."""
        nobody = "sources" if self.kind == "code" else "imported"
        return (f"{self.step}/{self.output}" if self.output else self.step) or nobody


@dataclass(frozen=True)
class Edge:
    """A parent or child, and the name of the input as which the one was read to make the other.

    `code` is True where the parent is the sources of the stage that ran; the input is "code" then.
    """

    input: str
    artifact: Artifact
    code: bool = False


@dataclass(frozen=True)
class MadeFrom:
    """What was made from something, over all steps, and the references that point there.

    Attributes:
        artifacts: a page of what was made, newest first.
        total: how many there are on all pages.
        kinds: kind -> how many were made and are in the store, most first; the tables beside datasets do not count.
        refs: (reference, digest, since when, whether it names that now) of what was made and of what it was made from.
    """

    artifacts: list[Artifact]
    total: int
    kinds: dict[str, int]
    refs: list[tuple[str, str, float, bool]]


@dataclass(frozen=True)
class Making:
    """One computation that gave an artifact: see the index's table `makings`."""

    stage: str
    step: str
    key: str
    run: str
    output: str
    current: bool
    started: float | None
    finished: float
    seconds: float
    devices: int
    device: str


@dataclass(frozen=True)
class File:
    """A file of an artifact; `sha256` is 64 hexadecimal digits."""

    path: str
    size: int
    sha256: str


@dataclass(frozen=True)
class RefMove:
    """One entry of a reference's history."""

    number: int
    artifact: str
    previous: str | None
    who: str
    time: float
    why: str
    restores: int | None


@dataclass(frozen=True)
class RefRow:
    """A reference: where it points now, when it was moved last and how often."""

    name: str
    artifact: str
    time: float
    moves: int


@dataclass(frozen=True)
class Run:
    """A run with the number of its steps in each state ("done": 3, "cached": 9)."""

    name: str
    recipe: str
    state: str
    started: float | None
    finished: float | None
    seconds: float | None
    states: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Step:
    """A step of a run, as the run's document says."""

    run: str
    step: str
    stage: str
    status: str
    key: str | None
    artifact: str | None
    seconds: float | None
    reason: str
    message: str
    started: float | None
    finished: float | None
    logs: str | None
    attempts: int


@dataclass(frozen=True)
class Hit:
    """Something that a search found.

    Attributes:
        what: the sort of thing; `name` is what its page or verb takes (a digest, a reference, a run, a SHA-256, a
            metric).
        detail: why it was found, in a few words.
    """

    what: Literal["artifact", "ref", "run", "file", "metric"]
    name: str
    detail: str


@dataclass(frozen=True)
class Problem:
    """An object of the store that could not be read when the index looked at it."""

    key: str
    problem: str
