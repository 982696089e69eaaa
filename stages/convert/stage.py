"""Conversion of model files into a checkpoint that every other stage can read.

A GGUF file is dequantised by transformers (which needs the package `gguf`); a Hugging Face folder is loaded and saved
again in the wanted type. Either passes the export gate.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from stages.contract import Refused, StageContext
from stages.convert.config import Config
from stages.modeling.checkpoint import align, load_model, load_tokenizer, save_checkpoint


def run(context: StageContext[Config]) -> None:
    """Convert and save.

    Raises:
        Refused: no such file, a file of another format, or a model that transformers cannot read.
    """
    config, folder = context.config, context.inputs["files"]
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[config.dtype]
    gguf = find_gguf(folder, config.gguf_file)
    model: Any
    tokenizer: Any
    if gguf is not None:
        context.log(f"reading {gguf.name}")
        model, tokenizer = load_gguf(gguf, dtype)
    else:

        def left_out(names: list[str]) -> None:
            context.log(
                f"left out {len(names)} weights that the model of config.json has no place for: {names[0]}"
                f"{', ...' if len(names) > 1 else ''}",
                "warning",
            )

        model, tokenizer = load_model(folder, dtype=dtype, leave_out=left_out), load_tokenizer(folder)
    save_checkpoint(model, tokenizer, context.output)
    context.summary(parameters=float(sum(param.numel() for param in model.parameters())))


def find_gguf(folder: Path, name: str | None) -> Path | None:
    """The GGUF file that is meant; None where the folder is a Hugging Face folder.

    Raises:
        Refused: there is no such file, or several and no name.
    """
    found = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.gguf"))
    if name is not None:
        # The name must lie in the folder: what is elsewhere is not part of the input's digest.
        if name not in found:
            raise Refused(f"gguf_file {name!r} is not among the input's files ({', '.join(found) or 'no *.gguf'})")
        return folder / name
    if (folder / "config.json").exists():
        return None
    if len(found) == 1:
        return folder / found[0]
    if found:
        raise Refused(f"input files holds {len(found)} GGUF files ({', '.join(found)}); say which with gguf_file")
    raise Refused(
        "input files holds neither a *.gguf file nor a config.json; give a GGUF file or a Hugging Face folder"
    )


def load_gguf(path: Path, dtype: torch.dtype) -> tuple[Any, Any]:
    """Model and tokenizer of a GGUF file.

    Raises:
        Refused: the file is damaged, of an architecture unknown to transformers, or `gguf` is not installed.
    """
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise Refused(f"{path.name} is not a GGUF file (its first bytes are not GGUF)")
    transformers_logging.disable_progress_bar()
    try:
        model = AutoModelForCausalLM.from_pretrained(
            path.parent, gguf_file=path.name, dtype=dtype, local_files_only=True
        )
        tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name, local_files_only=True)
    except ImportError as error:
        raise Refused("reading GGUF needs the package gguf: pip install 'headrace[gguf]'") from error
    except Exception as error:  # the parsers of GGUF and of tokenizers raise errors of any kind on damaged files
        raise Refused(f"{path.name} cannot be read as a GGUF model: {error}") from error
    if (quantizer := getattr(model, "hf_quantizer", None)) is not None:
        # The weights are plain by now; transformers would still refuse to save a model it calls quantised.
        quantizer.remove_quantization_config(model)
    align(model)
    return model, tokenizer
