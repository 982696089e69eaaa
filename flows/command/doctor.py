"""`headrace doctor`: is this machine, and the store, fit to run on? Looks, says, and changes nothing.

torch is looked up in the metadata of what is installed, never imported.
"""

from __future__ import annotations

import os
import platform
import shutil
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from flows.command.listing import print_json
from flows.runners.engine_checks import check_engine
from flows.runners.gpus import visible_gpus
from flows.service import installation
from flows.service.local_server import configured_api, quiet_prefect, without_user
from stages.artifacts import FolderStore, StoreError, open_cache, open_store
from stages.artifacts.check import Check, check_store

_NEEDED = ("torch", "transformers", "tokenizers", "safetensors", "accelerate", "pyarrow", "prefect", "botocore")
_LITTLE_DISK = 5 << 30
_MARKS = {"ok": "ok", "warning": "warning", "unsafe": "UNSAFE", "failed": "FAILED"}


def doctor(store_url: str, *, as_json: bool) -> int:
    """Check everything and print what was found. Returns 1 if something does not work or is unsafe, else 0."""
    checks = []
    for check in _all(store_url):
        checks.append(check)
        if not as_json:
            print(f"{_MARKS[check.state]:<8} {check.name:<20} {check.detail}", flush=True)
    bad = [check for check in checks if check.state in ("failed", "unsafe")]
    if as_json:
        print_json({"ok": not bad, "checks": [asdict(check) for check in checks]})
    return 1 if bad else 0


def _all(store_url: str) -> Iterator[Check]:
    yield _python()
    yield from _packages()
    yield _gpus()
    yield _prefect()
    yield from check_engine()
    try:
        store = open_store(store_url)
    except StoreError as error:
        yield Check("store", "failed", str(error))
        return
    scratch = os.environ.get("HEADRACE_SCRATCH") or (
        store.root if isinstance(store, FolderStore) else tempfile.gettempdir()
    )
    yield _disk("disk for scratch", Path(scratch))
    if store.remote:
        yield _cache()
    if isinstance(store, FolderStore) and not store.root.exists():
        yield Check("store", "ok", f"{store.url} is not there yet; the first run makes it")
        return
    yield from check_store(store)


def _python() -> Check:
    return Check("python", "ok", f"{platform.python_version()} at {sys.executable}")


def _packages() -> Iterator[Check]:
    found, missing = [], []
    for name in _NEEDED:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            missing.append(name)
    yield Check("packages", "ok", ", ".join(found))
    if missing:
        yield Check("packages", "failed", f"not installed: {', '.join(missing)}; run `pip install headrace` again")


def _gpus() -> Check:
    gpus = visible_gpus()
    try:
        built = version("torch")
    except PackageNotFoundError:
        built = ""
    if gpus and built.endswith("+cpu"):
        return Check("gpus", "warning", f"{len(gpus)} here, but torch {built} cannot use them; install torch for CUDA")
    return Check("gpus", "ok", f"{len(gpus)} here" if gpus else "none here; stages run on the CPU")


def _prefect() -> Check:
    quiet_prefect()
    up = installation.running()
    api = without_user(configured_api() or (up.api if up else ""))
    if not api:
        return Check("prefect", "ok", "no server is set: each run starts one of its own (or use --no-prefect)")
    try:
        with urllib.request.urlopen(f"{api}/health", timeout=10) as answer:
            if answer.status == 200:
                return Check("prefect", "ok", f"{api} answers")
            return Check("prefect", "failed", f"{api} answers with status {answer.status}; look at its log")
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        said = f"{api} does not answer ({reason}); start it, correct PREFECT_API_URL, or run with --no-prefect"
        return Check("prefect", "failed", said)


def _disk(name: str, folder: Path) -> Check:
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    said = f"{free / 2**30:,.1f} GiB free at {folder}"
    if free < _LITTLE_DISK:
        return Check(name, "warning", f"{said}; checkpoints may not fit: free some, or set HEADRACE_SCRATCH")
    return Check(name, "ok", said)


def _cache() -> Check:
    try:
        cache = open_cache()
    except StoreError as error:
        return Check("cache", "failed", str(error))
    if cache is None:
        return Check("cache", "warning", "none: what a run reads is fetched anew each time (HEADRACE_CACHE_SIZE, HOME)")
    free = shutil.disk_usage(cache.root).free
    said = f"{cache.root}, up to {cache.limit / 2**30:,.1f} GiB, {free / 2**30:,.1f} GiB free"
    if free < _LITTLE_DISK:
        return Check("cache", "warning", f"{said}; free some, or set HEADRACE_CACHE_DIR or HEADRACE_CACHE_SIZE")
    return Check("cache", "ok", said)
