from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from stages.contract import Refused
from stages.tokenize.config import TokenizerTrainingConfig
from stages.tokenize.tokenizer import TextTokenizer, load_tokenizer, train_tokenizer

ODD_TEXTS = [
    "plain",
    "  spaces   and\ttabs\r\nand lines\n",
    "naïve café 数学 🙂👩‍👩‍👧 \u0301\u200d",
    "1234567890",
    "<|end|> and <|user|> as text",
    "\u2028\ufeff\x01",
    "",
]

TRAIN = """
import hashlib, sys
from stages.tokenize.config import TokenizerTrainingConfig
from stages.tokenize.tokenizer import train_tokenizer
# Many pairs of the same frequency, so that ties decide.
texts = [f"{a}{b} {b}{a} {c}{a}{b}" for a in "abcdefgh" for b in "stuvwxyz" for c in "klmn"] * 2
tokenizer = train_tokenizer(iter(texts), TokenizerTrainingConfig(vocab_size=400))
print(hashlib.sha256(tokenizer.backend.to_str().encode()).hexdigest())
"""


def test_training_gives_the_same_tokenizer_in_every_process() -> None:
    digests = set()
    for seed, threads in (("0", "1"), ("1", "1"), ("2", "3")):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "RAYON_NUM_THREADS": threads, "OMP_NUM_THREADS": "1"}
        result = subprocess.run(
            [sys.executable, "-c", TRAIN], capture_output=True, text=True, env=environment, check=True
        )
        digests.add(result.stdout)
    assert len(digests) == 1


def test_tokens_of_a_byte_level_tokenizer_add_up_to_the_bytes_of_the_text(small_tokenizer: TextTokenizer) -> None:
    for text, encoding in zip(ODD_TEXTS, small_tokenizer.encode(ODD_TEXTS, special_tokens=False), strict=True):
        assert encoding.bytes.sum() == len(text.encode())
        assert len(encoding.ids) == len(encoding.bytes) == len(encoding.starts) == len(encoding.ends)
        assert small_tokenizer.backend.decode(encoding.ids.tolist()) == text


def test_tokens_of_other_tokenizers_add_up_too() -> None:
    backend = Tokenizer(models.Unigram())
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=60, special_tokens=["<unk>", "</s>"], unk_token="<unk>", show_progress=False
    )
    backend.train_from_iterator(["naïve café 数学 and plain words"] * 20, trainer)
    hf = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", unk_token="<unk>")
    tokenizer = TextTokenizer(hf)
    assert tokenizer.byte_level is None
    for text in ("naïve café 数学", "words and words"):
        (encoding,) = tokenizer.encode([text], special_tokens=False)
        assert encoding.bytes.sum() == len(text.encode())
    (encoding,) = tokenizer.encode(["words</s>"], special_tokens=True)
    assert encoding.bytes.sum() == len("words")
    assert encoding.bytes[-1] == 0


def test_control_tokens_in_a_document_are_text_and_in_a_chat_are_themselves(small_tokenizer: TextTokenizer) -> None:
    (as_text,) = small_tokenizer.encode(["a<|end|>"], special_tokens=False)
    (as_chat,) = small_tokenizer.encode(["a<|end|>"], special_tokens=True)
    assert small_tokenizer.eos_id not in as_text.ids
    assert as_chat.ids[-1] == small_tokenizer.eos_id
    assert as_chat.bytes.tolist() == [1, 0]


def test_digits_have_tokens_of_their_own(small_tokenizer: TextTokenizer) -> None:
    (encoding,) = small_tokenizer.encode(["12+3045"], special_tokens=False)
    assert small_tokenizer.hf.convert_ids_to_tokens(encoding.ids.tolist()) == list("12+3045")


def test_a_saved_tokenizer_loads_as_the_same_and_saves_as_the_same_bytes(
    small_tokenizer: TextTokenizer, tmp_path: Path
) -> None:
    small_tokenizer.save(tmp_path / "first")
    again = load_tokenizer(tmp_path / "first")
    again.save(tmp_path / "second")
    names = sorted(path.name for path in (tmp_path / "first").iterdir())
    assert names == ["chat_template.jinja", "tokenizer.json", "tokenizer_config.json"]
    for name in names:
        assert (tmp_path / "first" / name).read_bytes() == (tmp_path / "second" / name).read_bytes()
    settings = json.loads((tmp_path / "first" / "tokenizer_config.json").read_text())
    assert (settings["eos_token"], settings["pad_token"]) == ("<|end|>", "<|pad|>")
    assert again.hf.chat_template == small_tokenizer.hf.chat_template


def test_a_folder_without_a_usable_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Refused, match=r"no tokenizer\.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{broken")
    with pytest.raises(Refused, match="cannot be loaded"):
        load_tokenizer(tmp_path)


def test_a_tokenizer_is_not_trained_on_nothing() -> None:
    with pytest.raises(Refused, match="no text"):
        train_tokenizer(iter([]), TokenizerTrainingConfig(vocab_size=300))


def test_a_wanted_token_that_the_tokenizer_lacks_is_refused(small_tokenizer: TextTokenizer) -> None:
    assert small_tokenizer.bos_id(None) is None
    with pytest.raises(Refused, match="no bos_token"):
        small_tokenizer.bos_id(True)
    bare = TextTokenizer(PreTrainedTokenizerFast(tokenizer_object=small_tokenizer.backend))
    assert bare.pad_id == 0
    with pytest.raises(Refused, match="no eos_token"):
        _ = bare.eos_id


def test_tokenizing_never_imports_torch(tmp_path: Path) -> None:
    code = (
        "import sys; from stages.tokenize import stage; from pathlib import Path\n"
        "from stages.tokenize.tokenizer import train_tokenizer, load_tokenizer\n"
        "from stages.tokenize.config import TokenizerTrainingConfig\n"
        "from stages.tokenize.chat import ChatRenderer\n"
        "t = train_tokenizer(iter(['a b c']), TokenizerTrainingConfig(vocab_size=300)); t.save(Path(sys.argv[1]))\n"
        "t = load_tokenizer(Path(sys.argv[1])); ChatRenderer(t, {}).prompt([{'role': 'user', 'content': 'a'}])\n"
        "assert 'torch' not in sys.modules"
    )
    result = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
