from __future__ import annotations

import sysconfig
from pathlib import Path

import pytest

from stages.examples.stdlib_text import documents

LIBRARY = Path(sysconfig.get_path("stdlib"))


def test_help_topics_are_documents_of_prose() -> None:
    rows = list(documents(LIBRARY / "pydoc_data" / "topics.py"))
    topics = {row["source"]: row["text"] for row in rows}
    assert len(topics) == len(rows) > 50
    assert "assert" in topics["pydoc topic assert"]
    assert sum(len(text) for text in topics.values()) > 300_000


def test_docstrings_of_a_library_module_are_documents() -> None:
    rows = list(documents(LIBRARY / "textwrap.py"))
    assert any(row["source"] == "TextWrapper" and row["text"].startswith("Object for wrapping") for row in rows)


def test_docstrings_lose_their_indentation_and_short_ones_are_left_out(tmp_path: Path) -> None:
    prose = "This is a sentence which is long enough to be worth reading, or so one hopes."
    function = f'def f():\n    """{prose}\n\n        indented\n    back\n    """\n'
    source = f'"""Short."""\n\n\n{function}\n\nclass A:\n    x = "text"\n'
    path = tmp_path / "module.py"
    path.write_text(source)
    assert list(documents(path)) == [{"text": f"{prose}\n\n    indented\nback", "source": "f"}]


def test_a_module_is_never_imported(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text("raise SystemExit(3)\n")
    assert list(documents(path)) == []


@pytest.mark.parametrize("source", ["def (", "x = 1\0", "# coding: no-such-codec\n"])
def test_what_is_not_python_is_an_error(tmp_path: Path, source: str) -> None:
    path = tmp_path / "module.py"
    path.write_text(source)
    with pytest.raises(ValueError, match="not a Python file"):
        list(documents(path))


def test_other_variables_called_topics_are_ignored(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text("topics = {'a': 1}\ntopics = [f(x)]\n")
    assert list(documents(path)) == []
