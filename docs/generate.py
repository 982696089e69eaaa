"""Write docs/recipes.md: how a recipe is written, and every stage with every field, from the models themselves.

python -m docs.generate            writes the file
python -m docs.generate --check    exits 1 where the file is not what would be written
"""

from __future__ import annotations

import json
import re
import sys
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from flows.recipe import Header
from flows.recipe_model import describe_input, stage_names
from stages.contract import NotIdentity, Resources, StageConfig, UserCode, config_class
from stages.training.config import TrainingConfig

TARGET = Path(__file__).parent / "recipes.md"

INTRODUCTION = """\
# Recipes

<!-- Written by `python -m docs.generate` from the models of the stages. Edit docs/generate.py, not this file. -->

A recipe is a YAML file that names steps. A step runs a stage on inputs with settings; what it needs decides the order,
and steps that do not need one another run at the same time.

```yaml
name: tiny
parameters: {seed: 0, rate: 1.0e-3}
steps:
  corpus:
    stage: tokenize
    inputs: {data: "text/*.txt"}
    format: text
    row_length: 128
    validation_fraction: 0.05
    train_tokenizer: {vocab_size: 512}
  base:
    stage: pretrain
    inputs: {data: corpus}
    learning_rate: "${rate}"
    max_steps: 200
    seed: "${seed}"
  report:
    stage: evaluate
    inputs: {models: [base], text: corpus}
```

`headrace plan tiny.yaml` says what would run and why; `headrace run tiny.yaml` runs it. `headrace run quickstart` takes
a recipe that comes with Headrace (`flows/recipes/`).

- **YAML** is read by the rules of version 1.2: `no` and `on` are words, `1e-3` is a number, a key written twice is
  refused. Anchors and merge keys (`<<`) work.
- **`${name}`** stands for a parameter. Where it is the whole value, the parameter keeps its type; `$${` is a plain
  `${`.
- **`--set`** changes a recipe for one run: `--set base.max_steps=300`, `--set rate=2e-3`,
  `--set base.inputs.data=other`, and item by item in a list: `--set chat.generators.0.arguments.count=90`. The value is
  YAML.
- **Relative paths** start from the recipe's folder, those of built-in recipes from the current one. Modules of your
  own are found there too (or in `python_path`).
- **Mistakes** are told before anything starts, each with its line: unknown fields and steps with the nearest name,
  inputs of the wrong kind with those that fit, steps that wait for one another.

## Settings of a recipe
"""

STEPS = """\
## Settings of every step

Beside the fields of its stage, a step has `stage` (the name of a stage, or the dotted name of a package of your own),
`inputs`, and `resources`, which is never identity:
"""

INPUTS = """\
## Inputs

Under `inputs`, a step names where each of its inputs comes from:

| Written | Means |
|---|---|
"""

REFERENCES = (
    ("`sft`", "the output of the step `sft`"),
    ("`grpo/rollouts`", "a side output of a step"),
    (
        '`data/train.jsonl`, `./words`, `"data/**/*.txt"`',
        "a file, a folder (without hidden files), a glob; a list of them is one artifact",
    ),
    (
        '`"s3://bucket/logs/*.jsonl"`',
        "the same in a bucket ([credentials](s3.md#address-and-credentials)): an object, a folder, a glob. What was "
        "read once is not read again until it changes",
    ),
    ('`"stdlib:pydoc_data/*.py"`', "files of the standard library of the Python that runs"),
    (
        "`./model` with a `config.json` in it",
        "a Hugging Face model: safetensors, configuration and tokenizer; weights as pickles are refused",
    ),
    (
        '`"hf:ORG/NAME@<40 digits of a commit>"`',
        "a model of the Hugging Face hub, or of its local cache where there is no network",
    ),
    ("`ref:production`", "what a reference of the store names now"),
    ("`artifact:sha256:9f31c0`", "an artifact of the store, by the first digits of its digest"),
)

AFTER_INPUTS = """\

Files are imported into the store as they are (kind `source`). The key of a step holds their content and their paths
relative to what the patterns have in common, never where they lie.

An input that takes many artifacts takes a list (labelled by the names of steps; all plain files of the list are one
artifact) or a mapping of labels: `models: {before: base, after: "hf:..."}`.

## Data files

A tokenize step reads these, each but Parquet also compressed (`.gz`, `.zst`); text is UTF-8:

| Name | Rows |
|---|---|
| `.jsonl`, `.ndjson`, `.json` | one object a line, or one list of objects |
| `.csv`, `.tsv` | records below a line of column names; all values are text |
| `.parquet` | its rows |
| `.txt`, `.md` | documents: whole files, or lines or paragraphs (`text_unit`) |

Anything else is read by a function of your own (`reader`). The columns of a row are TRL's: `text`; `messages`, or
`prompt` and `completion`; `prompt`, `chosen` and `rejected`; a `prompt` with columns for rewards. Templates take them
from other columns (`prompt_template: "{question}"`). ShareGPT's `from` and `value` are read as role and content
(`messages_field: conversations`), a content in parts of text as their text, and `tools` may be JSON in a string, as may
the arguments of a call: they reach the chat template in the form that it writes as JSON. A turn with `"weight": 0`,
`"train": false` or `"training": false` is not trained. A row that does not fit ends the step, with
its file and line, or is dropped and counted (`on_bad_rows: drop`).

## Identity

A step is not run again while its *key* has a result in the store. The key is a hash of the stage's name, the fields
marked **identity** below, the digests of the inputs, and the code: by default all modules of this project and of your
own that the stage reaches by import, without comments and formatting. With `code: version` it holds the stage's
`VERSION` instead (and your own functions still by their code), so that an upgrade of Headrace retrains nothing as long
as the stage's results stay the same.

`--force STEP` runs a step though its result is there, `--accept-code STEP` keeps the newest result that differs in its
code only, `--until STEP` leaves out what that step does not need.

Fields that are not identity (devices, intervals of saving and logging, limits of time) and `resources` change how a
step runs, never what it gives.

What a function of yours reads by itself, such as a list of words beside it or a variable of the environment, is no part
of the key: give it as an input or an argument, write it into the module, or run the step with `--force` after a change.

## Stages
"""


def main(arguments: list[str]) -> int:
    """Write or check the file; returns the exit code."""
    text = recipes_page()
    if "--check" in arguments:
        if TARGET.exists() and TARGET.read_text("utf-8") == text:
            return 0
        print(f"{TARGET} is not up to date: run `python -m docs.generate`", file=sys.stderr)
        return 1
    TARGET.write_text(text, "utf-8")
    return 0


def recipes_page() -> str:
    """The whole page."""
    references = "\n".join(f"| {written} | {means} |" for written, means in REFERENCES)
    parts = [INTRODUCTION, _table(Header, identity=False), "", STEPS, _table(Resources, identity=False), ""]
    parts.extend([INPUTS + references, AFTER_INPUTS])
    names = stage_names()
    parts.extend(f"- [{name}](#{name}): {_summary(config_class(name))}" for name in names)
    parts.append("\n### Settings of all stages that train\n")
    parts.append(_table(TrainingConfig))
    for name in names:
        parts.extend(["", *_stage(name, config_class(name))])
    return "\n".join(parts).rstrip() + "\n"


def _summary(config: type[BaseModel]) -> str:
    """The first paragraph of the class's docstring; of its module's where that says no more than "Settings of ..."."""
    text = " ".join((config.__doc__ or "").split("\n\n")[0].split())
    if match := re.fullmatch(r"Settings of the \w+ stage\.( .*)?", text):
        module = " ".join((sys.modules[config.__module__].__doc__ or "").split("\n\n")[0].split())
        _, colon, rest = module.partition(": ")
        if colon:
            text = rest[0].upper() + rest[1:] + (match[1] or "")
    return text


def _stage(name: str, config: type[StageConfig]) -> Iterator[str]:
    yield f"### {name}\n"
    yield _summary(config) + "\n"
    holds = " of the rows that `format` says" if config.OUTPUT == "dataset" else ""
    sides = "".join(f", and `STEP/{side}`: {kind}" for side, kind in config.SIDE_OUTPUTS.items())
    yield f"Gives: {config.OUTPUT}{holds}{sides}. Version {config.VERSION}.\n"
    if config.INPUTS:
        yield "| Input | Takes | |"
        yield "|---|---|---|"
        for key, takes in config.INPUTS.items():
            needed = "Required." if takes.required else "Optional."
            many = ", many" if takes.many else ""
            yield f"| `{key}` | {describe_input(takes)}{many} | {needed} {_cell(takes.description)} |"
        yield ""
    if issubclass(config, TrainingConfig):
        yield "Beside the [settings of all stages that train](#settings-of-all-stages-that-train):\n"
        yield _table(config, leave_out=TrainingConfig)
    else:
        yield _table(config)


def _table(model: type[BaseModel], *, identity: bool = True, leave_out: type[BaseModel] | None = None) -> str:
    """The fields of a model, those of nested models below them, as a Markdown table."""
    lines = ["| Field | Type | Default | Identity | |", "|---|---|---|---|---|"]
    if not identity:
        lines = ["| Field | Type | Default | |", "|---|---|---|---|"]
    for name, info, inherited in _fields(model, "", False):
        if leave_out is not None and _same(leave_out, name, info):
            continue
        cells = [f"`{name}`", _type(info.annotation, info), _default(info)]
        if identity:
            cells.append("no" if inherited else "yes")
        lines.append(f"| {' | '.join([*cells, _cell(_description(info))])} |")
    return "\n".join(lines)


def _fields(model: type[BaseModel], prefix: str, excluded: bool) -> Iterator[tuple[str, FieldInfo, bool]]:
    """Each field with its dotted name, and whether it or a field around it is not identity."""
    for name, info in model.model_fields.items():
        out = excluded or any(isinstance(item, NotIdentity) for item in info.metadata)
        yield prefix + name, info, out
        mark = "[]" if typing.get_origin(info.annotation) is list else ""
        for nested in _models(info.annotation):
            yield from _fields(nested, f"{prefix}{name}{mark}.", out)


def _same(base: type[BaseModel], name: str, info: FieldInfo) -> bool:
    other = base.model_fields.get(name)
    return (
        other is not None
        and repr(other.default) == repr(info.default)
        and other.description == info.description
        and repr(other.annotation) == repr(info.annotation)
        and repr(other.metadata) == repr(info.metadata)
    )


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in typing.get_args(annotation):
        yield from _models(argument)


def _type(annotation: Any, info: FieldInfo | None = None) -> str:
    if info is not None and any(isinstance(item, UserCode) for item in info.metadata):
        return "module:function"
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Literal:
        return " or ".join(f"`{_text(item)}`" for item in arguments)
    if origin is typing.Annotated:
        return "module:function" if any(isinstance(item, UserCode) for item in arguments) else _type(arguments[0])
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_type(item) for item in arguments if item is not type(None))
    if origin is list or origin is tuple:
        return f"list of {_type(arguments[0])}"
    if origin is dict or annotation is dict:
        return "mapping"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "mapping"
    return {str: "text", int: "integer", float: "number", bool: "true or false"}.get(annotation, "any")


def _default(info: FieldInfo) -> str:
    if info.is_required():
        return "required"
    value = info.get_default(call_default_factory=True)
    if value is PydanticUndefined or value is None:
        return "empty"
    if isinstance(value, BaseModel):
        return "see below"
    text = _text(value)
    return f"`{text if len(text) <= 40 else text[:39] + '…'}`".replace("|", "\\|")


def _text(value: Any) -> str:
    return value if isinstance(value, str) and value else json.dumps(value, ensure_ascii=False, default=str)


def _description(info: FieldInfo) -> str:
    """The description, and the bounds of a number."""
    bounds = []
    for item in info.metadata:
        for sign, name in ((">=", "ge"), (">", "gt"), ("<=", "le"), ("<", "lt")):
            if getattr(item, name, None) is not None:
                bounds.append(f"{sign} {_bound(getattr(item, name))}")
    return (info.description or "") + (f" ({', '.join(bounds)})" if bounds else "")


def _bound(value: float) -> str:
    for power in (31, 32, 63):
        if value == 2**power:
            return f"2^{power}"
    return str(value)


def _cell(text: str) -> str:
    return re.sub(r"\s+", " ", text).replace("|", "\\|").strip()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
