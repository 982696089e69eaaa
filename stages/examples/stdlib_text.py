"""Prose that every CPython has: the help topics of `pydoc` and the docstrings of the standard library.

The text is that of the Python that runs, so it differs a little from version to version. It is licensed under the PSF
License Version 2 (https://docs.python.org/3/license.html), which allows copying and derived works with its notice.

Invariant: files are parsed and never imported; the same file gives the same documents.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SHORTEST = 80  # characters; shorter docstrings are mostly "Return the value." and teach little


def documents(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the prose of one .py file as rows with `text` and `source`.

    Of `pydoc_data/topics.py` each help topic is a document; of other files each docstring of a module, class or
    function of at least 80 characters is one, without its indentation. Docstrings that repeat in other files are left
    to the deduplication of the tokenize stage.

    Raises:
        ValueError: the file is not Python.
    """
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, RecursionError) as error:
        raise ValueError(f"not a Python file: {error}") from error
    topics = _topics(tree)
    if topics is not None:
        for name in sorted(topics):
            yield {"text": topics[name].strip(), "source": f"pydoc topic {name}"}
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = (ast.get_docstring(node, clean=True) or "").strip()
            if len(text) >= SHORTEST:
                yield {"text": text, "source": getattr(node, "name", "module")}


def _topics(tree: ast.Module) -> dict[str, str] | None:
    """The value of `topics = {...}` where the module assigns a dict of texts by that name."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == ["topics"]:
            try:
                value = ast.literal_eval(node.value)
            except ValueError:
                return None
            if isinstance(value, dict) and all(isinstance(text, str) for text in value.values()):
                return value
    return None
