"""What every page reads from: a store, its index, and the addresses of pages.

The index answers what would take a walk over the store; what a page is about (a run, a manifest, a record, a reference)
is read from the store itself.
"""

from __future__ import annotations

import shlex
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flows.lineage import queries
from flows.lineage.browser.rendering import Links
from flows.lineage.index import Index, open_index
from stages.artifacts import Store, check_digest, open_store

_PAUSE = 1.0  # seconds between two looks for what has changed in the store, and more where a look takes long


class NoPage(LookupError):
    """There is nothing at this address; the message says what was looked for."""


@dataclass
class Site:
    """A store as pages show it.

    Attributes:
        links: the addresses of its pages.
        room: what the page of sizes showed last, None before.
        signed: folders that were signed, kept away from the store, each with the public key to check it by.
    """

    store: Store
    links: Links
    _index: Index
    room: dict[str, Any] | None = None
    signed: tuple[tuple[Path, Path], ...] = ()
    _refreshing: threading.Lock = field(default_factory=threading.Lock)
    _next_look: float = 0.0

    @property
    def index(self) -> Index:
        """The index, looked over for changes if that was some time ago.

        Raises:
            StoreError: the store cannot be read.
        """
        with self._refreshing:
            if time.monotonic() >= self._next_look:
                took = self._index.refresh().seconds
                self._next_look = time.monotonic() + max(_PAUSE, 5 * took)
        return self._index

    def look_again(self) -> None:
        """Have the next question look for changes, whenever the last look was."""
        self._next_look = 0.0

    def command(self, *words: str) -> str:
        """A `headrace` command on this store, to copy."""
        return shlex.join(["headrace", *words, "--store", self.store.url])

    def digest(self, name: str) -> str:
        """The full digest that an address names by "sha256:" and at least six digits of it.

        Raises:
            NoPage: the store names no such artifact, or several.
        """
        try:
            check_digest(name)
            return name
        except ValueError:
            pass
        found = [hit.name for hit in queries.search(self.index, name, limit=3) if hit.what == "artifact"]
        exact = [
            digest for digest in dict.fromkeys(found) if digest.startswith(f"sha256:{name.removeprefix('sha256:')}")
        ]
        if len(exact) == 1:
            return exact[0]
        raise NoPage(f"{'Several artifacts begin' if exact else 'No artifact begins'} with {name!r}.")


def open_site(
    url: str,
    root: str = "",
    progress: Any = lambda read: None,
    signed: tuple[tuple[Path, Path], ...] = (),
) -> Site:
    """Open a store for its pages; the first time, its index is made.

    Args:
        root: the path that a proxy serves the pages under.
        progress: called with the number of objects that the index has read so far.
        signed: see `Site`.

    Raises:
        StoreError: the store cannot be read.
    """
    store = open_store(url)
    return Site(store, Links(root), open_index(store, progress=progress), signed=signed)
