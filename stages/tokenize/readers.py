"""Reads rows out of data files: JSON Lines, text and Parquet, each also where a line or a whole file is broken.

Invariants:
- A row is a dict of columns. What cannot be read is yielded as a `BadRow` in its place, so that the caller decides
  whether it ends the step or is dropped and counted; nothing is repaired, guessed or skipped in silence. Only blank
  lines of JSON Lines and a byte order mark are passed over.
- Every row says where it comes from, in words that a user can go and look at.
- Text is returned as strings that UTF-8 can encode, without NUL.
"""

from __future__ import annotations

import gzip
import inspect
import json
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from stages.contract import Refused, StageEnd, failure, import_function

TEXT_SUFFIXES = (".txt", ".md")
JSON_SUFFIXES = (".jsonl", ".ndjson", ".json")
PARQUET_SUFFIX = ".parquet"
PARQUET_BATCH = 1024
MAX_DEPTH = 64  # of lists and objects in a row; what handles rows recurses


class BadRow(ValueError):
    """A row that cannot be used.

    Attributes:
        reason: one word to count it under, such as "not_json".
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Row:
    """One row and where it comes from ("data/train.jsonl line 3,017"); `error` is set where it could not be read."""

    where: str
    columns: dict[str, Any]
    error: BadRow | None = None


def read_file(
    path: Path, name: str, *, reader: Callable[..., Any] | None = None, text_unit: str = "file"
) -> Iterator[Row]:
    """Yield the rows of one file.

    Args:
        path: the file.
        name: what to call it in messages.
        reader: a function that yields dicts out of a path, instead of the format that the file's name tells.
        text_unit: "file", "line" or "paragraph": what one row of a text file is.

    Raises:
        Refused: the name of the file does not tell a known format.
    """
    if reader is not None:
        yield from _read_custom(path, name, reader)
        return
    plain = name.lower().removesuffix(".gz")
    if plain.endswith(JSON_SUFFIXES):
        rows = _read_json_lines(path, name)
    elif plain.endswith(TEXT_SUFFIXES):
        rows = _read_text(path, name, text_unit)
    elif name.lower().endswith(PARQUET_SUFFIX):
        rows = _read_parquet(path, name)
    else:
        known = ", ".join((*JSON_SUFFIXES, *TEXT_SUFFIXES, PARQUET_SUFFIX))
        raise Refused(
            f"{name}: no reader for this kind of file. Files end in {known} (text and JSON Lines also in .gz); "
            "leave it out of the input's list, or set `reader` to a function that reads it"
        )
    empty = True
    for row in rows:
        empty = False
        yield row
    if empty:
        yield Row(name, {}, BadRow("empty_file", "the file holds no rows"))


def generate(function: str, arguments: dict[str, Any], seed: int) -> Iterator[Row]:
    """Yield the rows that `module:function` makes with `arguments` and `seed`.

    Raises:
        Refused: it cannot be imported, does not take these arguments, or does not give rows.
    """
    call = import_function(function)
    given = {"seed": seed, **arguments}
    try:
        inspect.signature(call).bind(**given)
    except TypeError as error:
        raise Refused(f"generator {function} cannot be called with {', '.join(sorted(given))}: {error}") from None
    try:
        rows = iter(call(**given))
    except StageEnd:
        raise
    except (Exception, SystemExit) as error:
        raise Refused(f"generator {function} with {arguments}: {failure(error)}") from error
    number = 0
    while True:
        number += 1
        try:
            columns = next(rows)
        except StopIteration:
            return
        except ValueError as error:  # how a generator says that an argument is out of range
            raise Refused(f"generator {function} with {arguments}: {error}") from error
        except StageEnd:
            raise
        except (Exception, SystemExit) as error:
            raise Refused(
                f"generator {function} with {arguments} failed at row {number:,}: {failure(error)}"
            ) from error
        yield _checked(f"{function} row {number:,}", columns)


def clean_text(text: str) -> str:
    """Return `text`, or say why no tokenizer should see it.

    Raises:
        BadRow: it holds a lone surrogate or NUL.
    """
    if "\0" in text:
        raise BadRow("nul", "the text holds a NUL character, so it is probably not text")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadRow(
            "lone_surrogate", f"character {error.start + 1:,} of the text is half of a surrogate pair (\\ud800-\\udfff)"
        ) from None
    return text


def all_strings(value: Any) -> Iterator[str]:
    """Every string in a JSON value, the names in objects included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for name, item in value.items():
            yield name
            yield from all_strings(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from all_strings(item)


def _checked(where: str, columns: Any) -> Row:
    if not isinstance(columns, dict) or not all(isinstance(name, str) for name in columns):
        error = BadRow("not_an_object", f"a row must be an object with named columns, not {type(columns).__name__}")
        return Row(where, {}, error)
    if _too_deep(columns):
        return Row(where, {}, BadRow("nested_too_deep", f"values are nested more than {MAX_DEPTH} deep"))
    return Row(where, columns)


def _too_deep(columns: dict[str, Any]) -> bool:
    """Whether lists and objects lie more than `MAX_DEPTH` deep in one another (or contain themselves)."""
    level = [item for item in columns.values() if isinstance(item, dict | list | tuple)]
    for _ in range(MAX_DEPTH):
        if not level:
            return False
        level = [
            inner
            for item in level
            for inner in (item.values() if isinstance(item, dict) else item)
            if isinstance(inner, dict | list | tuple)
        ]
    return True


def _open(path: Path, name: str) -> IO[bytes]:
    return gzip.open(path, "rb") if name.lower().endswith(".gz") else path.open("rb")  # type: ignore[return-value]


def _lines(path: Path, name: str) -> Iterator[tuple[int, bytes] | BadRow]:
    """(number, line) without a byte order mark; a gzip file that breaks off ends in a BadRow."""
    number = 0
    with _open(path, name) as file:
        while True:
            try:
                line = file.readline()
            except (EOFError, zlib.error, gzip.BadGzipFile) as error:
                yield BadRow("damaged_file", f"the gzip file is damaged after line {number:,}: {error}")
                return
            if not line:
                return
            number += 1
            if number == 1:
                line = line.removeprefix(b"\xef\xbb\xbf")
            yield number, line


def _decode(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        utf16 = data[:2] in (b"\xff\xfe", b"\xfe\xff")
        hint = "; it looks like UTF-16, so save it as UTF-8" if utf16 else ""
        raise BadRow("not_utf8", f"byte {error.start + 1:,} is not valid UTF-8{hint}") from None


def _read_json_lines(path: Path, name: str) -> Iterator[Row]:
    for item in _lines(path, name):
        if isinstance(item, BadRow):
            yield Row(name, {}, item)
            return
        number, line = item
        if not line.strip():
            continue
        where = f"{name} line {number:,}"
        try:
            text = _decode(line)
            if number == 1 and text.lstrip().startswith("["):
                raise BadRow("not_json", "the file holds one JSON array; write one object a line (JSON Lines)")
            columns = json.loads(text, object_pairs_hook=_object)
        except BadRow as error:
            yield Row(where, {}, error)
        except json.JSONDecodeError as error:
            hint = f"{error.msg} at character {error.pos + 1:,}; a line holds one whole JSON object"
            yield Row(where, {}, BadRow("not_json", f"not valid JSON: {hint}"))
        except (RecursionError, ValueError) as error:  # nested too deep, or a number of thousands of digits
            yield Row(where, {}, BadRow("not_json", f"not usable JSON: {error}"))
        else:
            yield _checked(where, columns)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    columns = dict(pairs)
    if len(columns) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise BadRow("duplicate_key", f"{twice!r} is given twice in one object, so which one counts is not clear")
    return columns


def _read_text(path: Path, name: str, unit: str) -> Iterator[Row]:
    """Line ends become "\\n", as Python's text files do; what cannot be decoded spoils its own line, or its file."""
    parts: list[str] = []
    first = 1
    for item in _lines(path, name):
        if isinstance(item, BadRow):
            yield Row(name, {}, item)
            return
        number, line = item
        try:
            text = _decode(line).replace("\r\n", "\n")
        except BadRow as error:
            if unit == "line":
                yield Row(f"{name} line {number:,}", {}, error)
                continue
            yield Row(name, {}, BadRow(error.reason, f"line {number:,}: {error}"))
            return
        if unit == "line":
            if text.strip():
                yield Row(f"{name} line {number:,}", {"text": text.rstrip("\n")})
        elif unit == "paragraph" and not text.strip():
            if parts:
                yield Row(f"{name} line {first:,}", {"text": "".join(parts).rstrip("\n")})
                parts = []
        else:
            if not parts:
                first = number
            parts.append(text)
    if parts and unit == "paragraph":
        yield Row(f"{name} line {first:,}", {"text": "".join(parts).rstrip("\n")})
    elif parts and (text := "".join(parts)).strip():
        yield Row(name, {"text": text})


def _read_parquet(path: Path, name: str) -> Iterator[Row]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    number = 0
    try:
        with pq.ParquetFile(path) as file:
            names = file.schema_arrow.names
            if twice := sorted({column for column in names if names.count(column) > 1}):
                yield Row(name, {}, BadRow("duplicate_key", f"it has two columns {twice[0]!r}; rename one"))
                return
            for batch in file.iter_batches(batch_size=PARQUET_BATCH):
                for columns in _batch_rows(batch):
                    number += 1
                    yield _checked(f"{name} row {number:,}", columns)
    except (pa.ArrowException, OSError, ValueError) as error:
        text = str(error).splitlines()[0] if str(error) else type(error).__name__
        yield Row(name, {}, BadRow("damaged_file", f"not a readable Parquet file, after row {number:,}: {text}"))


def _batch_rows(batch: Any) -> list[dict[str, Any]]:
    """The rows of a batch as Python values.

    Raises:
        ValueError: a column has values that Python has none for.
    """
    try:
        rows: list[dict[str, Any]] = batch.to_pylist()
        return rows
    except Exception:  # whatever the type of each column raises: nanoseconds, time zones, years after 9999
        for column, values in zip(batch.schema.names, batch.columns, strict=True):
            try:
                values.to_pylist()
            except Exception as error:
                text = str(error).splitlines()[0] if str(error) else type(error).__name__
                raise ValueError(f"column {column!r} ({values.type}) cannot be read: {text}; leave it out") from error
        raise


def _read_custom(path: Path, name: str, reader: Callable[..., Any]) -> Iterator[Row]:
    number = 0
    try:
        for columns in reader(path):
            number += 1
            yield _checked(f"{name} row {number:,}", columns)
    except (ValueError, SyntaxError, OSError) as error:  # how a reader says that the file is not one of its own
        yield Row(name, {}, BadRow("damaged_file", f"the reader failed after row {number:,}: {error}"))
    except StageEnd:
        raise
    except (Exception, SystemExit) as error:
        raise Refused(f"{name}: the reader failed after row {number:,}: {failure(error)}") from error
