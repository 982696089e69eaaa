"""Settings of the tokenize stage: raw rows in, a `dataset` artifact out.

The stage reads rows from data files (JSON Lines, text, Parquet), from generator functions, or from a `rollouts`
artifact, turns them into token ids with a tokenizer that it trains or takes over, and writes them packed (text, chat)
or as one row an example (preference, prompt). Everything here is identity: the same settings, inputs and code give the
same bytes.

This module imports no torch and no transformers, for `flows` reads it.
"""

from __future__ import annotations

import json
import string
from collections.abc import Collection
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from stages.contract import ImportPath, Input, StageConfig

# One token a marker and nothing between them: a row of a small model is too short for "\n" and role names.
DEFAULT_CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message['role'] == 'assistant' -%}"
    "{{- '<|assistant|>' -}}{%- generation -%}{{- message['content'] + '<|end|>' -}}{%- endgeneration -%}"
    "{%- elif message['role'] in ['system', 'user'] -%}"
    "{{- '<|' + message['role'] + '|>' + message['content'] + '<|end|>' -}}"
    "{%- else -%}"
    "{{- raise_exception('this template knows the roles system, user and assistant, not ' + message['role']) -}}"
    "{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)


def template_fields(template: str) -> list[str]:
    """The column names of a template such as "{question} {hint}", in order.

    Raises:
        ValueError: the template is malformed, or holds more than plain column names.
    """
    names = []
    for _, name, spec, conversion in string.Formatter().parse(template):
        if name is None:
            continue
        if not name or name.isdigit() or spec or conversion or any(character in name for character in ".[]{}"):
            raise ValueError(f"{template!r}: between braces stands the plain name of a column, such as {{question}}")
        names.append(name)
    return names


class GeneratorConfig(BaseModel):
    """Rows made by a function of the project or of the user."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    function: ImportPath = Field(
        description="module:function that yields rows (dicts). It is called with `arguments` and with `seed`, and must"
        " make the same rows of them each time."
    )
    arguments: dict[str, Any] = Field(default={}, description="Keyword arguments; a `seed` here overrides the step's.")
    train_only: bool = Field(default=False, description="Keep all of its rows out of the validation split.")

    @field_validator("arguments")
    @classmethod
    def _json(cls, value: dict[str, Any]) -> dict[str, Any]:
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ValueError(f"arguments hold something that is not JSON: {error}") from None
        return value


class TokenizerTrainingConfig(BaseModel):
    """A byte-level BPE trained on the documents of the training split."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    vocab_size: int = Field(
        32768, ge=1, description="Tokens in all: 256 bytes, the special tokens, and merges learnt from the data."
    )
    min_frequency: int = Field(2, ge=1, description="A pair of tokens rarer than this is not merged.")
    split_digits: bool = Field(True, description="Give every digit a token of its own.")
    pad_token: str = Field("<|pad|>", min_length=1, description="Fills rows. Never predicted.")
    eos_token: str = Field("<|end|>", min_length=1, description="Ends a document and a turn of a chat.")
    special_tokens: list[str] = Field(
        default=["<|system|>", "<|user|>", "<|assistant|>"], description="Further special tokens, such as role markers."
    )
    chat_template: str = Field(
        DEFAULT_CHAT_TEMPLATE, description="Jinja template of a chat, as in transformers, best with generation marks."
    )

    @model_validator(mode="after")
    def _sizes(self) -> TokenizerTrainingConfig:
        tokens = [self.pad_token, self.eos_token, *self.special_tokens]
        if len(set(tokens)) != len(tokens) or not all(tokens):
            raise ValueError(f"special tokens must differ from one another and not be empty: {tokens}")
        if self.vocab_size < 256 + len(tokens):
            raise ValueError(
                f"vocab_size {self.vocab_size} is too small: 256 bytes and {len(tokens)} special tokens need "
                f"{256 + len(tokens)}"
            )
        return self


class Config(StageConfig):
    """Settings of the tokenize stage."""

    VERSION: ClassVar[int] = 2
    NEEDS_TORCH: ClassVar[bool] = False
    INPUTS: ClassVar[dict[str, Input]] = {
        "data": Input(
            ("source", "rollouts"),
            required=False,
            many=True,
            description="Data files, or rollouts to make preference pairs of.",
        ),
        "tokenizer": Input(("dataset", "checkpoint"), required=False, description="Where the tokenizer is taken from."),
    }
    OUTPUT: ClassVar[str] = "dataset"
    SIDE_OUTPUTS: ClassVar[dict[str, str]] = {"origins": "origins"}  # which row of which file became which row

    format: Literal["text", "chat", "preference", "prompt"] = Field(description="What a row is.")

    # Where rows come from
    generators: list[GeneratorConfig] = Field(default=[], description="Functions that make rows, beside data files.")
    reader: ImportPath | None = Field(
        None, description="module:function that takes the path of one data file and yields rows (dicts)."
    )
    text_unit: Literal["file", "line", "paragraph"] = Field(
        "file", description="What one document of a .txt or .md file is; a paragraph ends at a blank line."
    )

    # What a row is made of
    text_template: str = Field("{text}", description="The document of a text row, from columns.")
    messages_field: str = Field(
        "messages",
        min_length=1,
        description="The column with a list of messages. A turn of the user or the assistant must say something; one "
        'with `"weight": 0` is not trained.',
    )
    prompt_template: str = Field("{prompt}", description='The prompt, from columns, such as "{question}".')
    completion_template: str = Field("{completion}", description='The completion, from columns, such as "{answer}".')
    chosen_template: str = Field("{chosen}", description="The preferred completion, from columns.")
    rejected_template: str = Field("{rejected}", description="The other completion, from columns.")
    system_prompt: str | None = Field(None, description="A system message put before chats that have none.")
    apply_chat_template: bool = Field(
        True, description="Whether a prompt that is a string is one user turn of a chat; otherwise it is plain text."
    )
    chat_template: str | None = Field(None, description="Replaces the chat template of the tokenizer.")
    chat_template_kwargs: dict[str, Any] = Field(default={}, description="Further variables of the chat template.")

    # Which rows
    limit: int | None = Field(None, ge=1, description="Keep at most this many rows, the first ones.")
    deduplicate: bool = Field(True, description="Drop rows that are exactly equal to an earlier one, before splitting.")
    validation_fraction: float = Field(
        0.0, ge=0.0, lt=1.0, description="Share of the rows put into the validation split, by a hash of their content."
    )
    on_bad_rows: Literal["refuse", "drop"] = Field(
        "refuse", description="Whether a row that cannot be used ends the step, or is dropped and counted."
    )
    on_long_rows: Literal["refuse", "drop", "truncate", "split"] | None = Field(
        None,
        description="What is done with a row of more than row_length tokens. Empty: split for text, else refuse.",
    )

    # Preference pairs out of rollouts
    pairs_per_prompt: int = Field(1, ge=1, description="At most this many pairs out of the rollouts of one prompt.")
    min_reward_gap: float = Field(
        0.0, ge=0.0, description="The chosen completion's reward is more than this above the rejected one's."
    )

    # Tokens and rows
    train_tokenizer: TokenizerTrainingConfig | None = Field(None, description="Train a tokenizer on the text.")
    add_eos_token: bool = Field(True, description="End each document of text with the end-of-text token.")
    add_bos_token: bool | None = Field(
        None, description="Start each document with the begin-of-text token. Empty: as the tokenizer itself does."
    )
    row_length: int | None = Field(
        None, ge=4, description="Tokens in a packed row; for preference and prompt rows the most that one may have."
    )
    pack: bool = Field(True, description="Put several documents into one row (they do not see one another).")
    seed: int = Field(0, ge=0, lt=2**63, description="Seed of the generators and of the order of the rows.")

    @field_validator("text_template", "prompt_template", "completion_template", "chosen_template", "rejected_template")
    @classmethod
    def _template(cls, value: str) -> str:
        if not template_fields(value):
            raise ValueError(f"{value!r} names no column; write a column's name in braces, such as {{text}}")
        return value

    @model_validator(mode="after")
    def _consistent(self) -> Config:
        packed = self.format in ("text", "chat")
        if packed and self.row_length is None:
            raise ValueError(f"format {self.format} needs row_length, the number of tokens in a row")
        if not packed and not self.pack:
            raise ValueError(f"pack is for text and chat; {self.format} rows are never packed")
        allowed = {"text": ("refuse", "drop", "truncate", "split"), "chat": ("refuse", "drop", "truncate")}
        choices = allowed.get(self.format, ("refuse", "drop"))
        if self.on_long_rows is not None and self.on_long_rows not in choices:
            raise ValueError(
                f"on_long_rows: {self.on_long_rows} does not suit {self.format}; it takes {', '.join(choices)}"
            )
        if self.add_bos_token and self.format != "text" and self.apply_chat_template:
            raise ValueError(
                "add_bos_token is for plain text; a chat begins as its template says, so leave it out, or write the "
                "token in chat_template"
            )
        if self.train_tokenizer is not None and self.format != "text":
            raise ValueError("train_tokenizer needs format text; give other formats that dataset as their tokenizer")
        if self.train_tokenizer is not None and self.chat_template is not None:
            raise ValueError("chat_template is for a tokenizer that is taken over; set train_tokenizer.chat_template")
        return self

    def inputs_problem(self, given: Collection[str]) -> str:
        """There are rows to read, and one tokenizer."""
        if "data" not in given and not self.generators:
            return "there is nothing to read: give the input `data`, or generators"
        if self.train_tokenizer is not None and "tokenizer" in given:
            return "the input `tokenizer` and the setting train_tokenizer exclude one another; leave one out"
        if self.train_tokenizer is None and "tokenizer" not in given:
            return "there is no tokenizer: give the input `tokenizer` (a dataset or a checkpoint), or train_tokenizer"
        return ""

    def holds(self) -> str:
        """What the rows are: "text", "chat", "preference" or "prompt"."""
        return self.format

    def makes_splits(self) -> tuple[str, ...]:
        """The splits that the dataset will have."""
        return ("train", "validation") if self.validation_fraction > 0 else ("train",)

    def long_rows(self) -> str:
        """What is done with rows that are too long, the default filled in."""
        return self.on_long_rows or ("split" if self.format == "text" else "refuse")
