"""The page that compares two artifacts."""

from __future__ import annotations

from typing import Any

from flows.lineage.browser.site import Site


def compare(site: Site, first: str, second: str) -> dict[str, Any]:
    """What differs between two artifacts."""
    return {"title": "Compare", "here": "compare", "first": first, "second": second}
