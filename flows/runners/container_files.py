"""What a stage container is given beside its image: the spec of the stage, and the user's own code.

Of the user's code go the packages and modules that the step's fingerprint reaches, whole and nothing else: a recipe may
lie in a home folder. They are put into the container as read-only files of root, so nothing has to be readable for the
container's user on this machine, and the engine may be on another.

What is not under a folder of `python_path` (an installed package) must be in the image.
"""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

from flows.runners.base import RunnerError
from stages.contract import StageSpec

SCRATCH = "/scratch"  # in the container; its files are this attempt's alone
SPEC = "spec.json"
OUTCOME = "outcome.json"  # what the stage leaves of its end, in the scratch folder
_CODE = "code"
_MOST_BYTES = 64 << 20


def luggage(spec: StageSpec) -> tuple[StageSpec, bytes]:
    """The spec as the container shall read it, and a tar archive of all it is given, to be unpacked in `SCRATCH`.

    Raises:
        RunnerError: the user's code cannot be read, or is too large to be handed over.
    """
    roots = [Path(folder) for folder in spec.python_path]
    inside = spec.model_copy(
        update={"scratch": SCRATCH, "python_path": [f"{SCRATCH}/{_CODE}/{number}" for number in range(len(roots))]}
    )
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        _add(archive, SPEC, inside.model_dump_json(indent=1).encode())
        total = 0
        for number, root in enumerate(roots):
            _add_folder(archive, f"{_CODE}/{number}")
            for path in _user_files(root, spec):
                try:
                    data = path.read_bytes()
                except OSError as error:
                    raise RunnerError(f"step {spec.step}: cannot read {path}: {error.strerror or error}") from None
                total += len(data)
                if total > _MOST_BYTES:
                    raise RunnerError(
                        f"step {spec.step}: the packages of its code under {root} hold more than "
                        f"{_MOST_BYTES >> 20} MiB; keep data out of them, or install them in the image"
                    )
                _add(archive, f"{_CODE}/{number}/{path.relative_to(root).as_posix()}", data)
    return inside, buffer.getvalue()


def _user_files(root: Path, spec: StageSpec) -> list[Path]:
    """The files below `root` of the top-level packages and modules that the step's code is made of."""
    code = (spec.record.get("code") or {}).get("files") or {}
    tops = {path.partition("/")[0] for path in code if not path.startswith("stages/")}
    found: list[Path] = []
    for top in sorted(tops):
        place = root / top
        if place.is_dir():
            found += [path for path in place.rglob("*") if path.is_file() and _wanted(path.relative_to(root))]
        elif place.is_file():
            found.append(place)
    return sorted(found)


def _wanted(path: Path) -> bool:
    return not any(part.startswith(".") or part == "__pycache__" for part in path.parts)


def _add(archive: tarfile.TarFile, name: str, data: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size, info.mode = len(data), 0o444
    archive.addfile(info, io.BytesIO(data))


def _add_folder(archive: tarfile.TarFile, name: str) -> None:
    info = tarfile.TarInfo(name)
    info.type, info.mode = tarfile.DIRTYPE, 0o755
    archive.addfile(info)
