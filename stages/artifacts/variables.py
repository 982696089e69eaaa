"""Numbers that users set as variables of the environment."""

from __future__ import annotations

import math
import os

from stages.artifacts.store import StoreError


def seconds_of(name: str, default: float, least: float, most: float = 86400.0) -> float:
    """The seconds that a variable says, or `default` where it is unset or empty.

    Raises:
        StoreError: it is no number from `least` to `most`.
    """
    text = os.environ.get(name, "").strip()
    try:
        value = float(text) if text else default
    except ValueError:
        value = math.nan
    if not least <= value <= most:
        raise StoreError(f"{name} is {text!r}; give a number of seconds from {least:g} to {most:g}, or unset it")
    return value
