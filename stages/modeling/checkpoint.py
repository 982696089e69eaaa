"""Hugging Face folders: reading them safely, and writing them so that every published one is known to open.

A saved checkpoint is a plain folder that transformers, vLLM and lm-eval open as it is. Its bytes depend on the weights,
the tokenizer and the version of transformers only: no path, host or time is in it. Before `save_checkpoint` returns,
the folder is loaded back and its logits compared with the live model (the export gate). Weights are read from
safetensors alone, and no code of a model folder is ever run.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.utils import logging as transformers_logging

from stages.contract import Refused

SUMS = "SHA256SUMS"
# Parts of a parameter's name that torch.compile, DDP, FSDP and peft put there.
_WRAPPERS = {
    "_orig_mod",
    "module",
    "_fsdp_wrapped_module",
    "_checkpoint_wrapped_module",
    "base_layer",
    "lora_A",
    "lora_B",
}
_PLAIN = ("F64", "F32", "F16", "BF16")  # types of weights, as safetensors calls them
# How and where from the files were loaded; it says nothing about the model.
_LOADING_NOTES = (
    "_from_model_config",
    "_name_or_path",
    "is_local",
    "local_files_only",
    "name_or_path",
    "special_tokens_map_file",
    "tokenizer_file",
    "vocab_file",
)


def load_model(
    folder: Path | str,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    leave_out: Callable[[list[str]], None] | None = None,
) -> PreTrainedModel:
    """Load a causal LM from a Hugging Face folder of safetensors.

    Args:
        folder: the checkpoint.
        dtype: weights are converted to it.
        device: where the weights end up.
        leave_out: told the names of weights that the architecture has no place for; they are refused where it is None.

    Raises:
        Refused: the folder has no config.json or no safetensors, is quantised or an adapter, needs code of its own, or
            its weights are not those of the model that config.json describes.
    """
    folder = Path(folder)
    config = _read_json(folder, "config.json")
    if "auto_map" in config:
        raise Refused(f"model {folder.name}: its config.json asks for code of its own (auto_map), which is never run")
    if not list(folder.glob("*.safetensors")):
        raise Refused(f"model {folder.name} has no *.safetensors; convert its weights first")
    if (folder / "adapter_config.json").exists():
        raise Refused(
            f"model {folder.name} holds an adapter beside its weights (adapter_config.json); merge it into them first,"
            " or take its files out of the folder"
        )
    _check_plain_weights(folder, config)
    transformers_logging.disable_progress_bar()
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=dtype,
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are refused below, by name
        )
    except MemoryError:
        raise
    except Exception as error:  # checks of a config, code of an architecture and missing packages raise what they like
        raise Refused(f"model {folder.name} cannot be loaded: {_short(error)}") from error
    if mismatched := sorted(report["mismatched_keys"]):
        name, found, wanted = mismatched[0]
        raise Refused(
            f"model {folder.name}: config.json does not fit the weights: {name} is {list(found)} in the file and "
            f"{list(wanted)} by the config"
        )
    if missing := sorted(report["missing_keys"]):
        raise Refused(f"model {folder.name}: {len(missing)} weights are missing, the first is {missing[0]}")
    if unexpected := sorted(report["unexpected_keys"]):
        if leave_out is None:
            raise Refused(
                f"model {folder.name}: config.json describes a model without {unexpected[0]}, which is in the file"
                f" ({len(unexpected)} such weights); correct config.json, or have a convert step leave them out"
            )
        leave_out(unexpected)
    align(model)
    text_config: Any = model.config.get_text_config(decoder=True)
    tied_by_config = getattr(text_config, "tie_word_embeddings", False)
    if tied_by_config and model.get_output_embeddings() is not None and not _is_tied(model):
        text_config.tie_word_embeddings = False  # the file has a head of its own; readers of the config must find it
    _check_causal(model, folder.name)
    model.to(device)
    return model


def _check_plain_weights(folder: Path, config: dict[str, Any]) -> None:
    """Refuse weights that are codes of a quantiser, which no training can change."""
    advice = "training needs plain weights: take the model that it was made from"
    if (quantised := config.get("quantization_config")) is not None:
        kind = quantised.get("quant_method", "unknown") if isinstance(quantised, dict) else "unknown"
        raise Refused(f"model {folder.name} is quantised (quant_method {kind} in its config.json); {advice}")
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, "pt") as file:
                for name in file.keys():  # noqa: SIM118 (it is no mapping)
                    part = file.get_slice(name)
                    kind = part.get_dtype()
                    if name.endswith("weight") and len(part.get_shape()) > 1 and kind not in _PLAIN:
                        raise Refused(f"model {folder.name} is quantised ({name} is of type {kind}); {advice}")
        except (OSError, SafetensorError) as error:
            raise Refused(f"model {folder.name} cannot be loaded: {path.name}: {_short(error)}") from error


def _short(error: Exception) -> str:
    """The message of an error of a library on one line."""
    text = " ".join(str(error).split())
    if isinstance(error, KeyError) or not text:  # whose message is the key alone
        text = f"{type(error).__name__}: {text}"
    return f"{text[:300]}{'...' if len(text) > 300 else ''}"


def _check_causal(model: Any, name: str) -> None:
    """Refuse weights that are not finite, and a model that sees the tokens it is to predict (an encoder).

    Two forward passes of 4 tokens that differ in the last one.
    """
    ids = torch.arange(4)[None] % model.get_input_embeddings().weight.shape[0]
    other = ids.clone()
    other[0, -1] = 0
    try:
        with torch.no_grad():
            one, two = (model(input_ids=row, use_cache=False).logits[0].float() for row in (ids, other))
    except Exception as error:  # sizes of a config that do not go together are found out by the architecture's own code
        raise Refused(f"model {name} cannot be run: {_short(error)}; correct its config.json") from error
    if not torch.isfinite(one).all():
        raise Refused(
            f"model {name} gives values that are not finite; its weights are damaged, or too large for the dtype"
        )
    if not torch.allclose(one[:-1], two[:-1], rtol=1e-2, atol=1e-2):
        raise Refused(
            f"model {name} ({model.config.model_type}) is no causal language model: what it predicts depends on later "
            "tokens; take a decoder, or set is_decoder in its config.json"
        )


def align(model: torch.nn.Module) -> None:
    """Copy weights that lie in memory mapped from a file onto PyTorch's own 64-byte boundaries.

    Vectorised sums can differ in the last bit between alignments, and a resumed run must repeat them exactly.
    """
    for tensor in [*model.parameters(), *model.buffers()]:
        if tensor.data_ptr() % 64:
            tensor.data = tensor.data.clone()


def load_tokenizer(folder: Path | str) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a Hugging Face folder, with its chat template.

    What tokenizer.json says is what is used, as in the tokenize stage. The class that a folder or its architecture
    names would build it anew, and some leave out a part: GPT2Tokenizer splits no digits, whatever the file says.

    Raises:
        Refused: there is none, or it cannot be read.
    """
    folder = Path(folder)
    if not (folder / "tokenizer.json").exists() and not (folder / "tokenizer_config.json").exists():
        raise Refused(f"{folder.name} has no tokenizer (tokenizer.json is missing)")
    try:
        as_written = (folder / "tokenizer.json").exists()
        loader: Any = PreTrainedTokenizerFast if as_written else AutoTokenizer
        return loader.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # the parser of tokenizers raises bare exceptions
        raise Refused(f"the tokenizer of {folder.name} cannot be loaded: {error}") from error


def end_of_turn_ids(tokenizer: Any) -> list[int]:
    """The token ids that end a turn: the tokenizer's end of sequence, and what its chat template puts after a reply.

    The template is asked by rendering a reply and looking at the first special token behind it.
    """
    ids = [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]
    if not getattr(tokenizer, "chat_template", None):
        return ids
    reply, tail = "qzreply", ""
    for content in (str, lambda text: [{"type": "text", "text": text}]):  # some templates want contents in parts
        messages = [{"role": "user", "content": content("q")}, {"role": "assistant", "content": content(reply)}]
        try:
            rendered = tokenizer.apply_chat_template(messages, tokenize=False)
        except Exception:  # a template may raise whatever it likes for a conversation it does not serve
            continue
        if reply in rendered:
            tail = rendered.rpartition(reply)[2]
            break
    special = set(tokenizer.all_special_ids) | {
        index for index, token in tokenizer.added_tokens_decoder.items() if token.special
    }
    for index in tokenizer(tail, add_special_tokens=False)["input_ids"]:
        if index in special:
            return ids if index in ids else [*ids, index]
    return ids


def token_ids(named: Any) -> list[int]:
    """The ids in a field of a generation config: one or a list, or in published files -1 or a text for none."""
    values = named if isinstance(named, list | tuple) else [named]
    return [value for value in values if isinstance(value, int) and value >= 0]


def save_checkpoint(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write a plain Hugging Face folder and prove that it opens.

    Call it last: `SHA256SUMS` covers every file of `folder`, training.jsonl included.

    Args:
        model: the trained model.
        tokenizer: saved beside it, with its chat template.
        folder: an existing folder; files of the same names are replaced.

    Raises:
        RuntimeError: the export gate found that the saved folder does not give the live model back.
    """
    transformers_logging.disable_progress_bar()
    model.generation_config = _generation_config(model, tokenizer)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
        _tidy_json(folder / name)
    for path in folder.glob("*.safetensors"):
        path.chmod(0o644)  # safetensors writes them for the owner alone
    check_export(model, tokenizer, folder)
    write_sums(folder)


def _generation_config(model: PreTrainedModel, tokenizer: Any) -> GenerationConfig:
    config = model.generation_config or GenerationConfig()
    ids = token_ids(config.eos_token_id)
    ids += [index for index in end_of_turn_ids(tokenizer) if index not in ids]
    if ids:
        config.eos_token_id = ids[0] if len(ids) == 1 else ids
    if not token_ids(config.pad_token_id):
        config.pad_token_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else next(iter(ids), None)
    if not token_ids(config.bos_token_id):
        config.bos_token_id = tokenizer.bos_token_id
    if _can_be_written(config):
        return config
    # Many published models set a temperature without do_sample, which transformers reads but does not write.
    as_published, config.do_sample = config.do_sample, True
    if _can_be_written(config):
        return config
    config.do_sample = as_published
    return _without_contradictions(config)


def _can_be_written(config: GenerationConfig) -> bool:
    try:
        config.validate(strict=True)
    except ValueError:
        return False
    return True


def _without_contradictions(config: GenerationConfig) -> GenerationConfig:
    """The settings of `config` without those that are of no effect beside the others, such as a length penalty
    without beams: transformers reads them, and refuses to write them."""
    tokens = ("eos_token_id", "pad_token_id", "bos_token_id")
    kept = {name: getattr(config, name) for name in tokens}
    for name, value in config.to_diff_dict().items():
        if name not in tokens and _can_be_written(GenerationConfig(**kept | {name: value})):
            kept[name] = value
    return GenerationConfig(**kept)


def _tidy_json(path: Path) -> None:
    """Sort the keys and drop whatever says where the files came from."""
    if not path.exists():
        return
    content = json.loads(path.read_text(encoding="utf-8"))
    for key in _LOADING_NOTES:
        content.pop(key, None)
    if content.get("tokenizer_class") == "TokenizersBackend":
        # The name that releases of transformers before 5, and tools built on them, know for the same thing.
        content["tokenizer_class"] = "PreTrainedTokenizerFast"
    path.write_text(json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")


def check_export(model: PreTrainedModel, tokenizer: Any, folder: Path) -> None:
    """Reload `folder` with plain transformers and compare it with the live model.

    Checked: logits on fixed tokens, parameter names and that no wrapper's are among them, dtype, tied weights,
    vocabulary against embedding rows, the tokenizer's vocabulary, end of turn, and chat template.

    Raises:
        RuntimeError: naming the first difference.
    """

    def fail(what: str) -> None:
        raise RuntimeError(f"export gate: {what}; nothing is published")

    reloaded, report = AutoModelForCausalLM.from_pretrained(
        folder, dtype="auto", local_files_only=True, use_safetensors=True, output_loading_info=True
    )
    if report["missing_keys"] or report["unexpected_keys"]:
        odd = sorted([*report["missing_keys"], *report["unexpected_keys"]])
        fail(f"the saved weights do not match the architecture ({odd[0]})")
    if reloaded.dtype != model.dtype:
        fail(f"saved in {reloaded.dtype}, the live model is {model.dtype}")
    if odd := _odd_names(folder):
        fail(f"the saved weights have names that only a wrapper gives ({odd[0]})")
    rows = reloaded.get_input_embeddings().weight.shape[0]
    if len(tokenizer) > rows:
        fail(f"the tokenizer has {len(tokenizer)} tokens, the embedding only {rows} rows")
    vocabulary = reloaded.config.get_text_config().vocab_size
    if vocabulary != rows:
        fail(f"config.json says {vocabulary} tokens, the embedding has {rows} rows")
    if _is_tied(model) != _is_tied(reloaded):
        fail("the tie between embedding and head is lost")
    ids = (torch.arange(32, dtype=torch.int64) * 7919 % rows)[None]
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    reloaded.eval()
    try:
        with torch.no_grad():
            live = model(input_ids=ids.to(model.device), use_cache=False).logits.float().cpu()
            saved = reloaded(input_ids=ids, use_cache=False).logits.float()
    finally:
        for module, mode in modes:
            module.training = mode
    # On one device the two are equal to the bit; another device and low precision leave room for rounding.
    tolerance = 1e-4 if model.dtype == torch.float32 and model.device.type == "cpu" else 5e-2
    if not torch.allclose(live, saved, rtol=tolerance, atol=tolerance):
        fail(f"logits of the saved folder differ by {(live - saved).abs().max():.3g}")
    if difference := _tokenizer_difference(tokenizer, folder):
        fail(difference)
    eos = reloaded.generation_config.eos_token_id
    eos = eos if isinstance(eos, list) else [eos]
    if missing := [index for index in end_of_turn_ids(tokenizer) if index not in eos]:
        fail(f"generation_config.json does not end at token {missing[0]}")


def check_tokenizer_export(model: Any, tokenizer: Any, scratch: Path) -> None:
    """Find before training what the export gate would find of the tokenizer after it.

    Args:
        model, tokenizer: what `save_checkpoint` will be given.
        scratch: an existing folder, for one of this function's own.

    Raises:
        Refused: transformers opens the tokenizer beside a model of this architecture as another one.
    """
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        model.config.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        _tidy_json(Path(folder) / "tokenizer_config.json")
        difference = _tokenizer_difference(tokenizer, Path(folder))
    if difference:
        raise Refused(
            f"the checkpoint could not be opened as it is trained: beside a model of type {model.config.model_type},"
            f" {difference}; give the data such a tokenizer, or take another architecture"
        )


def _tokenizer_difference(tokenizer: Any, folder: Path) -> str | None:
    """What transformers makes another of in the tokenizer that was saved in `folder`; None where nothing."""
    again = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    vocabulary, expected = again.get_vocab(), tokenizer.get_vocab()
    if vocabulary != expected:
        odd = min(
            token for token in vocabulary.keys() | expected.keys() if vocabulary.get(token) != expected.get(token)
        )
        return (
            f"the saved tokenizer has another vocabulary when {type(again).__name__} opens it ({odd!r} is"
            f" {vocabulary.get(odd, 'absent')} there and {expected.get(odd, 'absent')} here)"
        )
    if getattr(again, "chat_template", None) != getattr(tokenizer, "chat_template", None):
        return "the chat template is lost"
    return None


def _odd_names(folder: Path) -> list[str]:
    """Names of saved tensors that come from a wrapper (compiled, distributed, adapted) around a model's layers."""
    names: list[str] = []
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            names.extend(file.keys())
    return [name for name in names if set(name.split(".")) & _WRAPPERS]


def _is_tied(model: Any) -> bool:
    output = model.get_output_embeddings()
    return output is not None and output.weight.data_ptr() == model.get_input_embeddings().weight.data_ptr()


def write_sums(folder: Path) -> None:
    """Write `SHA256SUMS` over all other files of `folder`, in the format of sha256sum, sorted by path."""
    lines = []
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = path.relative_to(folder).as_posix()
        if name == SUMS:
            continue
        with path.open("rb") as file:
            lines.append(f"{hashlib.file_digest(file, 'sha256').hexdigest()}  {name}\n")
    (folder / SUMS).write_text("".join(lines), encoding="utf-8")


def _read_json(folder: Path, name: str) -> dict[str, Any]:
    try:
        content = json.loads((folder / name).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise Refused(f"{folder.name} is not a model folder: {name} is missing") from None
    except ValueError as error:
        raise Refused(f"{folder.name}/{name} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise Refused(f"{folder.name}/{name} is not a JSON object")
    return content
