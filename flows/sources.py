"""Where the inputs of a recipe that no step makes come from: files, buckets, artifacts, refs and the hub.

The model: `resolve` turns a reference into a `Source`: the digest of its artifact, as far as it can be known without
writing anything, and what is needed to bring it into the store. `bring` does that and returns the digest.

Invariants:
- `resolve` writes nothing to the store, and loads nothing from the network but data of a bucket that it has not hashed
  yet: without it a key cannot be known.
- A `source` artifact holds the raw files as they are, so any model can be traced to bytes that are kept. The path of a
  file in it never depends on where the data lies: it is relative to what the recipe's patterns have in common.
- No pickle enters the store as part of a model: a model's folder is taken without them, and refused if there are no
  safetensors beside them.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
import re
import sysconfig
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from stat import S_ISREG
from typing import Any

from flows.recipe_model import InputRef, RecipeError
from stages.artifacts import (
    DataObject,
    HashCache,
    NotInStore,
    Result,
    Store,
    StoreError,
    find_objects,
    has_blobs,
    import_files,
    is_complete,
    manifest_of,
    read_manifest,
    read_ref,
    read_result,
    resolve_digest,
    write_result,
)
from stages.artifacts.objects import SCHEME
from stages.os_errors import explained

# What is taken of a model's folder: weights as safetensors, configuration, tokenizer, notes. Never pickles or code.
MODEL_FILES = ("*.safetensors", "*.json", "*.jsonl", "*.txt", "*.model", "*.jinja", "*.md", "LICENSE*", "SHA256SUMS")
MODEL_FOLDERS = ("additional_chat_templates",)
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
_LEFT_OUT = {"__pycache__", "site-packages", "dist-packages"}


@dataclass(frozen=True)
class Source:
    """An input from outside the recipe's steps.

    Attributes:
        ref: the reference.
        kind: kind of its artifact; None for a model of the hub that was not fetched yet.
        digest: of its artifact; None for a model of the hub that was not fetched yet.
        files: for files: (path in the artifact, file of this machine or object of a bucket), sorted.
        holds, splits: for a dataset: what its rows are, and the names of its splits, where that is known.
    """

    ref: InputRef
    kind: str | None
    digest: str | None
    files: tuple[tuple[str, Path | DataObject], ...] = ()
    holds: str | None = None
    splits: tuple[str, ...] | None = None


def resolve(
    ref: InputRef,
    folder: Path,
    store: Store,
    cache: HashCache | None = None,
    seen: dict[str, int] | None = None,
) -> Source:
    """What a reference stands for now.

    Args:
        ref: any reference but one to a step.
        folder: the recipe's folder, which relative paths start from.
        cache: remembers hashes of files.
        seen: blobs that were found a moment ago, as of `is_complete`.

    Raises:
        RecipeError: nothing matches, a file cannot be read, the store has no such artifact, or it is not whole.
    """
    try:
        match ref.source:
            case "files":
                kind, files = find_files(ref.patterns, folder)
                return Source(ref, kind, manifest_of(files, kind, cache).digest, tuple(files))
            case "artifact":
                return _stored(ref, store, resolve_digest(store, ref.target), seen)
            case "ref":
                return _stored(ref, store, read_ref(store, ref.target).artifact, seen)
            case "hf":
                result = read_result(store, "hf", _hub_key(ref.target), seen)
                return Source(ref, None, None) if result is None else Source(ref, result.kind, result.artifact)
    except (ValueError, StoreError) as error:
        raise RecipeError(f"{ref.where}: input {ref.name}: {str(error).rstrip('.')}.") from error
    raise ValueError(f"{ref.text} is the output of a step")


def bring(source: Source, store: Store, run: str, cache: HashCache | None = None) -> str:
    """Have the artifact of a source in the store, and return its digest.

    Args:
        cache: the one that `resolve` had: what was hashed then is not hashed again.

    Raises:
        RecipeError: a file changed or vanished since it was resolved, or a model cannot be had from the hub.
    """
    ref = source.ref
    try:
        if source.digest is not None and is_complete(store, source.digest):
            return source.digest
        if ref.source == "hf":
            return _bring_from_hub(ref, store, run)
        if not source.files or source.kind is None:
            raise NotInStore(f"store {store.url} no longer holds all of {source.digest}; `headrace verify` says more")
        digest = import_files(store, list(source.files), source.kind, cache)
        if cache is not None:
            cache.save()
    except (ValueError, StoreError) as error:
        raise RecipeError(f"{ref.where}: input {ref.name}: {str(error).rstrip('.')}.") from error
    if digest != source.digest:
        raise RecipeError(
            f"{ref.where}: input {ref.name}: {ref.text} changed while the run was starting; run it again."
        )
    return digest


def find_files(patterns: tuple[str, ...], folder: Path) -> tuple[str, list[tuple[str, Path | DataObject]]]:
    """The kind of artifact that patterns give, and its files as (path in the artifact, file), sorted.

    A pattern is a file, a folder (all of its files but hidden ones), a glob ("**" crosses folders), one of these in a
    bucket ("s3://BUCKET/PATH"), or "stdlib:GLOB". One folder with a config.json is a model and gives a `checkpoint`;
    everything else gives a `source`.

    Raises:
        ValueError: a pattern matches no file, two different files have the same path, or a model cannot be taken.
        StoreError: a bucket cannot be listed.
    """
    if len(patterns) == 1 and not patterns[0].startswith(("stdlib:", SCHEME)):
        place = _absolute(patterns[0], folder)
        if (place / "config.json").is_file():
            return "checkpoint", [*model_files(place)]
    library = [pattern for pattern in patterns if pattern.startswith("stdlib:")]
    found: dict[str, str | DataObject] = {}  # paths are text until the end: there may be very many
    for pattern in library:
        root = Path(sysconfig.get_path("stdlib"))
        below = Path(pattern.removeprefix("stdlib:"))
        if below.is_absolute() or ".." in below.parts:
            raise ValueError(f"{pattern!r} leads out of Python's standard library; give the path without stdlib:")
        files = _expand(root, pattern.removeprefix("stdlib:"))
        if not files:
            raise ValueError(f"{pattern!r} matches no file of Python's standard library in {root}")
        found.update((_below(root, path), path) for path in files)
    bases: list[Path] = []
    plain: list[str] = []
    for pattern in patterns:
        if not pattern.startswith(("stdlib:", SCHEME)):
            base, files = _match(pattern, folder)
            bases.append(base)
            plain.extend(files)
    common = Path(os.path.commonpath(bases)) if bases else folder
    for path in dict.fromkeys(plain):
        _add(found, _below(common, path), path)
    for name, item in _find_in_buckets([pattern for pattern in patterns if pattern.startswith(SCHEME)]):
        _add(found, name, item)
    return "source", [(name, Path(file) if isinstance(file, str) else file) for name, file in sorted(found.items())]


def _add(found: dict[str, str | DataObject], name: str, file: str | DataObject) -> None:
    other = found.setdefault(name, file)
    if other != file:
        one, two = (item if isinstance(item, str) else item.url for item in (file, other))
        raise ValueError(f"{one} and {two} would both be {name} in the artifact; rename one")


def _find_in_buckets(patterns: list[str]) -> Iterator[tuple[str, DataObject]]:
    """The objects of buckets, with their paths from the folder that the patterns have in common."""
    matched = [find_objects(pattern) for pattern in patterns]
    if not matched:
        return
    common = SCHEME + os.path.commonpath([base.removeprefix(SCHEME) for base, _ in matched])
    for _, objects in matched:
        for item in objects:
            name = item.url.removeprefix(common).lstrip("/")
            if name == "config.json":
                raise ValueError(
                    f"{item.url} makes its folder that of a model, and models are not read from a bucket: download it "
                    "and give the folder here, or bring that into the store by `headrace import`"
                )
            yield name, item


def _below(folder: Path, path: str) -> str:
    """The path of a file from a folder above it."""
    return path[len(str(folder).rstrip("/")) + 1 :]


def _absolute(pattern: str, folder: Path) -> Path:
    return Path(os.path.normpath(folder / Path(pattern).expanduser()))


def _match(pattern: str, folder: Path) -> tuple[Path, list[str]]:
    """The files of one pattern, and the folder that their paths start from."""
    path = _absolute(pattern, folder)
    if path.is_file():
        return path.parent, [str(path)]
    if path.is_dir():
        files = _expand(path, "**")
        if not files:
            raise ValueError(f"folder {path} holds no files")
        return path, files
    if path.exists():
        raise ValueError(f"{path} is neither a file nor a folder")
    if not glob.has_magic(pattern):
        here = Path(os.path.abspath(Path(pattern).expanduser()))
        hint = f"; paths start from the recipe's folder, and {here} exists: give that" if here.exists() else ""
        raise ValueError(f"there is no file {path}{hint}")
    parts = Path(pattern).expanduser().parts
    fixed = next(index for index, part in enumerate(parts) if glob.has_magic(part))
    base = _absolute(str(Path(*parts[:fixed])), folder)
    files = _expand(base, str(Path(*parts[fixed:])))
    if not files:
        missing = "" if base.is_dir() else ", which does not exist"
        raise ValueError(f"{pattern!r} matches no file below {base}{missing}")
    return base, files


def _expand(base: Path, pattern: str) -> list[str]:
    """The regular files below `base` that a glob matches, hidden ones and caches left out.

    Raises:
        ValueError: a link that it matches leads nowhere, a link leads back to a folder around it, or a folder cannot be
            listed; leaving it out would lose data unseen.
    """
    if pattern == "**":
        return sorted(_files_below(base, (base.resolve(),)))
    if "**" in Path(pattern).parts:
        for _ in _files_below(
            base, (base.resolve(),), dead_links=True
        ):  # refuses what glob would follow without end, or pass over
            pass
    result = []
    start = str(base).rstrip("/")
    for name in sorted(glob.glob(pattern, root_dir=base, recursive=True)):
        path = f"{start}/{name}"
        try:
            mode = os.stat(path).st_mode
        except FileNotFoundError:
            if os.path.islink(path):
                raise ValueError(f"{path} is a link to a file that does not exist") from None
            continue
        except OSError as error:
            raise ValueError(f"{path} cannot be read: {explained(error)}") from None
        if S_ISREG(mode) and _LEFT_OUT.isdisjoint(name.split("/")):
            result.append(path)
    return result


def _files_below(folder: Path, around: tuple[Path, ...], *, dead_links: bool = False) -> Iterator[str]:
    """The files of a folder and of all below it but hidden ones, through links to folders too.

    Args:
        around: the real folders above, and it.
        dead_links: whether links that lead nowhere are passed over; a glob may not match them.

    Raises:
        ValueError: a folder cannot be listed, or a link leads back or, unless that is allowed, nowhere.
    """
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        raise ValueError(f"folder {folder} cannot be listed: {explained(error)}") from None
    for entry in entries:
        if entry.name.startswith(".") or entry.name in _LEFT_OUT:
            continue
        if entry.is_file():
            yield entry.path
        elif entry.is_dir():
            path = Path(entry.path)
            real = path.resolve()
            if real in around:
                raise ValueError(
                    f"{path} is a link to a folder around it, so its files have no end; take the link away"
                )
            yield from _files_below(path, (*around, real), dead_links=dead_links)
        elif not dead_links and entry.is_symlink() and not os.path.exists(entry.path):
            raise ValueError(f"{entry.path} is a link to a file that does not exist")


def model_files(folder: Path) -> list[tuple[str, Path]]:
    """The files of a Hugging Face model's folder that an artifact takes, as (path in the artifact, file).

    Raises:
        ValueError: there are no safetensors weights.
    """
    found = [path for pattern in MODEL_FILES for path in folder.glob(pattern) if path.is_file()]
    for name in MODEL_FOLDERS:
        found.extend(path for path in (folder / name).glob("*.jinja") if path.is_file())
    visible = {path.relative_to(folder).as_posix(): path for path in found if not path.name.startswith(".")}
    files = sorted(visible.items())
    if not any(name.endswith(".safetensors") for name, _ in files):
        pickles = sorted(path.name for path in folder.iterdir() if path.suffix in _PICKLES)
        if pickles:
            raise ValueError(
                f"{folder} has its weights as a pickle ({pickles[0]}), which can run code when opened; convert it "
                "to safetensors first (load it with transformers where you trust it, then save_pretrained)"
            )
        raise ValueError(f"{folder} has a config.json but no *.safetensors weights")
    _check_shards(folder, visible.keys())
    return files


def _check_shards(folder: Path, names: Collection[str]) -> None:
    """Refuse a copy of a model that lacks some of its shards."""
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return
    try:
        shards = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ValueError(f"{index} is not the index of a model's weights; copy the model again") from None
    if missing := [shard for shard in shards if shard not in names]:
        raise ValueError(
            f"{folder} lacks {len(missing)} of its {len(shards)} shards, such as {missing[0]}; copy it again"
        )


def _stored(ref: InputRef, store: Store, digest: str, seen: dict[str, int] | None) -> Source:
    """An artifact that must be whole in the store already."""
    manifest = read_manifest(store, digest)
    if not has_blobs(store, manifest, seen):
        raise ValueError(
            f"artifact {digest} is not whole in store {store.url}; `headrace verify` names what is missing"
        )
    info: dict[str, Any] = {}
    for entry in manifest.files:
        if manifest.kind == "dataset" and entry.path == "dataset.json":
            info = json.loads(store.get(entry.blob))
    splits = tuple(info["splits"]) if "splits" in info else None
    return Source(ref, manifest.kind, digest, holds=info.get("holds"), splits=splits)


# Models of the Hugging Face hub


def _hub_key(target: str) -> str:
    """The key under which the result of fetching "ORG/NAME@REVISION" is remembered, as stage "hf"."""
    return hashlib.sha256(f"hf:{target}".encode()).hexdigest()


def _bring_from_hub(ref: InputRef, store: Store, run: str) -> str:
    started, begun = datetime.now(UTC), time.monotonic()
    folder = _download(ref.target)
    digest = import_files(store, model_files(folder), "checkpoint")
    finished, seconds = datetime.now(UTC), time.monotonic() - begun
    record: dict[str, Any] = {
        "artifact": digest,
        "kind": "checkpoint",
        "stage": "hf",
        "step": re.sub(r"[^\w.-]", "-", ref.target.partition("@")[0]),
        "key": _hub_key(ref.target),
        "run": run,
        "config": {"model": ref.target},
        "identity": {"model": ref.target},
        "started": started.isoformat(),
        "finished": finished.isoformat(),
        "seconds": round(seconds, 3),
    }
    write_result(store, Result.model_validate(record))
    return digest


def _download(target: str) -> Path:
    """The folder of a model in the local cache of the hub, downloaded where it is not there yet.

    Raises:
        ValueError: it cannot be had.
    """
    from huggingface_hub import snapshot_download  # takes 0.3 s to import, and few recipes need it
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    name, _, revision = target.partition("@")
    patterns = [*MODEL_FILES, *(f"{folder}/*.jinja" for folder in MODEL_FOLDERS)]
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=patterns))
    except LocalEntryNotFoundError:
        raise ValueError(
            f"{target} is not in the local cache of the hub, and the hub cannot be reached; fetch it where there is a "
            f"network (hf download {name} --revision {revision}), or give the folder of a copy"
        ) from None
    except HfHubHTTPError as error:
        raise ValueError(f"the hub does not give {target}: {str(error).splitlines()[0]}") from None
    except OSError as error:
        raise ValueError(f"{target} cannot be fetched from the hub: {error}") from None
