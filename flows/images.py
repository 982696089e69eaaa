"""The verbs `headrace images`: the images of this checkout, built by the Docker Engine that the environment names.

The build is the engine's own (the classic one, so that every engine can do it), of an archive that holds what the
Dockerfile copies and nothing else. An image says in labels which version, git commit and code are in it, and
`images/built.json` keeps the digest of the last build of each.
"""

from __future__ import annotations

import json
import os
import re
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import IO, Any

from flows import figures
from flows.command.listing import print_json
from flows.recipe_model import RecipeError, near
from flows.record import git_state
from flows.runners import engine
from flows.runners.base import RunnerError
from flows.runners.memory import show_size

ROOT = Path(__file__).resolve().parent.parent
IMAGES = {  # name -> what of the checkout its Dockerfile copies
    "stage": ("stages",),
    "flows": ("stages", "flows"),
    "worker": ("stages", "flows"),
}
_RECORD = ROOT / "images" / "built.json"


def build(names: list[str], *, base: str | None, index: str | None, tag: str | None, as_json: bool) -> int:
    """Build images and print what they became. Returns the exit code.

    Args:
        names: of `IMAGES`; all when empty.
        base: image to build on; that of the Dockerfile when None.
        index: address of one more package index to ask.
        tag: tag of the images; "latest" when None.

    Raises:
        RecipeError: there is no such image, or this is not a checkout.
        RunnerError: no engine answers, or the build failed.
    """
    for name in names:
        if name not in IMAGES:
            raise RecipeError(f"there is no image {name!r}.{near(name, IMAGES)} Images: {', '.join(IMAGES)}.")
    if not (ROOT / "images").is_dir():
        raise RecipeError(f"images are built from a checkout of Headrace, and {ROOT} is none; clone it and build there")
    client = engine.connect(timeout=3600)
    built = {}
    for name in names or list(IMAGES):
        entry = _build(client, name, base, index, tag or "latest", quiet=as_json)
        built[name] = entry
        _remember(name, entry)
        if not as_json:
            took = figures.duration(entry["seconds"])
            print(f"{entry['tag']}  {entry['id']}  {show_size(entry['size'])}  ({took})", flush=True)
    if as_json:
        print_json(built)
    return 0


def _build(client: Any, name: str, base: str | None, index: str | None, tag: str, *, quiet: bool) -> dict[str, Any]:
    begun = time.monotonic()
    code = engine.code_digest(*IMAGES[name])
    commit = (git_state() or {}).get("commit") or "unknown"
    arguments = {"VERSION": _version(), "COMMIT": str(commit), "CODE": code}
    if name == "worker":
        base = f"headrace-stage:{tag}"  # it is the stage image, and more
    arguments |= {key: value for key, value in (("BASE", base), ("INDEX", index)) if value}
    target = f"headrace-{name}:{tag}"
    if not quiet:
        print(f"Building {target} …", flush=True)
    said: list[str] = []
    try:
        answers = client.api.build(
            fileobj=_context(name),
            custom_context=True,
            dockerfile=f"images/{name}/Dockerfile",
            tag=target,
            buildargs=arguments,
            network_mode=os.environ.get("HEADRACE_DOCKER_NETWORK") or "host",
            rm=True,
            forcerm=True,
            decode=True,
        )
        for answer in answers:
            if error := answer.get("error"):
                raise RunnerError(_failed(target, base, error, said))
            said += [line for line in re.split(r"[\r\n]+", answer.get("stream", "")) if line.strip()]
            if not quiet and said and answer.get("stream", "").startswith("Step "):
                print(f"  {said[-1]}", file=sys.stderr, flush=True)
    except engine.APIError as error:
        raise RunnerError(_failed(target, base, engine.explained(error), said)) from None
    except engine.AWAY as error:
        raise RunnerError(f"the Docker Engine at {engine.where()} went away during the build: {error}") from None
    image = client.images.get(target)
    return {
        "tag": target,
        "id": image.id,
        "size": int(image.attrs["Size"]),
        "code": code,
        "commit": commit,
        "version": arguments["VERSION"],
        "base": base or "",
        "built": datetime.now(UTC).isoformat(timespec="seconds"),
        "seconds": round(time.monotonic() - begun, 1),
    }


def _failed(target: str, base: str | None, error: str, said: list[str]) -> str:
    tail = "".join(f"\n  {line}" for line in said[-15:])
    what = f"image {target} cannot be built" + (f" from base {base}" if base else "")
    return f"{what}: {' '.join(error.split())}. The build said at its end:{tail}"


def _context(name: str) -> IO[bytes]:
    """The archive that the engine builds from. The same files give the same bytes, whenever they were checked out."""
    file = tempfile.TemporaryFile()  # noqa: SIM115 (it lives as long as the request)
    with tarfile.open(fileobj=file, mode="w") as archive:
        for path in _context_files(name):
            info = archive.gettarinfo(str(path), path.relative_to(ROOT).as_posix())
            info.uid = info.gid = info.mtime = 0
            info.uname = info.gname = ""
            info.mode = 0o755 if info.isdir() else 0o644
            if info.isdir():
                archive.addfile(info)
            else:
                with open(path, "rb") as data:
                    archive.addfile(info, data)
    file.seek(0)
    return file


def _context_files(name: str) -> Iterator[Path]:
    yield ROOT / "constraints.txt"
    yield ROOT / "pyproject.toml"
    for folder in (ROOT / "images" / name, ROOT / "images" / "wheels", *(ROOT / package for package in IMAGES[name])):
        folder.mkdir(exist_ok=True)
        yield folder
        for path in sorted(folder.rglob("*")):
            if "__pycache__" not in path.parts and not path.name.startswith("."):
                yield path


def _version() -> str:
    try:
        return version("headrace")
    except PackageNotFoundError:
        return "unknown"


def _remember(name: str, entry: dict[str, Any]) -> None:
    known = built()
    known[name] = entry
    temporary = _RECORD.with_suffix(".tmp")
    temporary.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")
    os.replace(temporary, _RECORD)


def built() -> dict[str, Any]:
    """What was last built here, by image: tag, id (its digest), size in bytes, code, commit, version and time."""
    try:
        found = json.loads(_RECORD.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def show(*, as_json: bool) -> int:
    """Print the images of this installation that the engine has, and whether their code is the one here.

    Raises:
        RunnerError: no engine answers.
    """
    client = engine.connect()
    rows = []
    for name, packages in IMAGES.items():
        for image in client.images.list(name=f"headrace-{name}"):
            labels = image.labels or {}
            code = labels.get(engine.CODE, "")
            fresh = code == engine.code_digest(*packages)
            for tag in image.tags or [f"headrace-{name}"]:
                size = int(image.attrs["Size"])
                rows.append({"tag": tag, "id": image.id, "size": size, "code": code, "this_code": fresh})
    if as_json:
        print_json(rows)
    for row in [] if as_json else rows:
        state = "this code" if row["this_code"] else "other code"
        print(f"{row['tag']:<28} {row['id'][7:19]}  {show_size(row['size']):>10}  {state}")
    if not rows and not as_json:
        print("No images yet; `headrace images build` makes them.")
    return 0
