"""The sources of a stage, kept as an artifact of kind `code` beside what it computed.

A fingerprint says that code differs; the sources say how. They are kept when a result is written, and the result's
`code["artifact"]` names them. Sources that did not change are the same artifact, so a thousand results of one version
keep them once. Secrets in them are blanked like those in records (see `stages.artifacts.secrets`).
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path

from stages.artifacts.leases import gc_is_running
from stages.artifacts.manifest import FileEntry, Manifest, manifest_key, sha256_hex
from stages.artifacts.publish import publish
from stages.artifacts.secrets import redact
from stages.artifacts.store import NotInStore, Store


def keep_code(store: Store, sources: Mapping[str, bytes], scratch: Path | None = None) -> str:
    """Have a store hold the sources of a stage, and return the digest of the artifact that they are.

    Args:
        sources: path below its import root -> content of each file.
        scratch: a folder for temporary files; the system's when left out.

    Raises:
        ValueError: there is none, or a path is not allowed in an artifact.
        StoreError: the store cannot be written.
    """
    kept = {path: _without_secrets(data) for path, data in sources.items()}
    entries = tuple(FileEntry(path, len(data), sha256_hex(data)) for path, data in kept.items())
    manifest = Manifest("code", entries)
    try:
        # Its blobs are there as long as its manifest is, unless a gc is just removing both.
        if store.get(manifest_key(manifest.digest)) == manifest.to_json() and not gc_is_running(store):
            return manifest.digest
    except NotInStore:
        pass
    with tempfile.TemporaryDirectory(prefix="code-", dir=scratch) as name:
        for path, data in kept.items():
            file = Path(name) / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(data)
        return publish(store, Path(name), "code")


def _without_secrets(data: bytes) -> bytes:
    return redact(data.decode("utf-8", "surrogateescape")).encode("utf-8", "surrogateescape")
