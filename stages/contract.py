"""The contract between flows and stages: everything either side may know about the other.

`flows` writes a `StageSpec` and starts `python -m stages run spec.json`; the stage process gives the stage a
`StageContext`, and answers with JSON Lines on standard output, an exit code and `outcome.json`.

Invariants:
- A stage is a folder with `config.py` (a `Config`, no torch) and `stage.py` (`run(context)`). Nothing is registered:
  the stage's name is its module.
- What a stage computes depends on nothing but its config's identity fields, its inputs and its code. Everything else
  (workers, device, checkpoint interval, the store, the host) is marked `NotIdentity` or lives in `Resources`.
- A stage writes to `context.output` only; the process publishes it after `run` has returned.

This module and `stages.artifacts` carry bytes and never change them, so they stay out of code fingerprints.
"""

from __future__ import annotations

import importlib
import re
import sysconfig
import traceback
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Annotated, Any, ClassVar, Generic, Protocol, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

KINDS = ("source", "dataset", "checkpoint", "logprobs", "rollouts", "report", "adapter", "code", "origins")


class ExitCode(IntEnum):
    """How a stage process ends. 80 to 83 are verdicts on the run and are never retried."""

    DONE = 0
    STOPPED = 75  # stopped on request, after saving
    TRIPWIRE = 80
    NONFINITE = 81  # non-finite loss or gradient, or too many skipped steps
    BUDGET = 82  # wall-clock budget spent
    REFUSED = 83  # bad config or input, found before starting


VERDICTS = frozenset({ExitCode.TRIPWIRE, ExitCode.NONFINITE, ExitCode.BUDGET, ExitCode.REFUSED})


class StageEnd(Exception):
    """Base of the ways a stage ends itself on purpose; `code` is the exit code of the process.

    Attributes:
        checkpoint: for a verdict on a run, a folder with the model as it is now, to be kept apart from all results.
        kept: the digest that the stage process has then published it under.
        together: whether all ranks end so, at one step: then none of them need be hurried.
    """

    code: ClassVar[ExitCode]
    checkpoint: Path | None = None
    kept: str | None = None
    together: bool = False


class Refused(StageEnd):
    """Input or configuration cannot be used. The message names the file, line or field, and the way to mend it."""

    code = ExitCode.REFUSED


class Stopped(StageEnd):
    """Asked to stop, and progress is saved."""

    code = ExitCode.STOPPED


class Tripwire(StageEnd):
    """A threshold of the recipe was crossed (loss spike, entropy collapse, ...)."""

    code = ExitCode.TRIPWIRE


class NonFinite(StageEnd):
    """A loss, gradient or reward was NaN or infinite too often to go on."""

    code = ExitCode.NONFINITE


class BudgetSpent(StageEnd):
    """The wall-clock budget of the step is spent; progress is saved."""

    code = ExitCode.BUDGET


class RankDone(StageEnd):
    """Ends every rank but the first once training is over: rank 0 alone saves and publishes."""

    code = ExitCode.DONE


class NotIdentity:
    """Marks a config field that does not change what the stage computes: `Annotated[int, NotIdentity()]`."""


class UserCode:
    """Marks a config field that names a `module:function`, whose module joins the code fingerprint."""


def _check_import_path(value: str) -> str:
    if not re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", value):
        raise ValueError(f"{value!r} is not of the form module:function")
    return value


ImportPath = Annotated[str, AfterValidator(_check_import_path), UserCode()]


def import_function(path: str) -> Callable[..., Any]:
    """Import `module:function`.

    Raises:
        Refused: the module or the function does not exist, or the module fails to import.
    """
    module_name, _, name = path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        raise Refused(f"cannot import {module_name!r} of {path!r}: {failure(error)}") from error
    function = getattr(module, name, None)
    if not callable(function):
        raise Refused(f"module {module_name!r} has no function {name!r}")
    return function


def failure(error: BaseException) -> str:
    """What a user's function raised, and where: "KeyError: 'answer' (rewards.py line 12)"."""
    libraries = (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), "<")
    frames = traceback.extract_tb(error.__traceback__)[1:]  # the first is the caller's own
    own = [frame for frame in frames if not frame.filename.startswith(libraries)]
    where = f" ({Path(own[-1].filename).name} line {own[-1].lineno})" if own else ""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}{': ' if text else ''}{text[:500]}{where}"


@dataclass(frozen=True)
class Input:
    """What a stage takes under one input name.

    Attributes:
        kinds: artifact kinds it accepts.
        holds: for datasets, what the rows may be ("text", "chat", "preference", "prompt"); empty: any.
        required: whether a recipe must give it.
        many: whether a recipe gives a list or mapping of artifacts; they arrive as "name.label".
    """

    kinds: tuple[str, ...]
    holds: tuple[str, ...] = ()
    required: bool = True
    many: bool = False
    description: str = ""


class StageConfig(BaseModel):
    """Base of every stage's `Config`. Subclasses set the class attributes below."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    VERSION: ClassVar[int] = 1  # raised whenever the bytes of the stage's output change for the same config and inputs
    INPUTS: ClassVar[dict[str, Input]] = {}
    OUTPUT: ClassVar[str] = "dataset"  # the kind of the main artifact
    SIDE_OUTPUTS: ClassVar[dict[str, str]] = {}  # name -> kind of further artifacts, used in a recipe as "step/name"
    RANKS: ClassVar[bool] = False  # whether several processes (resources.processes) can run the stage together
    NEEDS_TORCH: ClassVar[bool] = True  # False, in the body of `Config`: the stage starts without waiting for torch

    @field_validator("*", mode="before")
    @classmethod
    def _no_boolean_as_a_number(cls, value: Any, info: ValidationInfo) -> Any:
        """Python counts true as 1; whoever writes `max_steps: true` meant something else."""
        if isinstance(value, bool) and info.field_name is not None:
            allowed = repr(cls.model_fields[info.field_name].annotation)
            if not re.search(r"\b(bool|Any|object|Literal)\b", allowed) and re.search(r"\b(int|float)\b", allowed):
                raise ValueError(f"should be a number, not {str(value).lower()}")
        return value

    def holds(self) -> str | None:
        """For a stage that makes a dataset: what its rows are ("text", "chat", "preference", "prompt")."""
        return None

    def makes_splits(self) -> tuple[str, ...] | None:
        """For a stage that makes a dataset: the splits that it will have; None where the settings do not tell."""
        return None

    def reads_splits(self) -> dict[str, tuple[str, str]]:
        """Of inputs that are datasets: input name -> a split that it must have, and the field that says so."""
        return {}

    def inputs_problem(self, given: Collection[str]) -> str:
        """What is wrong with having inputs of these names beside these settings, as a sentence; "" if nothing.

        A recipe asks before anything starts: after hours of training it would be late to hear it.
        """
        return ""

    def identity(self, *, exclude_defaults: bool = False) -> dict[str, Any]:
        """The JSON-able identity fields, nested models included."""
        return _identity(self, exclude_defaults)

    def user_code(self) -> list[str]:
        """Every `module:function` that the config names, nested models included, without repeats."""
        return sorted(set(_user_code(self)))


def _marked(info: Any, marker: type) -> bool:
    return any(isinstance(item, marker) for item in info.metadata)


def _identity(model: BaseModel, exclude_defaults: bool) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for name, info in type(model).model_fields.items():
        value = getattr(model, name)
        if _marked(info, NotIdentity):
            continue
        if exclude_defaults and not info.is_required() and value == info.get_default(call_default_factory=True):
            continue
        result[name] = _plain(value, exclude_defaults)
    return result


def _plain(value: Any, exclude_defaults: bool) -> Any:
    if isinstance(value, BaseModel):
        return _identity(value, exclude_defaults)
    if isinstance(value, list | tuple):
        return [_plain(item, exclude_defaults) for item in value]
    if isinstance(value, dict):
        return {key: _plain(item, exclude_defaults) for key, item in value.items()}
    return value


def _user_code(model: BaseModel) -> Iterator[str]:
    for name, info in type(model).model_fields.items():
        value = getattr(model, name)
        for item in value if isinstance(value, list | tuple) else [value]:
            if isinstance(item, BaseModel):
                yield from _user_code(item)
            elif isinstance(item, str) and _has_user_code(info):
                yield item


def _has_user_code(info: Any) -> bool:
    """Whether the field is an ImportPath, also inside `ImportPath | None` and `list[ImportPath]`."""
    return _marked(info, UserCode) or "UserCode object" in repr(info.annotation)


class Resources(BaseModel):
    """What a step asks of the machine it runs on. Never identity."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    gpus: int = Field(0, ge=0, description="GPUs given to the step; 0 trains on the CPU.")
    processes: int = Field(
        1, ge=1, description="Ranks that train together, each on a GPU of its own where there are any."
    )
    threads: int | None = Field(
        None, ge=1, le=1024, description="CPU threads of a rank; when empty, its share of all cores."
    )
    memory: str | None = Field(None, description="Memory limit, such as 8GiB.")
    shm: str | None = Field(None, description="Shared memory of a container, such as 1GiB.")

    @model_validator(mode="after")
    def _check_gpus(self) -> Resources:
        if self.gpus and self.processes > self.gpus:
            raise ValueError(f"{self.processes} processes cannot share {self.gpus} gpus: each needs one of its own")
        return self


class StageSpec(BaseModel):
    """All that a stage process is told. Written by `flows`, read by `python -m stages run`."""

    model_config = ConfigDict(extra="forbid")

    stage: str  # "dpo", or the dotted name of a package with `config` and `stage` modules
    step: str  # the recipe's name for it
    run: str
    key: str
    config: dict[str, Any]
    inputs: dict[str, str]  # input name ("model", or "models.base") -> artifact digest
    store: str  # URL or folder of the artifact store
    scratch: str  # a folder of this attempt alone
    resources: Resources = Resources()
    python_path: list[str] = []  # folders with user code
    record: dict[str, Any] = {}  # what the flow knows and the result's record shall hold (code, recipe, git commit)
    forced: bool = False


class Work(Protocol):
    """A stage's saved progress under its key. See `stages.artifacts.work`."""

    def save(self, step: int, folder: Path, then: Callable[[], None] | None = None) -> None:
        """Keep the files of `folder` as the progress at `step`. The files must not change afterwards.

        `then` is called, from another thread, once they are durable: the moment to say `saved`.
        """

    def latest(self) -> tuple[int, Path] | None:
        """The newest complete, verified progress: its step and a folder with its files."""

    def wait(self) -> None:
        """Return once the save in flight, if any, is durable. Raises what made it fail."""


ConfigT = TypeVar("ConfigT", bound=StageConfig)


@dataclass
class StageContext(Generic[ConfigT]):
    """What `run(context)` of a stage gets.

    Attributes:
        config: the validated config of the stage.
        inputs: input name -> folder with the verified files of that artifact.
        digests: input name -> digest of that artifact, where it is known.
        output: empty folder; its files become the stage's artifact.
        work: saved progress under the stage's key.
        scratch: folder for temporary files, removed after the attempt.
        resources: what the step was given. With `processes` above 1 this process is one of several ranks that run the
            same code; only the first one's events, progress and output count.
        emit: writes one event to standard output; the process adds "time" and "step", the recipe's name of the step
            (the training step of a metric, resumed or saved event is "at").
        stop: whether a stop was asked for (SIGTERM or SIGINT).
    """

    config: ConfigT
    inputs: dict[str, Path]
    output: Path
    work: Work
    scratch: Path
    resources: Resources
    emit: Callable[[dict[str, Any]], None]
    stop: Callable[[], bool]
    step: str = ""
    side_outputs: dict[str, Path] = field(default_factory=dict)
    final_metrics: dict[str, float] = field(default_factory=dict)
    digests: dict[str, str] = field(default_factory=dict)

    @property
    def stop_requested(self) -> bool:
        return self.stop()

    def many(self, name: str) -> dict[str, Path]:
        """The artifacts of an input with `many`: label -> folder, in the recipe's order."""
        prefix = name + "."
        return {key.removeprefix(prefix): path for key, path in self.inputs.items() if key.startswith(prefix)}

    def side_output(self, name: str) -> Path:
        """An empty folder for the further artifact `name` of `Config.SIDE_OUTPUTS`."""
        return self.side_outputs[name]

    def log(self, text: str, level: str = "info") -> None:
        self.emit({"type": "log", "level": level, "text": text})

    def progress(self, done: int, total: int | None, unit: str = "step", **figures: float) -> None:
        """Say how far the stage is; `figures` are shown beside the bar (loss=..., tokens_per_second=...)."""
        self.emit({"type": "progress", "done": done, "total": total, "unit": unit, "figures": figures})

    def metric(self, step: int, **values: float) -> None:
        """One row of the live metrics of this run."""
        self.emit({"type": "metric", "at": step, "values": values})

    def resumed(self, step: int) -> None:
        self.emit({"type": "resumed", "at": step})

    def saved(self, step: int, seconds: float) -> None:
        self.emit({"type": "saved", "at": step, "seconds": round(seconds, 3)})

    def summary(self, **metrics: float) -> None:
        """Final metrics for the record of the result and the run's table."""
        self.final_metrics.update(metrics)


def config_class(stage: str) -> type[StageConfig]:
    """The `Config` of a stage: `stages.<stage>.config`, or `<stage>.config` where the name has a dot.

    Raises:
        ValueError: there is no such stage.
    """
    package = stage if "." in stage else f"stages.{stage}"
    if not re.fullmatch(r"[A-Za-z_][\w.]*", stage):
        raise ValueError(f"{stage!r} is not the name of a stage")
    try:
        module = importlib.import_module(f"{package}.config")
    except ModuleNotFoundError as error:
        if error.name and f"{package}.config.".startswith(error.name + "."):
            raise ValueError(f"there is no stage {stage!r} (no module {package}.config)") from None
        raise
    found = getattr(module, "Config", None)
    if not (isinstance(found, type) and issubclass(found, StageConfig)):
        raise ValueError(f"{package}.config has no class Config(StageConfig)")
    return found
