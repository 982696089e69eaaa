"""Looking up many objects of a bucket in few requests: by listing where many of those listed are asked for.

Invariant: what is found was there when its page, or itself, was asked for; nothing is remembered.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime

from stages.artifacts.manifest import many_objects
from stages.artifacts.store import in_parallel

REQUESTS_AT_ONCE = 8
HEADS = 40  # looking up this many objects one by one costs as much as listing a page of 1,000
_LISTINGS_AT_ONCE = 16
_PAGE = 1000  # objects that one request lists

Found = tuple[int, str, str, str | datetime]  # the fields of a `Stored` and the time of change; there may be very many
Page = Callable[[str, str], tuple[dict[str, Found], bool]]
LookUp = Callable[[str], Found | None]


def find(keys: Iterable[str], page: Page, look_up: LookUp) -> dict[str, Found]:
    """Those of the objects that are there.

    Args:
        page: what a listing gives of the objects with a prefix, from a key on, and whether there are more.
        look_up: one object; None where it is not there.
    """
    wanted = sorted(set(keys))
    if len(wanted) <= _PAGE:
        return _find(wanted, page, look_up)
    # Of the keys in order, so that each listing has a stretch of its own, and none is shorter than a page.
    share = max(_PAGE, -(-len(wanted) // _LISTINGS_AT_ONCE))
    parts = [wanted[start : start + share] for start in range(0, len(wanted), share)]
    found: dict[str, Found] = {}
    with many_objects(), ThreadPoolExecutor(len(parts)) as pool:
        for some in in_parallel(pool, lambda part: _find(part, page, look_up), parts):
            found.update(some)
    return found


def _find(wanted: list[str], page: Page, look_up: LookUp) -> dict[str, Found]:
    found: dict[str, Found] = {}
    while len(wanted) > HEADS:
        listed, more = page(_common(wanted[0], wanted[-1]), wanted[0])
        reached = max(listed) if more and listed else None
        passed = bisect_right(wanted, reached) if reached is not None else len(wanted)
        found.update((key, listed[key]) for key in wanted[:passed] if key in listed)
        wanted = wanted[passed:]
        if passed < HEADS:  # the store holds far more than is asked for
            break
    if wanted:
        with ThreadPoolExecutor(REQUESTS_AT_ONCE) as pool:
            looked_up = zip(wanted, pool.map(look_up, wanted), strict=True)
            found.update((key, stored) for key, stored in looked_up if stored is not None)
    return found


def _common(one: str, other: str) -> str:
    """The longest beginning of both."""
    length = next(
        (index for index, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )
    return one[:length]
