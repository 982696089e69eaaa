"""Models, checkpoints, datasets and stage attempts small enough for a test, made by the real code wherever there is
some."""

import json
import random
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
)

from stages.artifacts import WorkArea, open_store
from stages.contract import Resources, StageContext
from stages.modeling.checkpoint import save_checkpoint
from stages.tokenize.config import Config as TokenizeConfig
from stages.tokenize.stage import run as tokenize

TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL = ["<|pad|>", "<|end|>", "<|user|>", "<|assistant|>"]
END = 1


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(False)


def make_tokenizer(extra=()):
    """Byte-level, without merges: four markers and 256 bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = [*SPECIAL, *extra]
    backend = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(special + alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(special)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<|pad|>", eos_token="<|end|>")
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def make_model(family="qwen3", *, vocab=260, seed=0, positions=96, scale=0.3):
    """Two layers of width 32. Weights are larger than usual, so that distributions are far from uniform."""
    torch.manual_seed(seed)
    shared = {
        "vocab_size": vocab,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 48,
        "max_position_embeddings": positions,
        "initializer_range": scale,
        "tie_word_embeddings": True,
    }
    configs = {
        "qwen3": lambda: Qwen3Config(head_dim=8, **shared),
        "llama": lambda: LlamaConfig(**shared),
        "mistral": lambda: MistralConfig(sliding_window=5, **shared),
        "gpt2": lambda: GPT2Config(
            vocab_size=vocab, n_embd=32, n_layer=2, n_head=4, n_positions=positions, initializer_range=scale
        ),
    }
    return AutoModelForCausalLM.from_config(configs[family]()).eval()


def make_checkpoint(folder: Path, *, seed=0, tokenizer=None, positions=96, scale=0.3) -> Path:
    """A checkpoint folder as a training stage leaves it."""
    folder.mkdir(parents=True)
    tokenizer = tokenizer or make_tokenizer()
    model = make_model(vocab=len(tokenizer), seed=seed, positions=positions, scale=scale)
    save_checkpoint(model, tokenizer, folder)
    return folder


def preference_rows(count, seed=0):
    """Rows whose chosen completion is the sum and whose rejected one is beside it."""
    generator = random.Random(seed)
    rows = []
    for number in range(count):
        a, b = generator.randrange(50), generator.randrange(50)
        rows.append({"prompt": f"{number}: {a}+{b}=", "chosen": f"{a + b}", "rejected": f"about {a + b + 3}"})
    return rows


def prompt_rows(count, seed=0):
    """Questions with their answers."""
    generator = random.Random(seed)
    rows = []
    for number in range(count):
        a, b = generator.randrange(10), generator.randrange(10)
        rows.append({"prompt": f"{number}: {a}+{b}" + "=" * (number % 3 + 1), "answer": str(a + b)})
    return rows


def text_rows(count, seed=0):
    """Lines of letters."""
    generator = random.Random(seed)
    return [{"text": f"{number} " + "".join(generator.choices("abcé ", k=12))} for number in range(count)]


class Attempt(SimpleNamespace):
    """One attempt at a stage: its context, the events it emitted, and its output folder."""

    def logs(self):
        return [event["text"] for event in self.events if event["type"] == "log"]


@pytest.fixture
def attempt(tmp_path):
    """Make attempts at a stage; those with the same key share saved progress, as retries do."""
    count = 0

    def make(config, inputs, *, key="ab" * 32, stop_when=lambda events: False) -> Attempt:
        nonlocal count
        count += 1
        base = tmp_path / f"attempt-{count}"
        events: list[dict] = []
        sides = {name: base / f"side-{name}" for name in type(config).SIDE_OUTPUTS}
        for folder in (base / "output", base / "scratch", base / "restored", *sides.values()):
            folder.mkdir(parents=True)
        context = StageContext(
            config=config,
            inputs=inputs,
            output=base / "output",
            work=WorkArea(open_store(tmp_path / "store"), key, base / "restored"),
            scratch=base / "scratch",
            resources=Resources(threads=1),
            emit=events.append,
            stop=lambda: stop_when(events),
            side_outputs=sides,
        )
        return Attempt(context=context, events=events, output=base / "output", sides=sides)

    return make


@pytest.fixture
def dataset(tmp_path, attempt):
    """Make a dataset of rows with the real tokenize stage and a checkpoint's tokenizer."""
    count = 0

    def make(rows, checkpoint: Path, **settings) -> Path:
        nonlocal count
        count += 1
        source = tmp_path / f"source-{count}"
        source.mkdir()
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (source / "rows.jsonl").write_text(text, encoding="utf-8")
        one = attempt(TokenizeConfig(**settings), {"data.rows": source, "tokenizer": checkpoint}, key=f"{count:064x}")
        tokenize(one.context)
        return one.output

    return make


@pytest.fixture
def checkpoint(tmp_path):
    """A tiny checkpoint."""
    return make_checkpoint(tmp_path / "checkpoint")


def folder_bytes(folder: Path) -> dict[str, bytes]:
    """Every file of a folder by its path."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()
    }
