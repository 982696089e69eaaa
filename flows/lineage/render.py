"""A lineage graph as text: a tree for terminals, and Mermaid for pages.

Both show an artifact that is used several times once with what it was made from; later uses refer back to it.
"""

from __future__ import annotations

from flows import figures
from flows.lineage.graph import Graph, Node

FILES_SHOWN = 3


def tree(graph: Graph, *, all_files: bool = False) -> str:
    """The graph from its root up to source files and generators, one line an artifact.

    Args:
        all_files: list every source file; else the first few and how many there are.
    """
    lines: list[str] = []
    seen: set[str] = set()

    def walk(label: str, digest: str, first: str, rest: str) -> None:
        node = graph.nodes[digest]
        lines.append(f"{first}{label}{_line(node)}")
        if digest in seen:
            lines[-1] += "  (see above)" if node.inputs or node.generators else ""
            return
        seen.add(digest)
        children = [("text", text) for text in _leaves(node, all_files)]
        children = [("input", name) for name in node.inputs] + children
        for index, (what, text) in enumerate(children):
            last = index == len(children) - 1
            branch, below = ("└─ ", "   ") if last else ("├─ ", "│  ")
            if what == "input":
                walk(f"{text}: ", node.inputs[text], rest + branch, rest + below)
            else:
                lines.append(f"{rest}{branch}{text}")

    walk("", graph.root, "", "")
    return "\n".join(lines)


def tree_down(graph: Graph) -> str:
    """What was made from the root, one line an artifact, below what it was made from; the input's name stands first."""
    made: dict[str, list[tuple[str, str]]] = {}
    for read, result, name in graph.edges():
        if (result, name) not in made.setdefault(read, []):
            made[read].append((result, name))
    lines = [_line(graph.nodes[graph.root])]
    seen = {graph.root}

    def walk(digest: str, rest: str) -> None:
        below = sorted(made.get(digest, []), key=lambda pair: _when(graph.nodes[pair[0]]))
        for number, (result, name) in enumerate(below):
            branch, deeper = ("└─ ", "   ") if number == len(below) - 1 else ("├─ ", "│  ")
            again = result in seen
            lines.append(f"{rest}{branch}{name} of {_line(graph.nodes[result])}")
            if again:
                lines[-1] += "  (see above)" if result in made else ""
                continue
            seen.add(result)
            walk(result, rest + deeper)

    walk(graph.root, "")
    if graph.more:
        lines.append(f"… and {figures.count(graph.more)} older artifacts (all with --limit)")
    return "\n".join(lines)


def _when(node: Node) -> str:
    return node.made_by.finished if node.made_by is not None else ""


def _line(node: Node) -> str:
    parts = [node.name, node.kind, figures.short(node.digest)]
    made = node.made_by
    if made is not None:
        parts.append(f"stage {made.stage}, run {made.run}, {made.finished[:16].replace('T', ' ')}")
        if made.accepted_from:
            parts.append("(kept by --accept-code)")
    if node.problem:
        parts.append(f"({node.problem})")
    return "  ".join(filter(None, parts))


def _leaves(node: Node, all_files: bool) -> list[str]:
    leaves = [f"code {path}" for path in node.generators]
    if node.imported and node.files:
        names = [entry.path for entry in node.files]
        if all_files:
            leaves += [f"{entry.path}  {figures.size(entry.size)}  sha256:{entry.sha256}" for entry in node.files]
        else:
            leaves.append(_files(names, node.size))
    return leaves


def _files(names: list[str], size: int) -> str:
    shown = ", ".join(names[:FILES_SHOWN]) + (", …" if len(names) > FILES_SHOWN else "")
    return f"{figures.count(len(names))} {'file' if len(names) == 1 else 'files'}, {figures.size(size)}: {shown}"


def mermaid(graph: Graph) -> str:
    """The graph as a Mermaid flowchart, sources at the top: one box an artifact, one arrow an input.

    Text of users (step and file names) is escaped, so that no name can add to the drawing.
    """
    ids = {digest: f"a{index}" for index, digest in enumerate(graph.nodes)}
    lines = ["flowchart TD"]
    for digest, node in graph.nodes.items():
        box = ids[digest]
        if node.made_by is None:
            detail = _files([entry.path for entry in node.files], node.size) if node.files else node.problem
            lines.append(f'    {box}[("{_escape(node.kind or "imported")}<br/>{_escape(detail)}")]')
        else:
            lines.append(f'    {box}["{_escape(node.name)}<br/>{_escape(node.kind)} {figures.short(digest)}"]')
        for index, path in enumerate(node.generators):
            lines.append(f'    {box}g{index}{{{{"{_escape(path)}"}}}} --> {box}')
    for needed, digest, name in graph.edges():
        lines.append(f'    {ids[needed]} -- "{_escape(name)}" --> {ids[digest]}')
    lines.append(f"    style {ids[graph.root]} stroke-width:3px")
    return "\n".join(lines)


def _escape(text: str) -> str:
    """Text inside a quoted Mermaid label: only letters, digits and plain signs stand for themselves."""
    return "".join(char if char.isalnum() or char in " .,:_-/+@…" else f"#{ord(char)};" for char in text)
