"""Keeping secrets out of what is written to a store.

Credentials belong in the environment. What a person writes into a recipe, an override, a message or a log would be
stored for good and shared with everybody who reads the store. Two nets, then: `find_secret` lets a recipe be refused
before it runs, and `redact` blanks what is about to be written in records and logs.

What counts as a secret: the value of an environment variable that is named like one (TOKEN, SECRET, PASSWORD, API_KEY,
...), text in the form of well-known credentials, and the password of a URL. A password of another form that is in no
such variable cannot be told from other text.
"""

from __future__ import annotations

import json
import os
import re
from typing import Any

BLANK = "[secret]"
_SHORTEST = 8  # a shorter value of a variable would blank ordinary words

_NAMES = re.compile(
    r"(^|_)(TOKEN|SECRET|SECRETS|PASSWORD|PASSWD|PASSPHRASE|API_?KEY|ACCESS_KEY|PRIVATE_KEY|CREDENTIALS?)(_ID)?($|_)",
    re.IGNORECASE,
)
_NOT_VALUES = re.compile(r"(_FILE|_PATH|_DIR|_TYPE|_URL|PARALLELISM)$", re.IGNORECASE)  # these say where or how
_FORMS = {
    "an access key of AWS": r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b",
    "a token of Hugging Face": r"\bhf_[A-Za-z0-9]{30,}\b",
    "a token of GitHub": r"\b(?:gh[pousr]_[A-Za-z0-9]{36,}|github_pat_[A-Za-z0-9_]{50,})\b",
    "a token of GitLab": r"\bglpat-[A-Za-z0-9_-]{20,}",
    "a token of Slack": r"\bxox[abprs]-[A-Za-z0-9-]{10,}",
    "an API key": r"\bsk-(?:[A-Za-z]+-)*[A-Za-z0-9_]{32,}\b",
    "a private key": r"-----BEGIN (?:[A-Z]+ )*PRIVATE KEY-----",
}
_FORM = re.compile("|".join(f"(?:{form})" for form in _FORMS.values()))
_URL = re.compile(r"(?P<before>\b[a-z][a-z0-9+.-]*://[^\s/:@\"']*:)(?P<secret>[^\s/@\"']+)(?=@)", re.IGNORECASE)


def find_secret(text: str) -> tuple[int, str] | None:
    """The first secret in a text: the offset where it begins, and what it is in words (never the secret itself)."""
    found: list[tuple[int, str]] = []
    for name, value in _from_environment():
        if (at := text.find(value)) >= 0:
            found.append((at, f"the value of ${name}"))
    for what, form in _FORMS.items():
        if match := re.search(form, text):
            found.append((match.start(), what))
    if match := _URL.search(text):
        found.append((match.start("secret"), "the password of a URL"))
    return min(found, default=None)


def redact(text: str) -> str:
    """The text with every secret replaced by "[secret]". Works on plain text and on JSON."""
    for _, value in _from_environment():
        for form in {value, json.dumps(value)[1:-1], json.dumps(value, ensure_ascii=False)[1:-1]}:
            text = text.replace(form, BLANK)
    text = _FORM.sub(BLANK, text)
    return _URL.sub(lambda match: match["before"] + BLANK, text)


def redact_event(event: dict[str, Any]) -> dict[str, Any]:
    """An event of a stage, its texts redacted."""
    texts = {name: redact(event[name]) for name in ("text", "message", "for") if isinstance(event.get(name), str)}
    return {**event, **texts}


def _from_environment() -> list[tuple[str, str]]:
    """Names and values of the variables that hold secrets, the longest value first."""
    found = [
        (name, value)
        for name, value in os.environ.items()
        if len(value) >= _SHORTEST and _NAMES.search(name) and not _NOT_VALUES.search(name) and not _is_plain(value)
    ]
    return sorted(found, key=lambda pair: (-len(pair[1]), pair[0]))


def _is_plain(value: str) -> bool:
    """Whether a value is a word, number or path that says nothing secret ("disabled", "/run/secrets/x")."""
    return value.startswith(("/", "./", "~")) or value.isdecimal() or value.lower() in ("disabled", "anonymous")
