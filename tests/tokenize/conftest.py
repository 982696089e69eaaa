"""A stage run in a temporary folder, and small tokenizers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from stages.contract import Resources, StageContext
from stages.tokenize.config import Config, TokenizerTrainingConfig
from stages.tokenize.stage import run
from stages.tokenize.tokenizer import TextTokenizer, train_tokenizer

TEXTS = [
    "What is 12 + 30? The answer is 42, and nothing else.",
    "Tom has three apples and gives one of them to Ann. How many apples are left?",
    "Naïve café, straße, 数学 and 🙂 are text as well.",
]


@dataclass
class Outcome:
    """What a run of the stage left behind."""

    folder: Path
    metrics: dict[str, float]
    events: list[dict[str, Any]] = field(default_factory=list)
    origins: Path = Path()

    def logs(self, level: str) -> list[str]:
        return [event["text"] for event in self.events if event["type"] == "log" and event["level"] == level]


class NoWork:
    """The work area of a stage that saves nothing."""

    def save(self, step: int, folder: Path, then: Callable[[], None] | None = None) -> None:
        raise AssertionError("the tokenize stage saves no progress")

    def latest(self) -> None:
        return None

    def wait(self) -> None:
        return None


@pytest.fixture
def tokenize(tmp_path: Path) -> Callable[..., Outcome]:
    """Run the stage: `tokenize({"format": ...}, data=folder, tokenizer=folder)`."""
    count = 0

    def call(config: dict[str, Any], *, stop: bool = False, **inputs: Path) -> Outcome:
        nonlocal count
        count += 1
        output, scratch = tmp_path / f"output{count}", tmp_path / f"scratch{count}"
        origins = tmp_path / f"origins{count}"
        for new in (output, scratch, origins):
            new.mkdir()
        events: list[dict[str, Any]] = []
        context: StageContext[Config] = StageContext(
            config=Config.model_validate(config),
            inputs=inputs,
            output=output,
            work=NoWork(),
            scratch=scratch,
            resources=Resources(),
            emit=events.append,
            stop=lambda: stop,
            side_outputs={"origins": origins},
        )
        run(context)
        assert list(scratch.iterdir()) == []
        return Outcome(output, context.final_metrics, events, origins)

    return call


@pytest.fixture
def folder(tmp_path: Path) -> Callable[..., Path]:
    """Make an input folder: `folder({"a.jsonl": b"..."})`."""
    count = 0

    def call(files: dict[str, bytes | str]) -> Path:
        nonlocal count
        count += 1
        root = tmp_path / f"input{count}"
        for name, data in files.items():
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data if isinstance(data, bytes) else data.encode())
        return root

    return call


@pytest.fixture(scope="session")
def small_tokenizer() -> TextTokenizer:
    """A byte-level BPE of 400 tokens with the default chat template."""
    return train_tokenizer(iter(TEXTS * 3), TokenizerTrainingConfig(vocab_size=400))


@pytest.fixture(scope="session")
def tokenizer_path(small_tokenizer: TextTokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `small_tokenizer`, as a checkpoint has one."""
    path = tmp_path_factory.mktemp("tokenizer")
    small_tokenizer.save(path)
    return path
