"""Text of others on a terminal or a page: what it says, and nothing that it could do.

Logs, messages of stages, names in recipes and what a model wrote may hold any character: those that move a cursor, set
a window's title or turn the direction of writing are shown as what they are.
"""

from __future__ import annotations

import re
import unicodedata

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")  # what programs colour their logs with; it tells nothing here


def visible(text: str) -> str:
    """Text with every control, bidirectional and other invisible character shown as its code point.

    Line ends and tabs stay.
    """
    if text.isprintable():
        return text
    return "".join(_shown(character) for character in text)


def for_terminal(text: str) -> str:
    """Text that is safe to print: `visible`, without the codes of colours."""
    return text if text.isprintable() else visible(_COLOURS.sub("", text))


def _shown(character: str) -> str:
    if character in "\n\t" or unicodedata.category(character) not in ("Cc", "Cf", "Cs", "Co", "Zl", "Zp"):
        return character
    return "�" if unicodedata.category(character) == "Cs" else f"⟨{ord(character):04X}⟩"
