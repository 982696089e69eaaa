"""Settings of the convert stage. Imports no torch."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from stages.contract import Input, StageConfig


class Config(StageConfig):
    """Turn a GGUF file, or a Hugging Face folder of safetensors, into a checkpoint."""

    VERSION = 1
    INPUTS: ClassVar[dict[str, Input]] = {
        "files": Input(("source", "checkpoint"), description="A folder with the GGUF file, or a Hugging Face folder.")
    }
    OUTPUT = "checkpoint"

    gguf_file: str | None = Field(
        None, description="Path of the GGUF file in the input; when empty, the only one there, or the folder itself."
    )
    dtype: Literal["float32", "bfloat16", "float16"] = Field("float32", description="Type of the saved weights.")
