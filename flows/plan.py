"""What a run of a recipe would do: each step's key, whether its result is there already, and if not, why.

The model: a step's key is a hash of its stage, the identity fields of its config, the digests of its inputs and its
code. A step whose key has a whole result in the store is a *hit*. Any other is a *miss*, with a reason: the first
difference from the nearest earlier result of that stage (of the same step name where there is one, with the fewest
differences, the newest of those). The key of a step that takes the output of a miss is unknown until that has run.

Invariants:
- Planning writes nothing but the cache of file hashes, starts no process, and imports neither torch nor Prefect.
- A hit can be used: every object of its artifact and its side outputs was seen in the store.
- Only `Planner.decide` says hit or miss; `flows.execute` asks it again with the digests that came out,
  so a step whose inputs turn out to be the same bytes as before is not run.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from flows.differences import Nearest, drift, environment_here, nearest
from flows.recipe_model import InputRef, Recipe, RecipeError, Step, lacking_split, wrong_input
from flows.sources import Source, resolve
from stages.artifacts import (
    FolderStore,
    HashCache,
    Result,
    Store,
    StoreError,
    WorkArea,
    find_secret,
    open_store,
    parse_result,
    read_result,
    result_key,
    results,
)
from stages.artifacts.cache import cache_folder
from stages.fingerprint import Fingerprint, stage_fingerprint, stage_key, user_fingerprint


@dataclass(frozen=True)
class PlannedStep:
    """What would happen to one step.

    Attributes:
        key: None where an input is yet to be made.
        status: "hit": its result is used; "miss": it runs (or is a hit after all, where an input comes out as before).
        reason: why it runs; for a hit, empty or why it is one in spite of a difference.
        artifact: digest of the main artifact of a hit.
        outputs: side output name -> digest, of a hit.
        inputs: input name -> digest, None for what is yet to be made.
        needs: steps whose outputs it takes.
        last_seconds: how long it took the last time, if ever.
        saved_step: the step at which progress is saved under its key, if there is any.
        note: what is worth knowing but changes nothing, such as newer libraries.
        accepted_from: for a hit by `--accept-code`: the key of the result that is kept.
    """

    step: str
    stage: str
    key: str | None
    status: Literal["hit", "miss"]
    reason: str = ""
    artifact: str | None = None
    outputs: dict[str, str] = field(default_factory=dict)
    inputs: dict[str, str | None] = field(default_factory=dict)
    needs: tuple[str, ...] = ()
    last_seconds: float | None = None
    saved_step: int | None = None
    note: str = ""
    accepted_from: str | None = None

    @property
    def resumable(self) -> bool:
        """Whether saved progress of an earlier attempt will be gone on from."""
        return self.saved_step is not None

    def to_json(self) -> dict[str, Any]:
        """The fields as plain JSON values, in the form of `headrace plan --json`."""
        return asdict(self) | {"needs": list(self.needs), "resumable": self.resumable}


@dataclass(frozen=True)
class Plan:
    """The steps of a run, each after those it needs.

    Attributes:
        sources: (step, input name) -> what it stands for.
        hashes: the hashes of source files that planning learnt.
    """

    recipe: Recipe
    store: Store
    steps: list[PlannedStep]
    force: frozenset[str] = frozenset()
    accept_code: frozenset[str] = frozenset()
    until: tuple[str, ...] = ()
    sources: dict[tuple[str, str], Source] = field(default_factory=dict)
    hashes: HashCache | None = None

    def __getitem__(self, step: str) -> PlannedStep:
        for planned in self.steps:
            if planned.step == step:
                return planned
        raise KeyError(step)

    @property
    def misses(self) -> list[PlannedStep]:
        return [planned for planned in self.steps if planned.status == "miss"]

    @property
    def seconds(self) -> float | None:
        """About how long the steps that run took the last time, in all; None where one of them never ran."""
        known = [planned.last_seconds for planned in self.misses]
        return None if None in known else sum(seconds for seconds in known if seconds is not None)

    def to_json(self) -> list[dict[str, Any]]:
        return [planned.to_json() for planned in self.steps]


@dataclass(frozen=True)
class Code:
    """The code of a step: `part` is what of it enters the key, `record` is kept with the result, `whole` is all."""

    part: str | dict[str, Any]
    record: dict[str, Any]
    whole: Fingerprint


class Planner:
    """Computes keys and looks for results. It remembers what it read of results and code; make a new one to look again.

    Args:
        force: steps that run though they are hits.
        accept_code: steps whose nearest result that differs in code only is kept.
    """

    def __init__(
        self, recipe: Recipe, store: Store, *, force: Iterable[str] = (), accept_code: Iterable[str] = ()
    ) -> None:
        self.recipe, self.store = recipe, store
        self.force, self.accept_code = frozenset(force), frozenset(accept_code)
        self.environment = environment_here()
        self._fingerprints: dict[tuple[str, tuple[str, ...]], Fingerprint] = {}
        self._results: dict[str, list[Result]] = {}

    def code(self, step: Step) -> Code:
        """The code that the step's result depends on, as it is on disk (read once).

        Raises:
            RecipeError: a module of it cannot be found or is not Python.
        """
        users = step.config.user_code()
        whole = self._fingerprint(step, users)
        version = type(step.config).VERSION
        record = {"mode": self.recipe.code, "digest": whole.digest, "version": version, "files": whole.files}
        part: str | dict[str, Any] = whole.digest
        if self.recipe.code == "version":
            user = user_fingerprint(users, self.recipe.python_path)
            part = {"version": version, "user": user.digest if users else ""}
            record |= {"user": part["user"], "user_files": user.files}
        if self.recipe.environment == "identity":
            part = {"code": part, "environment": self.environment}
        return Code(part, record, whole)

    def key(self, step: Step, inputs: dict[str, str]) -> str:
        """The key of a step whose inputs (name -> digest) are known.

        Raises:
            RecipeError: a setting has no canonical form, or the code cannot be read.
        """
        code = self.code(step).part
        try:
            return stage_key(step.stage, step.config.identity(), inputs, code)
        except ValueError as error:
            raise RecipeError(f"{step.where}: {step.name}: {str(error).rstrip('.')}.") from error

    def decide(
        self,
        step: Step,
        inputs: dict[str, str | None],
        waiting: dict[str, str],
        *,
        strict: bool = True,
        seen: dict[str, int] | None = None,
    ) -> PlannedStep:
        """Whether a step is a hit, and if not, why it runs.

        Args:
            inputs: input name -> digest, None where it is yet to be made.
            waiting: for the inputs yet to be made, the step that makes them, or "" for a model of the hub.
            strict: refuse `--accept-code` where there is nothing to accept, rather than let the step run.
            seen: blobs that were found a moment ago, as of `is_complete`.

        Raises:
            RecipeError: so refused, or its code cannot be read.
        """
        needs = tuple(step.upstream())
        base: dict[str, Any] = {"step": step.name, "stage": step.stage, "inputs": inputs, "needs": needs}
        known = {name: digest for name, digest in inputs.items() if digest is not None}
        key = self.key(step, known) if len(known) == len(inputs) else None
        forced = step.name in self.force
        if key is not None and not forced:
            result = read_result(self.store, step.stage, key, seen)
            if result is not None:
                note = drift(result.environment, self.environment)
                return PlannedStep(**base, key=key, status="hit", note=note, **_made(result))
        near = self._nearest(step, inputs, waiting)
        seconds = near.result.seconds if near is not None else None
        if step.name in self.accept_code and key is not None:
            accepted = self._accept(step, base, key, known, strict)
            if accepted is not None:
                return accepted
        saved = self._saved(key) if key is not None else None
        if forced:
            reason = "forced"
        elif saved is not None:
            reason = f"saved progress at step {saved}"
        elif key is not None and self.store.exists(result_key(step.stage, key)):
            reason = self._spoilt(step.stage, key)
        else:
            reason = near.first if near is not None else "never run"
        return PlannedStep(**base, key=key, status="miss", reason=reason, last_seconds=seconds, saved_step=saved)

    def _spoilt(self, stage: str, key: str) -> str:
        """Why a result that is there is none."""
        try:
            parse_result(self.store, result_key(stage, key))
        except StoreError:
            return "its result is damaged"
        return "its artifact is damaged or gone"

    def _accept(
        self, step: Step, base: dict[str, Any], key: str, known: dict[str, str], strict: bool
    ) -> PlannedStep | None:
        inputs: dict[str, str | None] = dict(known)
        found = self._nearest(step, inputs, {}, code_only=True)
        result = read_result(self.store, found.result.stage, found.result.key) if found is not None else None
        if found is not None and result is not None:
            reason = f"accepted: {found.first}"
            return PlannedStep(**base, key=key, status="hit", reason=reason, accepted_from=result.key, **_made(result))
        if not strict:
            return None
        near = self._nearest(step, inputs, {})
        why = "its stage was never run" if near is None else f"the nearest differs otherwise: {near.first}"
        if found is not None:
            why = "the artifact of the one that does is damaged or gone"
        raise RecipeError(f"--accept-code {step.name}: no earlier result differs in its code only; {why}.")

    def _nearest(
        self, step: Step, inputs: dict[str, str | None], waiting: dict[str, str], *, code_only: bool = False
    ) -> Nearest | None:
        versions = self.environment if self.recipe.environment == "identity" else None
        earlier = self._earlier(step.stage)
        return nearest(step, earlier, inputs, waiting, self.code(step).record, versions, code_only=code_only)

    def _earlier(self, stage: str) -> list[Result]:
        if stage not in self._results:
            self._results[stage] = list(results(self.store, stage))
        return self._results[stage]

    def _saved(self, key: str) -> int | None:
        steps = WorkArea(self.store, key, Path(os.devnull)).steps()
        return steps[0] if steps else None

    def _fingerprint(self, step: Step, users: list[str]) -> Fingerprint:
        name = (step.stage, tuple(users))
        if name not in self._fingerprints:
            try:
                self._fingerprints[name] = stage_fingerprint(step.stage, users, self.recipe.python_path)
            except (ValueError, OSError, SyntaxError) as error:
                raise RecipeError(f"{step.where}: {step.name}: {str(error).rstrip('.')}.") from error
        return self._fingerprints[name]


def make_plan(
    recipe: Recipe,
    store: Store | str | Path,
    *,
    force: Sequence[str] = (),
    until: Sequence[str] = (),
    accept_code: Sequence[str] = (),
) -> Plan:
    """Say what a run would do.

    Args:
        force: steps to run though their results are there.
        until: the last steps wanted; these and what they need are planned. All steps when empty.
        accept_code: steps for which a change of code is declared harmless: the nearest result that differs in its code
            only is kept.

    Raises:
        RecipeError: an argument names no step, a file or artifact is missing or of the wrong kind, or a module or the
            store cannot be read.
    """
    try:
        opened = open_store(store) if isinstance(store, str | Path) else store
        return _make_plan(recipe, opened, force, until, accept_code)
    except StoreError as error:
        raise RecipeError(f"{str(error).rstrip('.')}.") from error


def _make_plan(recipe: Recipe, store: Store, force: Sequence[str], until: Sequence[str], accept: Sequence[str]) -> Plan:
    _refuse_secrets(recipe)
    order = recipe.order(until)
    for argument, names in (("--force", force), ("--accept-code", accept)):
        for name in names:
            recipe.check_step(name, argument)
            if name not in order:
                needing = " and ".join(until)
                raise RecipeError(
                    f"{argument} {name}: is not among the steps that {needing} needs ({', '.join(order)})."
                )
    if both := sorted(set(force) & set(accept)):
        raise RecipeError(f"--force {both[0]} and --accept-code {both[0]}: choose one; to force is to run it anew.")
    hashes = HashCache(cache_path(store))
    seen: dict[str, int] = {}  # of this one look: a plan that is carried out looks again at each step
    sources = _resolve_sources(recipe, store, order, hashes, seen)
    planner = Planner(recipe, store, force=force, accept_code=accept)
    planned: dict[str, PlannedStep] = {}
    for name in order:
        step = recipe.steps[name]
        inputs: dict[str, str | None] = {}
        waiting: dict[str, str] = {}
        for ref in step.inputs.values():
            digest = sources[name, ref.name].digest if ref.source != "step" else output_of(planned[ref.target], ref)
            inputs[ref.name] = digest
            if digest is None:
                waiting[ref.name] = ref.target if ref.source == "step" else ""
        planned[name] = planner.decide(step, inputs, waiting, seen=seen)
    return Plan(
        recipe, store, list(planned.values()), planner.force, planner.accept_code, tuple(until), sources, hashes
    )


def _refuse_secrets(recipe: Recipe) -> None:
    """A recipe and its overrides are stored with every result, for all who read the store to see."""
    advice = "it would be stored with every result; take it out, and give it in the environment of the run only"
    if found := find_secret(recipe.text):
        line = recipe.text.count("\n", 0, found[0]) + 1
        raise RecipeError(f"{recipe.path}:{line}: has {found[1]}, a secret: {advice}.")
    for override in recipe.overrides:
        if found := find_secret(override):
            raise RecipeError(f"--set {override.partition('=')[0]}: has {found[1]}, a secret: {advice}.")


def output_of(planned: PlannedStep, ref: InputRef) -> str | None:
    """The digest that a reference to a step's output stands for; None while the step has not run."""
    if planned.status != "hit":
        return None
    return planned.outputs.get(ref.output) if ref.output else planned.artifact


def _resolve_sources(
    recipe: Recipe, store: Store, order: Iterable[str], cache: HashCache, seen: dict[str, int]
) -> dict[tuple[str, str], Source]:
    found: dict[tuple[str, str], Source] = {}
    mistakes: list[str] = []
    for name in order:
        step = recipe.steps[name]
        for ref in step.inputs.values():
            if ref.source == "step":
                continue
            try:
                source = resolve(ref, recipe.folder, store, cache, seen)
            except RecipeError as error:
                mistakes.append(str(error))
                continue
            kind = source.kind or "checkpoint"  # what the hub gives
            problem = wrong_input(step, ref, kind, source.holds, ref.text)
            if problem := problem or lacking_split(step, ref, source.splits):
                mistakes.append(f"{ref.where}: {problem}")
            found[name, ref.name] = source
    cache.save()
    if mistakes:
        raise RecipeError("\n".join(dict.fromkeys(mistakes)))
    return found


def cache_path(store: Store) -> Path | None:
    """Where the hashes of source files are remembered: in the store's folder, or the user's cache for other stores."""
    if isinstance(store, FolderStore):
        return store.root / "cache" / "hashes.json"
    folder = cache_folder()
    return folder / "hashes.json" if folder is not None else None


def _made(result: Result) -> dict[str, Any]:
    return {"artifact": result.artifact, "outputs": result.outputs, "last_seconds": result.seconds}
