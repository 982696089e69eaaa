"""Reads rows out of data files: JSON, CSV, text and Parquet, each also where a line or a whole file is broken.

Invariants:
- A row is a dict of columns. What cannot be read is yielded as a `BadRow` in its place, so that the caller decides
  whether it ends the step or is dropped and counted; nothing is repaired, guessed or skipped in silence. Only blank
  lines of JSON Lines and a byte order mark are passed over.
- Every row says where it comes from, in words that a user can go and look at.
- Text is returned as strings that UTF-8 can encode, without NUL.
- The values of a CSV file are strings as they stand there; an empty cell is an empty string.
"""

from __future__ import annotations

import csv
import gzip
import inspect
import io
import json
import sys
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from stages.contract import Refused, StageEnd, failure, import_function

TEXT_SUFFIXES = (".txt", ".md")
JSON_SUFFIXES = (".jsonl", ".ndjson", ".json")
DELIMITERS = {".csv": ",", ".tsv": "\t"}
COMPRESSED_SUFFIXES = (".gz", ".zst")
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
    plain = name.lower()
    for suffix in COMPRESSED_SUFFIXES:
        plain = plain.removesuffix(suffix)
    if plain.endswith(JSON_SUFFIXES):
        rows = _read_json_array(path, name) if _is_array(path, name) else _read_json_lines(path, name)
    elif plain.endswith(tuple(DELIMITERS)):
        rows = _read_csv(path, name, DELIMITERS[plain[-4:]])
    elif plain.endswith(TEXT_SUFFIXES):
        rows = _read_text(path, name, text_unit)
    elif name.lower().endswith(PARQUET_SUFFIX):
        rows = _read_parquet(path, name)
    else:
        known = ", ".join((*JSON_SUFFIXES, *DELIMITERS, *TEXT_SUFFIXES, PARQUET_SUFFIX))
        raise Refused(
            f"{name}: no reader for this kind of file. Files end in {known} (all but Parquet also in .gz or .zst); "
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
    if name.lower().endswith(".gz"):
        return gzip.open(path, "rb")  # type: ignore[return-value]
    if name.lower().endswith(".zst"):
        import pyarrow as pa

        return io.BufferedReader(pa.input_stream(str(path), compression="zstd"))
    return path.open("rb")


def _damaged(name: str, error: Exception, where: str = "") -> BadRow:
    """What is wrong with a compressed file that cannot be read on.

    Raises:
        Exception: `error` itself, where the file is not compressed: then it is the disk's.
    """
    if not name.lower().endswith(COMPRESSED_SUFFIXES):
        raise error
    return BadRow("damaged_file", f"the compressed file is damaged{where}: {error}")


def _lines(path: Path, name: str) -> Iterator[tuple[int, bytes] | BadRow]:
    """(number, line) without a byte order mark; a compressed file that breaks off ends in a BadRow."""
    number = 0
    with _open(path, name) as file:
        while True:
            try:
                line = file.readline()
            except (EOFError, zlib.error, OSError) as error:
                yield _damaged(name, error, f" after line {number:,}")
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
            columns = json.loads(_decode(line), object_pairs_hook=_object)
        except BadRow as error:
            yield Row(where, {}, error)
        except json.JSONDecodeError as error:
            hint = f"{error.msg} at character {error.pos + 1:,}; a line holds one whole JSON object"
            yield Row(where, {}, BadRow("not_json", f"not valid JSON: {hint}"))
        except (RecursionError, ValueError) as error:  # nested too deep, or a number of thousands of digits
            yield Row(where, {}, BadRow("not_json", f"not usable JSON: {error}"))
        else:
            yield _checked(where, columns)


def _is_array(path: Path, name: str) -> bool:
    """Whether the first character of a JSON file that is no white space opens a list."""
    for item in _lines(path, name):
        if isinstance(item, BadRow) or item[1].strip():
            return not isinstance(item, BadRow) and item[1].lstrip()[:1] == b"["
    return False


def _read_json_array(path: Path, name: str) -> Iterator[Row]:
    """The items of a file that is one list of objects. Behind one that is not JSON, none can be found."""
    lines: list[bytes] = []
    for item in _lines(path, name):
        if isinstance(item, BadRow):
            yield Row(name, {}, item)
            return
        lines.append(item[1])
    number, twice = 0, []

    def notice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        try:
            return _object(pairs)
        except BadRow as error:
            twice.append(error)
            return dict(pairs)

    decoder = json.JSONDecoder(object_pairs_hook=notice)
    try:
        text = _decode(b"".join(lines))
        lines.clear()
        place = _after_space(text, text.index("[") + 1)
        while number or text[place : place + 1] != "]":
            number += 1
            columns, place = decoder.raw_decode(text, place)
            where = f"{name} row {number:,}"
            yield Row(where, {}, twice[0]) if twice else _checked(where, columns)
            twice.clear()
            place = _after_space(text, place)
            if text[place : place + 1] == "]":
                break
            if text[place : place + 1] != ",":
                raise json.JSONDecodeError("Expecting ',' or ']'", text, place)
            place = _after_space(text, place + 1)
        if text[place + 1 :].strip():
            raise json.JSONDecodeError("Something follows the list", text, _after_space(text, place + 1))
    except json.JSONDecodeError as error:
        spot = f"{error.msg} at line {error.lineno:,}, character {error.colno:,}"
        yield Row(f"{name} row {number:,}", {}, BadRow("not_json", f"not valid JSON: {spot}; the rest is not read"))
    except (BadRow, RecursionError, ValueError) as error:
        bad = error if isinstance(error, BadRow) else BadRow("not_json", f"not usable JSON: {error}")
        yield Row(f"{name} row {number:,}" if number else name, {}, bad)


def _after_space(text: str, place: int) -> int:
    """The place of the first character from `place` on that is no white space of JSON."""
    while text[place : place + 1] in (" ", "\n", "\r", "\t"):
        place += 1
    return place


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    columns = dict(pairs)
    if len(columns) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise BadRow("duplicate_key", f"{twice!r} is given twice in one object, so which one counts is not clear")
    return columns


def _read_csv(path: Path, name: str, delimiter: str) -> Iterator[Row]:
    """The records below the first one, which names the columns. A record is told by the line it begins in."""
    end = 0  # the last line that was read
    problem: BadRow | None = None

    def texts() -> Iterator[str]:
        nonlocal problem
        for item in _lines(path, name):
            try:
                if isinstance(item, BadRow):
                    raise item
                yield _decode(item[1])
            except BadRow as error:
                problem = error
                return

    csv.field_size_limit(sys.maxsize)
    records = csv.reader(texts(), delimiter=delimiter, strict=True)
    names: list[str] | None = None
    while True:
        where = f"{name} line {end + 1:,}"
        try:
            cells = next(records, None)
        except csv.Error as error:
            yield Row(where, {}, BadRow("not_csv", f"not valid CSV: {error}; the rest is not read"))
            return
        if problem is not None:  # what was read of this record breaks off
            yield Row(where, {}, BadRow(problem.reason, f"{problem}; the rest is not read"))
            return
        if cells is None:
            return
        begin, end = end + 1, records.line_num
        if not cells:  # a blank line
            continue
        if names is None:
            names = cells
            if twice := sorted({column for column in names if names.count(column) > 1}):
                yield Row(where, {}, BadRow("duplicate_key", f"it has two columns {twice[0]!r}; rename one"))
                return
        elif len(cells) != len(names):
            what = f"{len(cells)} values for {len(names)} columns ({', '.join(names)})"
            yield Row(f"{name} line {begin:,}", {}, BadRow("not_csv", what))
        else:
            yield Row(f"{name} line {begin:,}", dict(zip(names, cells, strict=True)))


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
                    yield _checked(f"{name} row {number:,}", _without_filling(columns))
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


def _without_filling(columns: dict[str, Any]) -> dict[str, Any]:
    """The columns without the nulls that Parquet puts into messages and tools.

    All objects of a column have all fields that any of them has. A field that an object never had comes back as null,
    and a chat template would write it out.
    """
    return {
        name: _without_nulls(value) if name == "tools" or _is_messages(value) else value
        for name, value in columns.items()
    }


def _is_messages(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, dict) and "role" in item for item in value)


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_nulls(part) for name, part in value.items() if part is not None}
    return [_without_nulls(part) for part in value] if isinstance(value, list) else value


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
