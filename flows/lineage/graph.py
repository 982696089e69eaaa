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

from stages.artifacts import Damaged, FileEntry, NotInStore, Result, Store, read_manifest, results
from stages.contract import config_class


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
    """An artifact with everything it was made from. `nodes` is in the order of a walk from the root upwards."""

    root: str
    nodes: dict[str, Node]

    def sources(self) -> Iterator[Node]:
        """The imported artifacts at the ends of the graph."""
        return (node for node in self.nodes.values() if node.imported)

    def to_json(self) -> dict[str, Any]:
        """Everything as JSON-able values: nodes with their files, edges with the input's name."""
        return {
            "root": self.root,
            "nodes": [_node_json(node) for node in self.nodes.values()],
            "edges": [
                {"from": digest, "to": node.digest, "input": name}
                for node in self.nodes.values()
                for name, digest in node.inputs.items()
            ],
        }


def trace(store: Store, digest: str) -> Graph:
    """The graph of everything that `digest` was made from.

    Raises:
        ValueError: `digest` is not a full digest.
    """
    makers = _makers(store)
    nodes: dict[str, Node] = {}
    waiting = [digest]
    while waiting:
        current = waiting.pop(0)
        if current in nodes:
            continue
        nodes[current] = _node(store, current, makers.get(current, []))
        waiting.extend(nodes[current].inputs.values())
    return Graph(digest, nodes)


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
