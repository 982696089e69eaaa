"""Finds the rows of a step, turns them into examples, and counts what is kept and what is dropped.

Invariants:
- Every row that was read is either kept or counted under the reason it was dropped for.
- Which split an example is in depends on nothing but its content: others coming or going never move it.
- Reading twice gives the same examples twice. A generator's first rows are made once more to see that they are the
  same each time; if they are not, the step is refused, for nothing made of them could be made again.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from stages.contract import Refused, StageContext, import_function
from stages.tokenize import rollouts
from stages.tokenize.config import Config
from stages.tokenize.origins import Origin, number_of
from stages.tokenize.readers import BadRow, Row, generate, read_file
from stages.tokenize.rows import Example, key, parse, split_key

SHOWN_BAD_ROWS = 5
SAMPLED_ROWS = 64  # of a generator, made once more to see that they are the same
# Such rows are dropped whatever `on_bad_rows` says: the first are no fault of their maker, on the second `on_long_rows`
# has decided.
_ALWAYS_DROPPED = ("no_target", "too_long")


@dataclass(frozen=True)
class Source:
    """Where rows come from: the files of one input, or one generator.

    Attributes:
        sample: of a generator, the first rows that it made when it was asked before: column -> hash.
    """

    label: str
    files: list[tuple[Path, str]] = field(default_factory=list)
    generator: int | None = None
    train_only: bool = False
    sample: list[dict[str, str]] = field(default_factory=list)


@dataclass
class Tally:
    """What became of the rows, in all and by source."""

    kept: Counter[str] = field(default_factory=Counter)
    dropped: Counter[str] = field(default_factory=Counter)
    dropped_at: Counter[str] = field(default_factory=Counter)
    shown: int = 0

    @property
    def read(self) -> int:
        return self.kept.total() + self.dropped.total()

    def drop(self, source: str, reason: str) -> None:
        self.dropped[reason] += 1
        self.dropped_at[source] += 1


@dataclass(frozen=True, slots=True)
class Item:
    """An example on its way into a split."""

    example: Example
    where: str
    source: str
    split: str
    key: bytes
    origin: Origin


def find_sources(context: StageContext[Config]) -> tuple[list[Source], dict[str, Path]]:
    """The sources of rows in a fixed order, and by input the tables of rollouts.

    Raises:
        Refused: an input holds no files, or something of the wrong kind.
    """
    config = context.config
    folders = {name: path for name, path in context.inputs.items() if name == "data" or name.startswith("data.")}
    sources: list[Source] = []
    tables: dict[str, Path] = {}
    for name, folder in folders.items():
        if (folder / rollouts.FILE).is_file():
            if config.format != "preference":
                raise Refused(f"input {name} holds rollouts, which make preference pairs: set format: preference")
            tables[name] = folder / rollouts.FILE
            continue
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        if not files:
            raise Refused(f"input {name} holds no files")
        sources.append(Source(name, [(path, path.relative_to(folder).as_posix()) for path in files]))
    for index, generator in enumerate(config.generators):
        sample = [_hashes(row) for row in islice(_generated(config, index), SAMPLED_ROWS)]
        sources.append(Source(generator.function, generator=index, train_only=generator.train_only, sample=sample))
    return sources, tables


def read_rows(config: Config, source: Source) -> Iterator[tuple[Row, str]]:
    """Yield the rows of one source, each with the name of its file, "" for a generator.

    Raises:
        Refused: a generator fails, or makes other rows than when it was asked before.
    """
    if source.generator is not None:
        number = 0
        for number, row in enumerate(_generated(config, source.generator), 1):
            if number <= SAMPLED_ROWS:
                _check_same(source, number, _hashes(row))
            yield row, ""
        if number < len(source.sample):
            _check_same(source, number + 1, None)
        return
    reader = import_function(config.reader) if config.reader else None
    for path, name in source.files:
        for row in read_file(path, name, reader=reader, text_unit=config.text_unit):
            yield row, name


def _generated(config: Config, index: int) -> Iterator[Row]:
    generator = config.generators[index]
    return generate(generator.function, generator.arguments, config.seed)


def _hashes(row: Row) -> dict[str, str]:
    """Column -> a hash of its value."""
    return {
        name: hashlib.sha256(repr(_plain(value)).encode("utf-8", "backslashreplace")).hexdigest()
        for name, value in row.columns.items()
    }


def _plain(value: Any) -> Any:
    """A value in a form whose `repr` is a function of its content: dicts in order, of other objects the type alone."""
    if isinstance(value, dict):
        return [(key, _plain(part)) for key, part in sorted(value.items(), key=str)]
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    return value if isinstance(value, str | int | float | bool | None) else type(value).__name__


def _check_same(source: Source, number: int, now: dict[str, str] | None) -> None:
    """Refuse a generator whose row (from 1; None: there is none) differs from the one that it made before."""
    before = source.sample[number - 1] if number <= len(source.sample) else None
    if now == before:
        return
    if now is None or before is None:
        what = f"row {number:,} is there one time and not the other"
    else:
        name = next(name for name in [*now, *before] if now.get(name) != before.get(name))
        what = f"{name!r} of row {number:,} is another one each time"
    raise Refused(
        f"generator {source.label} makes other rows when it is called again with the same arguments and seed: {what}, "
        "so nothing made of them could be made again; let it draw from random.Random(seed) alone, and read no clock"
    )


def select(context: StageContext[Config], sources: list[Source], tally: Tally) -> Iterator[Item]:
    """Yield the examples that are kept, as far as that can be told without tokens.

    Raises:
        Refused: a row cannot be used and `on_bad_rows` is refuse.
    """
    config = context.config
    seen: set[bytes] = set()
    count = 0
    for source in sources:
        for row, path in read_rows(config, source):
            if config.limit is not None and count >= config.limit:
                return
            try:
                if row.error is not None:
                    raise row.error
                example = parse(config, row.columns)
            except BadRow as error:
                drop(context, tally, source.label, row.where, error)
                continue
            digest = key(example)
            if config.deduplicate:
                if digest in seen:
                    tally.drop(source.label, "duplicate")
                    continue
                seen.add(digest)
            count += 1
            tally.kept[source.label] += 1
            split = "train" if source.train_only else split_of(config, split_key(example))
            origin = Origin(source.label, path, number_of(row.where, path or source.label))
            yield Item(example, row.where, source.label, split, digest, origin)


def drop(
    context: StageContext[Config], tally: Tally, source: str, where: str, error: BadRow, *, before: int | None = None
) -> None:
    """Count a row that cannot be used, and name the first ones in the log. `before` rows were dealt with earlier.

    Raises:
        Refused: `on_bad_rows` is refuse.
    """
    if context.config.on_bad_rows == "refuse" and error.reason not in _ALWAYS_DROPPED:
        raise Refused(
            f"{where}: {error}. {tally.read if before is None else before:,} rows before it were read; "
            "`on_bad_rows: drop` skips such rows and counts them"
        )
    tally.drop(source, error.reason)
    tally.shown += 1
    if tally.shown <= SHOWN_BAD_ROWS:
        more = "; further ones are only counted" if tally.shown == SHOWN_BAD_ROWS else ""
        context.log(f"dropped {where}: {error}{more}", level="warning")


def split_of(config: Config, digest: bytes) -> str:
    """The split of an example, by a hash of what may not be on both sides."""
    share = int.from_bytes(digest[:8], "big") / 2**64
    return "validation" if share < config.validation_fraction else "train"
