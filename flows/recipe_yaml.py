"""YAML as recipes use it: plain values, with the line on which each was written.

The model: a document is mappings, lists, strings, numbers, booleans and nulls, read by the rules of YAML 1.2 (so `no`
and `on` are strings, and `1e-3` is a number). Anchors, aliases and merge keys (`<<`) work.

Invariants:
- A key that is written twice in one mapping is refused, never silently replaced.
- Every value has a line: `Document.line(path)` is that of the value itself or of the nearest value around it.
- A short text never becomes a huge document: what aliases multiply, and how deep values nest, has a limit.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import yaml

Path = tuple[str | int, ...]

MAX_VALUES = 100_000  # in one document, aliases spelt out

_TAG = "tag:yaml.org,2002:"
_TOO_DEEP = "values are nested too deeply"


class YamlError(ValueError):
    """The text is not YAML that a recipe can use. `line` is 1-based."""

    def __init__(self, line: int, message: str) -> None:
        super().__init__(message)
        self.line = line
        self.message = message


class _Loader(yaml.SafeLoader):
    """A SafeLoader with the implicit types of YAML 1.2 (core schema) and merge keys."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012 (PyYAML's own shape)


for _name, _pattern, _first in (
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("int", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", "-+0123456789"),
    (
        "float",
        r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        "-+.0123456789",
    ),
    ("merge", r"<<", "<"),
):
    _Loader.add_implicit_resolver(_TAG + _name, re.compile(rf"^(?:{_pattern})$"), list(_first))


@dataclass
class Document:
    """A parsed text: its value, and the 1-based line of every value in it by path."""

    value: Any
    lines: dict[Path, int] = field(default_factory=dict)

    def line(self, path: Path) -> int:
        """The line of the value at `path`, or of the nearest value around it."""
        while path and path not in self.lines:
            path = path[:-1]
        return self.lines.get(path, 1)


def parse(text: str) -> Document:
    """Parse one YAML document.

    Raises:
        YamlError: the syntax is broken, a key is repeated, a key is not a string, or a value has a type of no use here.
    """
    try:
        loader = _Loader(text)
    except yaml.YAMLError as error:  # a character that YAML does not allow
        raise YamlError(1, str(error).splitlines()[0]) from None
    try:
        node = loader.get_single_node()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        problem = " ".join(part for part in (error.problem, error.context) if part)
        if "'\\t'" in problem:
            problem = "a tab ('\\t') stands where a value begins; indent with spaces"
        raise YamlError(mark.line + 1 if mark else 1, problem.replace("\n", " ")) from None
    except RecursionError:
        raise YamlError(loader.line + 1, _TOO_DEEP) from None
    finally:
        loader.dispose()
    document = Document(None)
    if node is not None:
        try:
            document.value = _build(node, (), document.lines, (), itertools.count(1))
        except RecursionError:
            raise YamlError(1, _TOO_DEEP) from None
    return document


def parse_value(text: str) -> Any:
    """Parse the value of `--set name=value`: "0.2" is a number, "[a, b]" a list, "no" a string, "" null.

    Raises:
        YamlError: the text is not YAML.
    """
    return parse(text).value


def _build(node: yaml.Node, path: Path, lines: dict[Path, int], around: tuple[int, ...], count: Iterator[int]) -> Any:
    line = node.start_mark.line + 1
    if id(node) in around:
        raise YamlError(line, "an alias refers to a value that contains it")
    if next(count) > MAX_VALUES:
        raise YamlError(line, f"aliases make this more than {MAX_VALUES:,} values; write less of them")
    around = (*around, id(node))
    lines.setdefault(path, line)
    if isinstance(node, yaml.MappingNode) and node.tag == _TAG + "map":
        return _mapping(node, path, lines, around, count)
    if isinstance(node, yaml.SequenceNode) and node.tag == _TAG + "seq":
        return [_build(item, (*path, index), lines, around, count) for index, item in enumerate(node.value)]
    if isinstance(node, yaml.ScalarNode):
        return _scalar(node, line)
    raise YamlError(line, f"the tag {node.tag.replace(_TAG, '!!')} has no use in a recipe")


def _mapping(
    node: yaml.MappingNode, path: Path, lines: dict[Path, int], around: tuple[int, ...], count: Iterator[int]
) -> dict[str, Any]:
    result: dict[str, Any] = {}
    written: dict[str, int] = {}
    merged: list[tuple[yaml.Node, int]] = []
    for key_node, value_node in node.value:
        line = key_node.start_mark.line + 1
        if key_node.tag == _TAG + "merge":
            merged.append((value_node, line))
            continue
        if not isinstance(key_node, yaml.ScalarNode):
            raise YamlError(line, "a key must be a plain word")
        key = key_node.value
        if key in written:
            raise YamlError(line, f"{'.'.join(map(str, (*path, key)))} is written twice, first on line {written[key]}")
        written[key] = line
        lines[(*path, key)] = line
        result[key] = _build(value_node, (*path, key), lines, around, count)
    for value_node, line in merged:
        parts = value_node.value if isinstance(value_node, yaml.SequenceNode) else [value_node]
        for part in parts:
            if not isinstance(part, yaml.MappingNode):
                raise YamlError(line, "<< takes a mapping, or a list of mappings")
            if id(part) in around:
                raise YamlError(line, "an alias refers to a value that contains it")
            for key, value in _mapping(part, path, {}, (*around, id(part)), count).items():
                if key not in result:
                    result[key] = value
                    lines[(*path, key)] = line
    return result


def _scalar(node: yaml.ScalarNode, line: int) -> Any:
    tag, text = node.tag.removeprefix(_TAG), node.value
    if tag == "int" and len(text) > 400:
        raise YamlError(line, f"the number {text[:20]}... has {len(text):,} digits, too many to use")
    try:
        match tag:
            case "str":
                return text
            case "null":
                return None
            case "bool":
                return text.lower() == "true"
            case "int":
                return int(text, 0) if re.match(r"0[xo]", text) else int(text)
            case "float":
                return float(re.sub(r"(?i)\.(inf|nan)", r"\1", text))
    except ValueError:
        raise YamlError(line, f"{text[:40]!r} is not a value of type {tag}") from None
    if tag == "merge":
        return text
    raise YamlError(line, f"the tag {node.tag.replace(_TAG, '!!')} has no use in a recipe")
