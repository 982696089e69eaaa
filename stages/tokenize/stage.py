"""The tokenize stage: rows in, a `dataset` artifact out.

Rows are read (files, generators, rollouts), made into examples, freed of exact duplicates, split by a hash of their
content, encoded in batches, and written. Where a tokenizer is trained, the rows are read twice: once for the tokenizer,
which sees the training split only, and once to encode them.

Invariants:
- No split is empty, and no document without a trained token is kept.
- The same config and inputs give the same bytes.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from stages.contract import Refused, StageContext, Stopped
from stages.tokenize import rollouts
from stages.tokenize.config import Config
from stages.tokenize.dataset import INFO_FILE, PACKED, SPLITS, tokenizer_folder
from stages.tokenize.encode import Document, Encoded, EncodedPair, EncodedPrompt, Encoder
from stages.tokenize.origins import Origin, OriginWriter
from stages.tokenize.readers import BadRow
from stages.tokenize.rows import Chat, Question, Text, plain_text
from stages.tokenize.selection import Item, Source, Tally, drop, find_sources, select, split_of
from stages.tokenize.tokenizer import TextTokenizer, load_tokenizer, train_tokenizer
from stages.tokenize.write import PackedWriter, PairWriter, PromptWriter

BATCH_ROWS = 1024
BATCH_CHARACTERS = 1 << 20

Writers = dict[str, PackedWriter] | dict[str, PairWriter] | dict[str, PromptWriter]


def run(context: StageContext[Config]) -> None:
    """Make the dataset in `context.output`.

    Raises:
        Refused: an input, a row or a setting cannot be used, or nothing is left of the rows.
        Stopped: a stop was asked for; the stage starts from the beginning the next time.
    """
    if context.resources.threads is not None:
        os.environ["RAYON_NUM_THREADS"] = str(context.resources.threads)  # the pool of `tokenizers`
    config = context.config
    if problem := config.inputs_problem({name.partition(".")[0] for name in context.inputs}):
        raise Refused(problem)
    sources, tables = find_sources(context)
    tokenizer = _tokenizer(context, sources)
    tally = Tally()
    writers = _writers(context)
    origins = {split: OriginWriter() for split in writers}
    try:
        if tables:
            _write_pairs(context, tables, tokenizer, writers, tally, origins)
        if sources:
            _encode_rows(context, sources, tokenizer, writers, tally, origins)
        _check_splits(config, writers, tally)
        splits = {}
        for split, writer in writers.items():
            path = context.output / f"{split}.{'safetensors' if config.format in PACKED else 'parquet'}"
            table = context.side_output("origins") / f"{split}.parquet"
            if isinstance(writer, PackedWriter):
                splits[split] = writer.write(
                    path,
                    row_length=_row_length(config),
                    share_rows=config.pack,
                    pad_id=tokenizer.pad_id,
                    seed=config.seed,
                    origins=(origins[split], table),
                )
            else:
                splits[split] = writer.write(path)
                origins[split].write(table, None)
    finally:
        for writer in writers.values():
            if isinstance(writer, PackedWriter):
                writer.close()
    tokenizer.save(tokenizer_folder(context.output))
    _write_info(context, splits, tokenizer, tally)


def _row_length(config: Config) -> int:
    if config.row_length is None:
        raise ValueError("row_length is not set")  # the config refuses this
    return config.row_length


def _tokenizer(context: StageContext[Config], sources: list[Source]) -> TextTokenizer:
    config = context.config
    given = context.inputs.get("tokenizer")
    if config.train_tokenizer is not None:
        tokenizer = train_tokenizer(_training_texts(context, sources), config.train_tokenizer)
        wanted = config.train_tokenizer.vocab_size
        note = "" if tokenizer.vocab_size == wanted else f" (not {wanted:,}: the text has no more pairs to merge)"
        context.log(f"trained a byte-level BPE of {tokenizer.vocab_size:,} tokens{note}")
        return tokenizer
    assert given is not None, "run has refused this"
    folder = tokenizer_folder(given) if (given / INFO_FILE).is_file() else given
    return load_tokenizer(folder, config.chat_template)


def _training_texts(context: StageContext[Config], sources: list[Source]) -> Iterator[str]:
    tally = Tally()
    for item in select(context, sources, tally):
        if context.stop_requested:
            raise Stopped("stopped while training the tokenizer; it starts again from the beginning")
        if item.split == "train" and isinstance(item.example, Text):
            yield item.example.text
        if tally.read % BATCH_ROWS == 0:
            context.progress(tally.read, None, unit="rows for the tokenizer")


def _writers(context: StageContext[Config]) -> Writers:
    config = context.config
    names = SPLITS if config.validation_fraction > 0 else SPLITS[:1]
    if config.format in PACKED:
        return {split: PackedWriter(context.scratch, split) for split in names}
    if config.format == "preference":
        return {split: PairWriter() for split in names}
    return {split: PromptWriter() for split in names}


def _encode_rows(
    context: StageContext[Config],
    sources: list[Source],
    tokenizer: TextTokenizer,
    writers: Writers,
    tally: Tally,
    origins: dict[str, OriginWriter],
) -> None:
    encoder = Encoder(context.config, tokenizer)
    repeats: Counter[bytes] = Counter()
    done = unknown = 0
    for number, batch in enumerate(_batches(select(context, sources, tally))):
        if number == 0:
            _tell_of_control_tokens(context, batch, tokenizer)
            _tell_of_lost_reasoning(context, batch, encoder)
        if context.stop_requested:
            raise Stopped("stopped while encoding; it starts again from the beginning")
        for item, encoded in zip(batch, encoder.encode([item.example for item in batch]), strict=True):
            try:
                if isinstance(encoded, BadRow):
                    raise encoded
                checked = _fitted(context.config, encoded, item.where)
            except BadRow as error:
                tally.kept[item.source] -= 1
                drop(context, tally, item.source, item.where, error, before=done)
                continue
            done += 1
            unknown += _unknown_tokens(checked, tokenizer.unknown_id)
            origins[item.split].add(item.origin)
            writer = writers[item.split]
            if isinstance(writer, PackedWriter) and isinstance(checked, Document):
                writer.add(checked)
                continue
            row_id = _row_id(item.key, repeats)
            if isinstance(writer, PairWriter) and isinstance(checked, EncodedPair):
                writer.add(row_id, checked)
            elif isinstance(writer, PromptWriter) and isinstance(checked, EncodedPrompt):
                writer.add(row_id, checked, item.example.columns if isinstance(item.example, Question) else {})
        context.progress(tally.read, None, unit="rows", kept=tally.kept.total())
    if unknown:
        context.log(
            f"{unknown:,} tokens are {tokenizer.hf.unk_token}, for the vocabulary cannot write what stands there; a "
            "tokenizer with a token for every byte can",
            level="warning",
        )


def _tell_of_control_tokens(context: StageContext[Config], batch: list[Item], tokenizer: TextTokenizer) -> None:
    """Say so where most plain texts hold control tokens, for someone has written the chats' markers into them."""
    texts = [text for item in batch if (text := plain_text(item.example))]
    pattern = re.compile("|".join(map(re.escape, tokenizer.special))) if tokenizer.special else None
    found = [match.group() for text in texts if pattern is not None and (match := pattern.search(text))]
    if len(found) > len(texts) / 2:
        context.log(
            f"{len(found):,} of the first {len(texts):,} texts hold a control token such as {found[0]!r}, which stays "
            "ordinary text there, so that no model sees the token; give chats as messages, which the chat template "
            "marks",
            level="warning",
        )


def _tell_of_lost_reasoning(context: StageContext[Config], batch: list[Item], encoder: Encoder) -> None:
    """Say so where chats hold thoughts beside what is said, and the chat template has no place for them."""
    chats = [item.example.messages for item in batch if isinstance(item.example, Chat)]
    lost = [name for messages in chats if (name := encoder.renderer.reasoning_left_out(messages))]
    if lost:
        context.log(
            f"{len(lost):,} of the first {len(chats):,} chats hold {lost[0]}, which the chat template has no place for "
            "and leaves out; give a template that writes it, with chat_template",
            level="warning",
        )


def _unknown_tokens(encoded: Encoded, unknown_id: int | None) -> int:
    """How many tokens of a row stand for text that the vocabulary cannot write."""
    if unknown_id is None:
        return 0
    if isinstance(encoded, Document):
        return int((encoded.ids == unknown_id).sum())
    if isinstance(encoded, EncodedPrompt):
        return encoded.prompt_ids.count(unknown_id)
    return sum(ids.count(unknown_id) for ids in (encoded.prompt_ids, encoded.chosen_ids, encoded.rejected_ids))


def _batches(items: Iterator[Item]) -> Iterator[list[Item]]:
    batch: list[Item] = []
    characters = 0
    for item in items:
        batch.append(item)
        characters += len(item.example.text) if isinstance(item.example, Text) else 0
        if len(batch) >= BATCH_ROWS or characters >= BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _row_id(digest: bytes, repeats: Counter[bytes]) -> str:
    """The first 16 hex digits of the row's hash; rows that are equal and not freed of duplicates are numbered."""
    repeats[digest[:8]] += 1
    count = repeats[digest[:8]]
    return digest[:8].hex() + (f"-{count}" if count > 1 else "")


def _fitted(config: Config, encoded: Encoded, where: str) -> Encoded:
    """Apply `row_length` to a row, and check that there is something to train on.

    Raises:
        BadRow: the row is not to be kept.
        Refused: it is too long and `on_long_rows` is refuse.
    """
    if isinstance(encoded, Document):
        length = len(encoded.ids)
    elif isinstance(encoded, EncodedPair):
        length = len(encoded.prompt_ids) + max(len(encoded.chosen_ids), len(encoded.rejected_ids))
    else:
        length = len(encoded.prompt_ids)
    if config.row_length is not None and length > config.row_length:
        policy = config.long_rows()
        if policy == "refuse":
            choices = "drop or truncate" if isinstance(encoded, Document) else "drop"
            raise Refused(
                f"{where}: {length:,} tokens, more than row_length {config.row_length:,}; raise row_length, "
                f"or set on_long_rows to {choices}"
            )
        if policy == "drop":
            raise BadRow("too_long", f"{length:,} tokens, more than row_length {config.row_length:,}")
        if policy == "truncate" and isinstance(encoded, Document):
            end = config.row_length
            encoded = Document(encoded.ids[:end], encoded.mask[:end], encoded.bytes[:end])
            if not encoded.mask.any():
                raise BadRow(
                    "no_target", f"of its {length:,} tokens, none of the first {end:,} (row_length) is trained"
                )
    if isinstance(encoded, Document) and not encoded.mask.any():
        raise BadRow("no_target", "no token of it is trained")
    return encoded


def _write_pairs(
    context: StageContext[Config],
    tables: dict[str, Path],
    tokenizer: TextTokenizer,
    writers: Writers,
    tally: Tally,
    origins: dict[str, OriginWriter],
) -> None:
    """Make pairs out of rollouts. A prompt without a better and a worse completion is counted as "no_pair"."""
    config = context.config
    repeats: Counter[bytes] = Counter()
    for number, (label, path) in enumerate(tables.items(), 1):
        source = "rollouts" if len(tables) == 1 else f"rollouts {number}"
        prompts = rollouts.read_rollouts(path)
        rollouts.check_tokenizer(prompts, tokenizer)
        for done, prompt in enumerate(prompts, 1):
            if context.stop_requested:
                raise Stopped("stopped while making pairs; it starts again from the beginning")
            split = split_of(config, hashlib.sha256(repr(prompt.prompt_ids).encode()).digest())
            found = 0
            for digest, pair, lines in rollouts.encoded_pairs(prompt, config, tokenizer):
                if config.limit is not None and tally.kept.total() >= config.limit:
                    return
                found += 1
                if config.deduplicate and digest[:8] in repeats:
                    tally.drop(source, "duplicate")
                    continue
                try:
                    _fitted(config, pair, f"prompt {prompt.id} of the rollouts")
                except BadRow as error:
                    drop(context, tally, source, f"prompt {prompt.id} of the rollouts", error)
                    continue
                tally.kept[source] += 1
                origins[split].add(Origin(label, rollouts.FILE, *lines))
                writer = writers[split]
                if isinstance(writer, PairWriter):
                    writer.add(_row_id(digest, repeats), pair)
            if not found:
                tally.drop(source, "no_pair")
            if done % BATCH_ROWS == 0:
                context.progress(done, len(prompts), unit="prompts", pairs=tally.kept.total())


def _check_splits(config: Config, writers: Writers, tally: Tally) -> None:
    reasons = ", ".join(f"{reason} {count:,}" for reason, count in sorted(tally.dropped.items()))
    if not tally.kept.total():
        dropped = f" and dropped ({reasons})" if reasons else ""
        raise Refused(f"no row is left to train on: {tally.read:,} were read{dropped}")
    for split, writer in writers.items():
        if not len(writer):
            raise Refused(
                f"the {split} split is empty: validation_fraction {config.validation_fraction:g} of "
                f"{tally.kept.total():,} rows (those of generators with train_only set aside); "
                f"give more rows, or {'raise' if split == 'validation' else 'lower'} validation_fraction"
            )


def _write_info(
    context: StageContext[Config], splits: dict[str, dict[str, Any]], tokenizer: TextTokenizer, tally: Tally
) -> None:
    """Write `dataset.json`, and say in the log and the summary how much there is."""
    config = context.config
    labels = sorted({*tally.kept, *tally.dropped_at})
    info = {
        "holds": config.format,
        "row_length": config.row_length,
        "splits": splits,
        "vocab_size": tokenizer.vocab_size,
        "kept": tally.kept.total(),
        "dropped": dict(sorted(tally.dropped.items())),
        "sources": {label: {"kept": tally.kept[label], "dropped": tally.dropped_at[label]} for label in labels},
    }
    text = json.dumps(info, indent=2, ensure_ascii=False) + "\n"
    (context.output / INFO_FILE).write_text(text, encoding="utf-8")
    train = splits["train"]
    figures = {"tokens": train["tokens"], "rows": train["rows"]}
    figures |= {f"{split}_rows": values["rows"] for split, values in splits.items() if split != "train"}
    parts = [f"{train['tokens']:,} tokens in {train['rows']:,} rows"]
    if config.format in PACKED:
        figures["fill"] = train["fill"]
        parts = [f"{parts[0]} of {config.row_length}", f"{100 * train['fill']:.1f}% full"]
    if config.format == "chat":
        parts.append(f"{100 * train['target_tokens'] / train['tokens']:.0f}% of tokens trained")
    if tally.dropped:
        parts += ["dropped " + ", ".join(f"{count:,} {reason}" for reason, count in sorted(tally.dropped.items()))]
    context.summary(**figures, dropped=tally.dropped.total())
    context.log(" · ".join(parts))
