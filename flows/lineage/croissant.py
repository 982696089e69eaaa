"""An artifact of data as a Croissant description, for catalogues and loaders of datasets.

Croissant (http://mlcommons.org/croissant/1.0) is JSON-LD over schema.org: the files of the artifact with their hashes,
and a record set for each Parquet table with its columns. Addresses of files are relative to the folder that `headrace
pull` makes, so the description lies in that folder. Packed rows are safetensors, which Croissant cannot read as
records; they are described as files.

What it says is what the manifest, `dataset.json` and the record say; a licence is nothing that Headrace knows, so
whoever publishes the data names it.
"""

from __future__ import annotations

import json
import re
from typing import Any

from flows import figures
from flows.lineage.graph import Graph, Node
from flows.lineage.records import read_bytes
from stages.artifacts import Damaged, FileEntry, NotInStore, Store, StoreError

CONFORMS_TO = "http://mlcommons.org/croissant/1.0"
DESCRIBED = ("dataset", "source", "rollouts", "logprobs", "origins")  # kinds that are data
_INFO_FILE = "dataset.json"
_HOLDS = {
    "text": "Packed rows of text for language modelling",
    "chat": "Packed rows of chats, with the mask of the tokens that the loss counts",
    "preference": "Pairs of a preferred and a rejected completion",
    "prompt": "Prompts to complete",
}
_FORMATS = {
    ".json": "application/json",
    ".jsonl": "application/jsonlines",
    ".parquet": "application/x-parquet",
    ".csv": "text/csv",
    ".md": "text/markdown",
    ".txt": "text/plain",
    ".jinja": "text/plain",
    ".py": "text/x-python",
    ".gz": "application/gzip",
}
_CONTEXT: dict[str, Any] = {
    "@language": "en",
    "@vocab": "https://schema.org/",
    "sc": "https://schema.org/",
    "cr": "http://mlcommons.org/croissant/",
    "rai": "http://mlcommons.org/croissant/RAI/",
    "dct": "http://purl.org/dc/terms/",
    "conformsTo": "dct:conformsTo",
    "data": {"@id": "cr:data", "@type": "@json"},
    "dataType": {"@id": "cr:dataType", "@type": "@vocab"},
    "examples": {"@id": "cr:examples", "@type": "@json"},
    **{
        name: f"cr:{name}"
        for name in (
            *(
                "citeAs",
                "column",
                "equivalentProperty",
                "extract",
                "field",
                "fileProperty",
                "fileObject",
                "fileSet",
                "format",
                "includes",
            ),
            *("isLiveDataset", "jsonPath", "key", "md5", "parentField", "path", "recordSet", "references", "regex"),
            *("repeated", "replace", "samplingRate", "separator", "source", "subField", "transform"),
        )
    },
}


def describe(store: Store, graph: Graph, *, license: str = "", url: str = "") -> dict[str, Any]:
    """The Croissant description of the root of a graph, as JSON-able values.

    Args:
        graph: the artifact with all that it was made from.
        license: of the data: an SPDX name or an address.
        url: the address where the data is published.

    Raises:
        StoreError: it is no artifact of data, or its manifest or a table cannot be read.
    """
    root = graph.nodes[graph.root]
    if root.problem:
        raise StoreError(f"artifact {graph.root}: {root.problem}")
    if root.kind not in DESCRIBED:
        kinds = figures.listed(list(DESCRIBED))
        raise StoreError(f"artifact {graph.root} is a {root.kind}; Croissant describes data ({kinds})")
    made = root.made_by
    described: dict[str, Any] = {
        "@context": _CONTEXT,
        "@type": "sc:Dataset",
        "name": re.sub(r"[^\w.-]+", "-", root.name, flags=re.ASCII) or "dataset",
        "description": _description(store, root),
        "conformsTo": CONFORMS_TO,
        "identifier": graph.root,
        **({"license": license} if license else {}),
        **({"url": url} if url else {}),
        **({"datePublished": made.finished} if made is not None else {}),  # into the store
        "distribution": [_file(entry) for entry in root.files],
    }
    based = [
        {"@type": "sc:CreativeWork", "name": entry.path, "identifier": f"sha256:{entry.sha256}"}
        for node in graph.sources()
        if node.digest != graph.root
        for entry in node.files
    ]
    if based:
        described["isBasedOn"] = based
    tables = [_records(store, entry) for entry in root.files if entry.path.endswith(".parquet")]
    if tables:
        described["recordSet"] = tables
    return described


def _description(store: Store, root: Node) -> str:
    parts = [f"{root.kind} of Headrace"]
    if root.made_by is not None:
        parts = [f"The {root.kind} that step {root.name} of run {root.made_by.run} gave"]
    if any(entry.path == _INFO_FILE for entry in root.files):
        try:
            info = json.loads(read_bytes(store, root.digest, _INFO_FILE))
            splits = [f"{name} {int(split['rows']):,} rows" for name, split in info["splits"].items()]
            parts += [_HOLDS.get(info["holds"], info["holds"]), ", ".join(splits)]
        except (NotInStore, Damaged) as error:
            raise StoreError(str(error)) from None
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise StoreError(f"{_INFO_FILE} of artifact {root.digest} describes no dataset: {error}") from None
    return ". ".join(parts) + "."


def _file(entry: FileEntry) -> dict[str, Any]:
    ending = re.search(r"\.[^./]+$", entry.path)
    return {
        "@type": "cr:FileObject",
        "@id": entry.path,
        "name": entry.path,
        "contentUrl": entry.path,
        "contentSize": f"{entry.size} B",
        "encodingFormat": _FORMATS.get(ending[0].lower() if ending else "", "application/octet-stream"),
        "sha256": entry.sha256,
    }


def _records(store: Store, entry: FileEntry) -> dict[str, Any]:
    """The record set of a Parquet table, a field for each column."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from flows.lineage.browser.pieces import open_file

    try:
        with open_file(store, entry) as file:
            schema = pq.read_schema(file)
    except (pa.ArrowException, OSError, Damaged) as error:
        raise StoreError(f"{entry.path} is not a Parquet file that can be read: {str(error)[:200]}") from None
    name = entry.path.removesuffix(".parquet")
    fields = []
    for column in schema:
        repeated = pa.types.is_list(column.type) or pa.types.is_large_list(column.type)
        fields.append(
            {
                "@type": "cr:Field",
                "@id": f"{name}/{column.name}",
                "name": column.name,
                "dataType": _data_type(column.type.value_type if repeated else column.type),
                **({"repeated": True} if repeated else {}),
                "source": {"fileObject": {"@id": entry.path}, "extract": {"column": column.name}},
            }
        )
    return {"@type": "cr:RecordSet", "@id": name, "name": name, "field": fields}


def _data_type(column: Any) -> str:
    import pyarrow as pa

    if pa.types.is_boolean(column):
        return "sc:Boolean"
    if pa.types.is_integer(column):
        return "sc:Integer"
    return "sc:Float" if pa.types.is_floating(column) else "sc:Text"
