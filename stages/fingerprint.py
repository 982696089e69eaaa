"""Which code a stage's result depends on, and the key of a result.

The code of a stage is every module of this project, and of the user's own code, that its `stage` and `config` modules
reach by import, anywhere in them. Nothing is imported or executed to find out: modules are parsed. Invariants:

- A module is hashed as its syntax tree without positions, comments, formatting, docstrings and other bare strings, in a
  form that does not depend on the Python version. Only a change of code changes a fingerprint.
- Libraries are recorded beside a result, never part of a fingerprint. `stages.contract`, `stages.artifacts`, this
  module and the stage process carry bytes and never change them, so they are left out too.
- Importing `a.b` executes `a`, so the packages above a module belong to its closure.

What it cannot see: a module whose name is computed when the code runs, compiled extensions, and files that code reads
by itself. Data belongs in a stage's inputs.
"""

from __future__ import annotations

import ast
import difflib
import hashlib
import importlib.util
import os
import re
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stages.artifacts.manifest import canonical_json, sha256_hex
from stages.os_errors import explained

_OWN_ROOT = Path(__file__).absolute().parent.parent
_LEFT_OUT = re.compile(
    r"stages\.(contract|artifacts|fingerprint|process|ranks|children|events|environment|halted|os_errors|server|__main__)(\..*)?"
)
_ONLY_FOR_READERS = ("type_comment", "type_ignores", "kind", "ctx")  # fields of syntax trees that change no result


class CodeError(ValueError):
    """User code that cannot be fingerprinted: missing, or not Python. The message is one sentence."""


@dataclass(frozen=True)
class Fingerprint:
    """The code of a stage.

    Attributes:
        digest: "sha256:<64 hex>" of all files' hashes.
        files: path relative to its import root ->
            {"sha256": hash of the normalised module, "definitions": {name: hash}}. A definition is a top-level
            function, class or assigned name; "" stands for all other top-level statements.
        paths: the same paths -> the file on this machine. Not for records.
    """

    digest: str
    files: dict[str, dict[str, Any]] = field(default_factory=dict)
    paths: dict[str, Path] = field(default_factory=dict, compare=False)

    def sources(self) -> dict[str, bytes]:
        """The content of each file, read now.

        Raises:
            CodeError: one cannot be read.
        """
        try:
            return {path: file.read_bytes() for path, file in self.paths.items()}
        except OSError as error:
            raise CodeError(f"cannot read {error.filename}: {error.strerror or error}") from error


def stage_fingerprint(stage: str, user_code: Iterable[str], python_path: Iterable[Path]) -> Fingerprint:
    """The code that the results of `stage` depend on.

    Args:
        stage: "dpo", or the dotted name of a package with `config` and `stage` modules.
        user_code: `module:function` names of the stage's config.
        python_path: folders with user code, in the order in which they are searched.

    Raises:
        CodeError: a module that is named does not exist, has no such function, or is not valid Python.
    """
    search = _Search([Path(os.path.abspath(path)) for path in python_path])
    package = stage if "." in stage else f"stages.{stage}"
    start = [f"{package}.stage", f"{package}.config"]
    for name in start:
        if search.find(name) is None:
            raise CodeError(f"there is no stage {stage!r} (no module {name})")
    return _fingerprint(search, start + [_check_function(search, reference) for reference in user_code])


def user_fingerprint(user_code: Iterable[str], python_path: Iterable[Path]) -> Fingerprint:
    """The code of the named functions alone, for recipes that say `code: version`.

    Raises:
        CodeError: as `stage_fingerprint`.
    """
    search = _Search([Path(os.path.abspath(path)) for path in python_path])
    return _fingerprint(search, [_check_function(search, reference) for reference in user_code])


def _fingerprint(search: _Search, start: Iterable[str]) -> Fingerprint:
    files: dict[str, dict[str, Any]] = {}
    paths: dict[str, Path] = {}
    for found in sorted(_closure(search, start), key=lambda found: found.relative):
        module = _parse(found)
        files[found.relative] = {"sha256": module.sha256, "definitions": module.definitions}
        assert found.file is not None
        paths[found.relative] = found.file
    digest = sha256_hex(canonical_json({path: entry["sha256"] for path, entry in files.items()}))
    return Fingerprint("sha256:" + digest, files, paths)


def source_hash(source: bytes) -> str:
    """The hash of a module as a fingerprint has it, of its source.

    Raises:
        CodeError: it is not Python.
    """
    try:
        return _summary(_tree(source)).sha256
    except (SyntaxError, ValueError, RecursionError) as error:
        raise CodeError(f"not valid Python: {error}") from None


def difference(old_files: Mapping[str, Any], new_files: Mapping[str, Any]) -> str:
    """The first difference of two `Fingerprint.files`, such as "stages/dpo/loss.py (sigmoid_loss)"; "" for none."""
    for path in sorted(old_files.keys() & new_files.keys()):
        old, new = old_files[path], new_files[path]
        if old["sha256"] != new["sha256"]:
            before, after = old.get("definitions", {}), new.get("definitions", {})
            names = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
            return f"{path}{_name_some(names)}"
    for path in sorted(new_files.keys() - old_files.keys()):
        return f"{path} (new)"
    for path in sorted(old_files.keys() - new_files.keys()):
        return f"{path} (no longer used)"
    return ""


def _name_some(names: list[str]) -> str:
    named = [name for name in names if name]
    if not named:
        return ""
    rest = f" and {len(named) - 1} more" if len(named) > 1 else ""
    return f" ({named[0]}{rest})"


def stage_key(stage: str, identity: Mapping[str, Any], inputs: Mapping[str, str], code: str | Mapping[str, Any]) -> str:
    """The key of a result, 64 hexadecimal digits: SHA-256 of the canonical JSON of all that the result depends on.

    Args:
        stage: the stage's name.
        identity: identity fields of its config (`StageConfig.identity`).
        inputs: input name -> artifact digest.
        code: the fingerprint's digest, or {"version": N, "user": digest} where the recipe says `code: version`.

    Raises:
        ValueError: a value has no canonical JSON.
    """
    code = code if isinstance(code, str) else dict(code)
    return sha256_hex(canonical_json({"code": code, "config": dict(identity), "inputs": dict(inputs), "stage": stage}))


def needs_torch(stage: str, python_path: Iterable[Path]) -> bool:
    """Whether the stage needs torch: yes, unless `NEEDS_TORCH = False` is in the body of its `Config`. Parses only."""
    package = stage if "." in stage else f"stages.{stage}"
    found = _Search([Path(os.path.abspath(path)) for path in python_path]).find(f"{package}.config")
    if found is None or found.file is None:
        return True
    try:
        tree = _tree(found.file.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return True
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == "Config":
            for line in node.body:
                targets = line.targets if isinstance(line, ast.Assign) else [getattr(line, "target", None)]
                if any(isinstance(target, ast.Name) and target.id == "NEEDS_TORCH" for target in targets):
                    value = getattr(line, "value", None)
                    return not (isinstance(value, ast.Constant) and value.value is False)
    return True


@dataclass(frozen=True)
class _Found:
    """A module in the source tree; `file` is None for a folder without __init__.py (a namespace package)."""

    name: str
    file: Path | None
    relative: str  # path of the file relative to its import root, with "/"
    package: bool


class _Search:
    """Finds modules the way the import system of a stage process does, within project and user code only."""

    def __init__(self, python_path: list[Path]) -> None:
        self._path = python_path
        self._found: dict[str, _Found | None] = {}
        self._installed: dict[str, Path | None] = {}

    def find(self, name: str) -> _Found | None:
        """The module of that name, None if it is neither this project's nor the user's."""
        if name not in self._found:
            self._found[name] = self._look(name)
        return self._found[name]

    def allow_installed(self, name: str) -> None:
        """Take the installed package that holds `name` for user code, because a config names it."""
        top = name.partition(".")[0]
        if top in self._installed:
            return
        try:
            spec = importlib.util.find_spec(top)  # of a top-level name: executes nothing
        except (ImportError, ValueError):
            spec = None
        origin = Path(spec.origin) if spec is not None and spec.origin and spec.origin.endswith(".py") else None
        root = None if origin is None else origin.parent.parent if origin.name == "__init__.py" else origin.parent
        self._installed[top] = root
        self._found.clear()

    def _look(self, name: str) -> _Found | None:
        parts = name.split(".")
        roots = [_OWN_ROOT] if parts[0] == "stages" else list(self._path)
        if self._installed.get(parts[0]):
            roots.append(self._installed[parts[0]])  # type: ignore[arg-type]
        namespace = None
        for root in roots:
            base = root.joinpath(*parts)
            for file, package in ((base / "__init__.py", True), (base.with_name(parts[-1] + ".py"), False)):
                if file.is_file():
                    if root in self._path and parts[0] in sys.stdlib_module_names:
                        raise CodeError(
                            f"{file} has the name of a module of Python's own, which a stage may have imported "
                            "already and would run in its place; rename it"
                        )
                    return _Found(name, file, file.relative_to(root).as_posix(), package)
            if namespace is None and base.is_dir():
                namespace = _Found(name, None, base.relative_to(root).as_posix(), True)
        return namespace


def _closure(search: _Search, start: Iterable[str]) -> list[_Found]:
    """Every module with a file that is reached from `start`."""
    pending = list(start)
    seen: set[str] = set()
    files = []
    while pending:
        name = pending.pop()
        if name in seen or _LEFT_OUT.fullmatch(name):
            continue
        seen.add(name)
        parent = name.rpartition(".")[0]
        if parent:
            pending.append(parent)
        found = search.find(name)
        if found is not None and found.file is not None:
            files.append(found)
            pending.extend(_targets(search, found, _parse(found).imports))
    return files


@dataclass(frozen=True)
class _Import:
    """`import module` (names empty), or `from module import names` with `level` leading dots."""

    module: str
    level: int
    names: tuple[str, ...]


def _targets(search: _Search, importer: _Found, imports: Iterable[_Import]) -> Iterator[str]:
    """The module names that the imports of a module may load."""
    for item in imports:
        base = item.module
        if item.level:
            package = importer.name.split(".") if importer.package else importer.name.split(".")[:-1]
            kept = package[: len(package) - item.level + 1]
            if not kept:
                continue  # beyond the top: an ImportError when it runs
            base = ".".join([*kept, item.module] if item.module else kept)
        yield base
        found = search.find(base)
        if found is None or not found.package or _LEFT_OUT.fullmatch(base):
            continue
        names = item.names
        if "*" in names and found.file is not None:
            names = (*names, *_parse(found).exported)
        for name in names:
            if name != "*" and search.find(f"{base}.{name}") is not None:
                yield f"{base}.{name}"


@dataclass(frozen=True)
class _Module:
    """What is remembered of a parsed file."""

    sha256: str
    definitions: dict[str, str]
    imports: tuple[_Import, ...]
    exported: tuple[str, ...]  # a literal __all__
    names: frozenset[str]  # what the top level defines or imports by name; "*" where it cannot be told


_cache: dict[Path, tuple[tuple[int, int, int], _Module]] = {}
_cache_lock = threading.Lock()
_one_tree = threading.Lock()


def _parse(found: _Found) -> _Module:
    """Parse a file, once for as long as it stays the same.

    Raises:
        CodeError: it cannot be read or is not Python.
    """
    assert found.file is not None
    try:
        stat = found.file.stat()
        mark = (stat.st_size, stat.st_mtime_ns, stat.st_ino)
        with _cache_lock:
            known = _cache.get(found.file)
        if known is not None and known[0] == mark:
            return known[1]
        source = found.file.read_bytes()
    except OSError as error:
        raise CodeError(f"cannot read {found.file}: {explained(error)}") from error
    try:
        module = _summary(_tree(source))
    except SyntaxError as error:
        raise CodeError(f"{found.file}:{error.lineno or 1}: not valid Python: {error.msg}") from None
    except (ValueError, RecursionError) as error:  # null bytes, or nested beyond reason
        raise CodeError(f"{found.file}: not valid Python: {error}") from None
    # A file that changed just now may change again within one tick of its time stamp.
    if time.time_ns() - stat.st_mtime_ns > 100_000_000:
        with _cache_lock:
            _cache[found.file] = (mark, module)
    return module


def _tree(source: bytes) -> ast.Module:
    """`ast.parse`, in one thread at a time.

    Some releases of Python (3.11.7 is one) count the depth of the trees of all threads as one, and fail where the
    garbage collector lets another thread in between.
    """
    with _one_tree:
        return ast.parse(source)


def _summary(tree: ast.Module) -> _Module:
    definitions: dict[str, Any] = {}
    whole = hashlib.sha256()
    names: set[str] = set()
    exported: tuple[str, ...] = ()
    for statement in tree.body:
        if _is_bare_string(statement):
            continue
        pieces: list[str] = []
        _write(statement, pieces)
        text = "".join(pieces).encode("utf-8", "surrogatepass")
        whole.update(text)
        defined = _defined(statement)
        names.update(defined)
        for name in defined if not isinstance(statement, ast.Import | ast.ImportFrom) else [""]:
            definitions.setdefault(name, hashlib.sha256()).update(text)
        if not defined:
            definitions.setdefault("", hashlib.sha256()).update(text)
            names.update(_bound_inside(statement))
        if "__all__" in defined:
            exported = _literal_names(getattr(statement, "value", None))
    return _Module(
        sha256=whole.hexdigest(),
        definitions={name: digest.hexdigest() for name, digest in sorted(definitions.items())},
        imports=tuple(dict.fromkeys(_imports(tree))),
        exported=exported,
        names=frozenset(names),
    )


def _is_bare_string(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _write(node: Any, pieces: list[str]) -> None:
    """A syntax tree as text: names of nodes and of non-empty fields.

    Fields that are empty, or for readers only, do not show, so a Python version that adds a field gives the same text.
    """
    if isinstance(node, ast.AST):
        pieces.append(f"{type(node).__name__}(")
        for name in node._fields:
            value = getattr(node, name, None)
            if value is None or value == [] or name in _ONLY_FOR_READERS:
                if isinstance(node, ast.Constant) and name == "value":
                    pieces.append("None")  # here None is the value, not a missing field
                continue
            pieces.append(f"{name}=")
            _write(value, pieces)
        pieces.append(")")
    elif isinstance(node, list):
        kept = [item for item in node if not _is_bare_string(item)]
        pieces.append("[")
        for item in kept:
            _write(item, pieces)
            pieces.append(",")
        if node and not kept:
            pieces.append("Pass(),")  # a body of nothing but its docstring
        pieces.append("]")
    else:
        pieces.append(f"{type(node).__name__}:{node!a}")


def _defined(statement: ast.stmt) -> list[str]:
    """The names that a top-level statement defines."""
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [statement.name]
    if isinstance(statement, ast.Import | ast.ImportFrom):
        return [alias.asname or alias.name.partition(".")[0] for alias in statement.names]
    targets: list[ast.expr] = []
    if isinstance(statement, ast.Assign):
        targets = statement.targets
    elif isinstance(statement, ast.AnnAssign | ast.AugAssign):
        targets = [statement.target]
    elif type(statement).__name__ == "TypeAlias":  # Python 3.12
        targets = [statement.name]  # type: ignore[attr-defined]
    return [node.id for target in targets for node in ast.walk(target) if isinstance(node, ast.Name)]


def _bound_inside(statement: ast.stmt) -> Iterator[str]:
    """Names that may be bound within a compound top-level statement (if, try, with, for)."""
    for node in ast.walk(statement):
        if isinstance(node, ast.stmt) and node is not statement:
            yield from _defined(node)


def _literal_names(node: ast.AST | None) -> tuple[str, ...]:
    if not isinstance(node, ast.List | ast.Tuple):
        return ()
    values = [item.value for item in node.elts if isinstance(item, ast.Constant)]
    return tuple(value for value in values if isinstance(value, str))


def _imports(tree: ast.AST) -> Iterator[_Import]:
    """Every import in a module, also inside functions and with `importlib.import_module("literal")`."""
    pending: list[ast.AST] = [tree]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.If) and _is_type_checking(node.test):
            pending.extend(node.orelse)  # the other branch never runs
            continue
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield _Import(alias.name, 0, ())
        elif isinstance(node, ast.ImportFrom):
            yield _Import(node.module or "", node.level, tuple(alias.name for alias in node.names))
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            name = node.args[0].value
            if called in ("import_module", "__import__") and isinstance(name, str) and name:
                level = len(name) - len(name.lstrip("."))
                yield _Import(name.lstrip("."), level, ())
        pending.extend(ast.iter_child_nodes(node))


def _is_type_checking(test: ast.expr) -> bool:
    return getattr(test, "id", getattr(test, "attr", "")) == "TYPE_CHECKING"


def _check_function(search: _Search, reference: str) -> str:
    """The module of a `module:function` name, which must be there and define (or import) the function.

    Raises:
        CodeError: it is not.
    """
    module_name, _, function = reference.partition(":")
    found = search.find(module_name)
    if found is None:
        search.allow_installed(module_name)
        found = search.find(module_name)
    if found is None or found.file is None:
        raise CodeError(f"there is no module {module_name!r} for {reference!r} beside the recipe or installed")
    names = _parse(found).names
    if function not in names and "*" not in names and "__getattr__" not in names:
        near = difflib.get_close_matches(function, names, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise CodeError(f"{found.file} has no function {function!r}{hint}")
    return module_name
