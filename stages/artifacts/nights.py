"""The nights of a reference: what each run of its schedule found, made and decided.

`nights/REF.json` in the store holds one entry a night, oldest first, as Prefect's own records are not kept for ever and
a store may outlive its server.

Invariants:
- An entry is written when a night begins, with the model that it starts from, so that a night that was interrupted
  goes on from the same one; it is completed when the night ends.
- Entries are changed by compare-and-swap; the last `KEPT` are kept.
- The models of the last `keep` nights that made one are kept by `stages.artifacts.gc`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from stages.artifacts.manifest import check_digest
from stages.artifacts.refs import check_ref_name
from stages.artifacts.store import Damaged, NotInStore, Store, StoreError

KEPT = 1000
_TRIES = 50
Decision = Literal["running", "nothing new", "promoted", "refused", "not approved", "unchanged", "failed", "stopped"]
SEEN = ("promoted", "refused", "not approved", "unchanged")  # ends after which the same data is nothing new
KEEP = 7


class Night(BaseModel):
    """One night of a reference.

    Attributes:
        id: of the flow run and, in a backfill, the date: what a retry goes on with.
        date: ISO date that it stands for.
        started, finished: UTC, ISO 8601; finished is None while it runs, or where it was lost.
        run: name of the pipeline's run.
        base: digest that the reference named when it began, "" for none.
        start: "warm" from that model, or from "scratch".
        recipe: a hash of the recipe and its changed settings.
        data: "step.input" -> digest of what comes from files.
        new: what of it is new, in words.
        artifact: the candidate.
        metrics, production: figures of the candidate and of the base in the same report.
        gate: the arithmetic, a line for each rule.
        message: the decision in one sentence.
    """

    model_config = ConfigDict(extra="forbid")

    id: str
    date: str
    started: str
    finished: str | None = None
    run: str = ""
    state: Decision = "running"
    base: str = ""
    start: Literal["warm", "scratch"] = "scratch"
    recipe: str = ""
    data: dict[str, str] = {}
    new: str = ""
    artifact: str | None = None
    metrics: dict[str, float] = {}
    production: dict[str, float] = {}
    gate: list[str] = []
    message: str = ""


class Nights(BaseModel):
    """The nights of a reference, oldest first, and how many of their models are kept."""

    model_config = ConfigDict(extra="forbid")

    ref: str
    keep: int = Field(KEEP, ge=1)
    nights: list[Night] = []

    def kept(self) -> list[str]:
        """Digests of the last `keep` models."""
        made = [night.artifact for night in reversed(self.nights) if night.artifact is not None]
        return list(dict.fromkeys(made))[: self.keep]


def read_nights(store: Store, ref: str) -> Nights:
    """The nights of a reference; empty where it never had one.

    Raises:
        ValueError: it is not the name of a reference.
        Damaged: they cannot be read.
    """
    return _read(store, ref)[0]


def all_nights(store: Store) -> Iterator[Nights]:
    """Every reference's nights.

    Raises:
        Damaged: some cannot be read.
    """
    for info in store.list("nights/"):
        try:
            yield read_nights(store, info.key.removeprefix("nights/").removesuffix(".json"))
        except ValueError as error:
            raise Damaged(f"{info.key} in store {store.url}: {error}") from None


def write_night(store: Store, ref: str, night: Night, *, keep: int = KEEP) -> None:
    """Add a night, or put it in the place of the one with its id.

    Args:
        keep: of how many nights the models are kept from now on.

    Raises:
        StoreError: the store cannot be written, or others wrote all the time.
    """
    key = _key(ref)
    for _ in range(_TRIES):
        known, tag = _read(store, ref)
        nights = [night if item.id == night.id else item for item in known.nights]
        if all(item.id != night.id for item in nights):
            nights.append(night)
        data = Nights(ref=ref, keep=keep, nights=nights[-KEPT:]).model_dump_json(indent=1).encode()
        if store.put(key, data, if_match=tag) if tag else store.put(key, data, if_absent=True):
            return
    raise StoreError(f"the nights of {ref} were written {_TRIES} times by others meanwhile; try again")


def _read(store: Store, ref: str) -> tuple[Nights, str]:
    try:
        data, tag = store.get_with_tag(_key(ref))
    except NotInStore:
        return Nights(ref=ref), ""
    try:
        nights = Nights.model_validate_json(data)
        for night in nights.nights:
            for digest in filter(None, [night.base, night.artifact]):
                check_digest(digest)
        return nights, tag
    except ValidationError as error:
        problem = error.errors()[0]["msg"]
    except ValueError as error:
        problem = str(error)
    raise Damaged(f"{_key(ref)} in store {store.url} is not a record of nights: {problem}")


def _key(ref: str) -> str:
    return f"nights/{check_ref_name(ref)}.json"
