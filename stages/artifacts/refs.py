"""Refs: names for artifacts, such as production, that can be moved and moved back.

`refs/<name>.json` holds the name's whole history, oldest entry first; the last entry says what it names now.
Invariants:

- An entry is never changed or removed: a ref is moved by adding one, through compare-and-swap, so that of two people
  who move it at once neither's entry is lost.
- A ref names an artifact that was whole in the store when it was moved there.
- Rolling back adds an entry too. Rolling back twice goes back two moves, not forth and back.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from datetime import UTC, datetime

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from stages.artifacts.fetch import is_complete
from stages.artifacts.leases import outwait_gc
from stages.artifacts.manifest import check_digest
from stages.artifacts.secrets import redact
from stages.artifacts.store import Damaged, NotInStore, Store, StoreError, leave_out

MAX_WHY = 1000
_TRIES = 1000  # each failed try means that another writer has succeeded


class Move(BaseModel):
    """One entry of a ref's history.

    Attributes:
        number: 1 for the first, then one more each.
        artifact: digest that the ref names from then on.
        previous: digest that it named before, None for the first entry.
        who, when, why: user and host; UTC, ISO 8601; a sentence.
        restores: for a rollback, the number of the entry that it goes back to.
    """

    model_config = ConfigDict(extra="forbid")

    number: int = Field(ge=1)
    artifact: str
    previous: str | None
    who: str
    when: str
    why: str = ""
    restores: int | None = None


class Ref(BaseModel):
    """A name for an artifact, with its history (oldest first, never empty)."""

    model_config = ConfigDict(extra="forbid")

    name: str
    artifact: str
    history: list[Move] = Field(min_length=1)


def promote(store: Store, name: str, digest: str, *, who: str, why: str = "", expect: str | None = None) -> Ref:
    """Have a ref name an artifact; it is made if there is none of that name. Where it names it already, nothing
    changes.

    Args:
        expect: move it only if it names this digest now ("" for: only if there is no such ref yet).

    Raises:
        ValueError: the name, the digest or the reason is not allowed.
        NotInStore: the artifact is not whole in the store.
        StoreError: the ref names something else than `expect`.
    """
    check_digest(digest)

    def move(ref: Ref | None) -> tuple[str, int | None] | None:
        now = ref.artifact if ref is not None else ""
        if expect is not None and now != expect:
            raise StoreError(
                f"reference {name} names {now or 'nothing'} now, not {expect or 'nothing'}: somebody moved it"
            )
        return None if now == digest else (digest, None)

    return _move(store, name, move, who, why)


def rollback(store: Store, name: str, *, who: str, why: str = "", to: int | None = None) -> Ref:
    """Have a ref name what it named before its last move, or at entry number `to` of its history.

    Raises:
        ValueError: it has no such entry, or never named anything else.
        NotInStore: there is no such ref, or that artifact is not whole in the store any more.
    """

    def move(ref: Ref | None) -> tuple[str, int | None] | None:
        if ref is None:
            raise _missing(store, name)
        target = before(ref) if to is None else to
        if target is None:
            raise ValueError(f"reference {name} never named anything before {ref.artifact}")
        if not 1 <= target <= len(ref.history):
            raise ValueError(f"reference {name} has no entry {target}; it has 1 to {len(ref.history)}")
        entry = ref.history[target - 1]
        return None if entry.artifact == ref.artifact else (entry.artifact, entry.restores or target)

    return _move(store, name, move, who, why)


def before(ref: Ref) -> int | None:
    """The number of the entry that `rollback` goes back to: None where the ref never named anything else."""
    last = ref.history[-1]
    for entry in reversed(ref.history[: (last.restores or last.number) - 1]):
        if entry.artifact != ref.artifact:
            return entry.number
    return None


def read_ref(store: Store, name: str) -> Ref:
    """A ref with its history.

    Raises:
        ValueError: it is not the name of a ref.
        NotInStore: there is none of that name.
        Damaged: it cannot be read.
    """
    return _read(store, name)[0]


def refs(store: Store, *, all_or_none: bool = True) -> Iterator[Ref]:
    """Every ref of a store, by name.

    Args:
        all_or_none: otherwise one that cannot be read is left out, and the log says which.

    Raises:
        Damaged: one cannot be read, and all are wanted.
    """
    for name in ref_names(store):
        try:
            yield read_ref(store, name)
        except NotInStore:  # removed just now
            continue
        except Damaged as error:
            if all_or_none:
                raise
            leave_out(error)


def ref_names(store: Store) -> list[str]:
    """The names of all refs, sorted."""
    found = (re.fullmatch(r"refs/(.+)\.json", info.key) for info in store.list("refs/"))
    return sorted(match[1] for match in found if match is not None and _NAME.fullmatch(match[1]))


_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,99}")
NO_REFERENCE = "none"  # what `promote --expect` takes for: no such ref yet


def check_ref_name(name: str) -> str:
    """Return `name` if a new ref may be called so.

    Raises:
        ValueError: it may not.
    """
    _key(name)
    if name.lower() == NO_REFERENCE:
        raise ValueError(f"{name!r} means that there is no reference; take another name for one")
    return name


def _key(name: str) -> str:
    """Where a ref lies in a store. A name that is not allowed any more still finds what was called so."""
    if not _NAME.fullmatch(name):
        raise ValueError(
            f"{name!r} is not a name for a reference: a letter, then at most 99 letters, digits, and _ . -"
        )
    if re.fullmatch(r"[0-9a-f]{6,64}", name):
        raise ValueError(f"{name!r} cannot be told from the digits of a digest; take another name for the reference")
    return f"refs/{name}.json"


def _move(
    store: Store, name: str, move: Callable[[Ref | None], tuple[str, int | None] | None], who: str, why: str
) -> Ref:
    """Add the entry that `move(ref)` chooses: (digest, entry restored), or None for none."""
    key = _key(name)
    if len(why) > MAX_WHY:
        raise ValueError(f"the reason has {len(why):,} characters; {MAX_WHY:,} are allowed")
    for _ in range(_TRIES):
        try:
            ref, tag = _read(store, name)
        except NotInStore:
            check_ref_name(name)
            ref, tag = None, ""
        chosen = move(ref)
        if chosen is None:
            assert ref is not None
            return ref
        digest, restores = chosen
        if not is_complete(store, digest):
            raise NotInStore(f"store {store.url} does not hold all of artifact {digest}; `headrace verify` says more")
        entry = Move(
            number=len(ref.history) + 1 if ref is not None else 1,
            artifact=digest,
            previous=ref.artifact if ref is not None else None,
            who=who,
            when=datetime.now(UTC).isoformat(timespec="milliseconds"),
            why=redact(why),
            restores=restores,
        )
        moved = Ref(name=name, artifact=digest, history=[*(ref.history if ref is not None else []), entry])
        data = moved.model_dump_json(indent=1).encode()
        if store.put(key, data, if_absent=True) if ref is None else store.put(key, data, if_match=tag):
            outwait_gc(store)  # it may have looked at the refs before this move, and remove the artifact now
            if not is_complete(store, digest):
                raise NotInStore(f"artifact {digest} was removed while reference {name} was moved to it; roll it back")
            return moved
    raise StoreError(f"reference {name} was moved {_TRIES} times by others meanwhile; try again")


def _read(store: Store, name: str) -> tuple[Ref, str]:
    key = _key(name)
    try:
        data, tag = store.get_with_tag(key)
    except NotInStore:
        raise _missing(store, name) from None
    try:
        ref = Ref.model_validate_json(data)
        check_digest(ref.artifact)
        for number, entry in enumerate(ref.history, 1):
            check_digest(entry.artifact)
            if entry.number != number or not 0 <= (entry.restores or 0) < number:
                raise ValueError(f"entry {number} of its history has another number")
        if ref.name != name or ref.history[-1].artifact != ref.artifact:
            raise ValueError("its name or artifact is not that of its last entry")
    except ValidationError as error:
        problem = error.errors()[0]
        where = ".".join(str(part) for part in problem["loc"]) or "whole file"
        raise Damaged(f"{key} in store {store.url} is not a reference: {where}: {problem['msg']}") from None
    except ValueError as error:
        raise Damaged(f"{key} in store {store.url} is not a reference: {error}") from None
    return ref, tag


def _missing(store: Store, name: str) -> NotInStore:
    known = ", ".join(ref_names(store)) or "none"
    return NotInStore(f"store {store.url} has no reference {name}; it has {known}")
