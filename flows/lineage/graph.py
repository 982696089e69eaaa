"""The ancestry of an artifact, read from the results and manifests of a store.

The model: a node is an artifact; its edges are the inputs of the result that made it. An artifact that no result made
was imported, and its files are the data itself. Where several results made the same bytes, the newest tells the story
and the others are listed beside it.

Invariants:
- Nothing is guessed: every edge is in a stored result, every file in a stored manifest.
- What is missing from the store is a node that says so, never a silent end of a branch.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from flows.lineage import queries, records
from flows.lineage.index import Index
from stages.artifacts import Damaged, FileEntry, NotInStore, Result, Store, read_manifest, results
from stages.contract import config_class

MOST = 500  # artifacts of a graph downwards, unless more are asked for


@dataclass(frozen=True)
class Node:
    """One artifact and how it was made.

    Attributes:
        digest: of the artifact.
        kind: of its manifest; "" where the manifest is not in the store.
        files: of its manifest.
        size: bytes of all files.
        problem: why its manifest cannot be read; "" when all is well.
        made_by: the newest result that gave it, None for imported data.
        output: the name of the side output that it is; "" for a main artifact.
        inputs: input name -> digest of the artifact that was read, as the result says.
        generators: every `module:function` of the user that the result's configuration names (generators, rewards).
        also: (stage, key) of other results that gave the same bytes.
    """

    digest: str
    kind: str = ""
    files: tuple[FileEntry, ...] = ()
    size: int = 0
    problem: str = ""
    made_by: Result | None = None
    output: str = ""
    inputs: dict[str, str] = field(default_factory=dict)
    generators: tuple[str, ...] = ()
    also: tuple[tuple[str, str], ...] = ()

    @property
    def imported(self) -> bool:
        """Whether it was brought into the store from outside, so that its files are the data itself."""
        return self.made_by is None or self.made_by.stage in ("hf", "import")

    @property
    def name(self) -> str:
        """The step's name (with its side output), or "imported"."""
        if self.made_by is None:
            return "imported"
        return f"{self.made_by.step}/{self.output}" if self.output else self.made_by.step


@dataclass(frozen=True)
class Graph:
    """An artifact with everything it was made from, or all that was made from it.

    Attributes:
        nodes: in the order of a walk from the root.
        down: whether it is what was made from the root.
        more: how many artifacts were left out, for there are too many.
    """

    root: str
    nodes: dict[str, Node]
    down: bool = False
    more: int = 0

    def edges(self) -> Iterator[tuple[str, str, str]]:
        """(digest read, digest made, input) for each input of a node that is a node itself."""
        for node in self.nodes.values():
            for name, digest in node.inputs.items():
                if digest in self.nodes:
                    yield digest, node.digest, name

    def sources(self) -> Iterator[Node]:
        """The imported artifacts at the ends of the graph."""
        return (node for node in self.nodes.values() if node.imported)

    def to_json(self) -> dict[str, Any]:
        """Everything as JSON-able values: nodes with their files, edges with the input's name."""
        return {
            "root": self.root,
            "direction": "down" if self.down else "up",
            "nodes": [_node_json(node) for node in self.nodes.values()],
            "edges": [{"from": read, "to": made, "input": name} for read, made, name in self.edges()],
            "left_out": self.more,
        }


def trace(store: Store, digest: str, index: Index | None = None) -> Graph:
    """The graph of everything that `digest` was made from.

    Args:
        index: of the store, to find the results by; without one all of them are read.

    Raises:
        ValueError: `digest` is not a full digest.
    """
    makers = _makers(store) if index is None else _Makers(index)
    nodes: dict[str, Node] = {}
    waiting = [digest]
    while waiting:
        current = waiting.pop(0)
        if current in nodes:
            continue
        nodes[current] = _node(store, current, makers.get(current, []))
        waiting.extend(nodes[current].inputs.values())
    return Graph(digest, nodes)


def descend(index: Index, digest: str, limit: int = MOST) -> Graph:
    """The graph of what was made from `digest`, over all steps: the newest `limit` artifacts of it."""
    made = queries.made_from(index, artifact=digest, limit=limit)
    kept = [digest, *(artifact.digest for artifact in made.artifacts)]
    makers = _Makers(index)
    nodes = {found: _node(index.store, found, makers.get(found, [])) for found in kept}
    return Graph(digest, nodes, down=True, more=made.total - len(made.artifacts))


class _Makers:
    """`_makers` by an index, for one artifact at a time."""

    def __init__(self, index: Index) -> None:
        self._index = index
        self._known: dict[str, Result] = {}

    def get(self, digest: str, default: list[tuple[Result, str]]) -> list[tuple[Result, str]]:
        return records.makers(self._index, digest, self._known) or default


def _makers(store: Store) -> dict[str, list[tuple[Result, str]]]:
    """Artifact digest -> the results that gave it, newest first, each with the name of the side output.

    Results that a forced run has replaced count too: what they gave may still be named, used and asked about.
    """
    makers: dict[str, list[tuple[Result, str]]] = {}
    for result in results(store):
        older = [
            Result.model_validate({name: value for name, value in entry.items() if name != "same_bytes"})
            for entry in reversed(result.history)
        ]
        for made in (result, *older):
            for output, digest in {"": made.artifact, **made.outputs}.items():
                makers.setdefault(digest, []).append((made, output))
    return makers


def _node(store: Store, digest: str, makers: list[tuple[Result, str]]) -> Node:
    kind, size, problem = "", 0, ""
    files: tuple[FileEntry, ...] = ()
    try:
        manifest = read_manifest(store, digest)
        kind, files, size = manifest.kind, manifest.files, manifest.size
    except NotInStore:
        problem = "not in this store"
    except Damaged as error:
        problem = str(error)
    if not makers:
        return Node(digest, kind, files, size, problem)
    result, output = makers[0]
    return Node(
        digest,
        kind,
        files,
        size,
        problem,
        result,
        output,
        dict(result.inputs),
        tuple(user_code(result)),
        tuple((other.stage, other.key) for other, _ in makers[1:]),
    )


def user_code(result: Result) -> list[str]:
    """Every `module:function` that a result's configuration names.

    A stage whose package is not importable any more is read by the form of its settings: a string "module:function".
    """
    try:
        return config_class(result.stage).model_validate(result.config).user_code()
    except Exception:  # the stage of an old result may be gone, changed, or fail to import: its record still stands
        return sorted(set(_import_paths(result.config)))


def _import_paths(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for item in value.values():
            yield from _import_paths(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _import_paths(item)
    elif isinstance(value, str) and re.fullmatch(r"[A-Za-z_]\w*(\.\w+)*:[A-Za-z_]\w*", value):
        yield value


def _node_json(node: Node) -> dict[str, Any]:
    made = node.made_by
    result = None
    if made is not None:
        result = {
            "step": made.step,
            "stage": made.stage,
            "output": node.output,
            "key": made.key,
            "run": made.run,
            "finished": made.finished,
            "seconds": made.seconds,
            "config": made.config,
            "metrics": made.metrics,
            "code": made.code,
            "environment": made.environment,
            "accepted_from": made.accepted_from,
        }
    return {
        "artifact": node.digest,
        "kind": node.kind,
        "size": node.size,
        "problem": node.problem,
        "files": [{"path": entry.path, "size": entry.size, "sha256": entry.sha256} for entry in node.files],
        "inputs": node.inputs,
        "generators": list(node.generators),
        "made_by": result,
        "also_made_by": [{"stage": stage, "key": key} for stage, key in node.also],
    }
