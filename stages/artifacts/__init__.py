"""Content-hashed artifacts in an object store: publish, fetch, verify; results, runs, and saved progress.

The format of a store is specified in docs/artifacts.md.
"""

from stages.artifacts.cache import open_cache
from stages.artifacts.code import keep_code
from stages.artifacts.fetch import fetch, has_blobs, is_complete, pull, read_manifest, resolve_digest
from stages.artifacts.folder import FolderStore
from stages.artifacts.gc import Collection, Garbage, collect
from stages.artifacts.hash_cache import HashCache
from stages.artifacts.leases import Lease, LeaseLost, LeaseRecord, acquire, leases, read_lease
from stages.artifacts.manifest import FileEntry, Manifest, canonical_json, check_digest, check_path
from stages.artifacts.nights import SEEN, Night, Nights, read_nights, write_night
from stages.artifacts.objects import DataObject, find_objects, size_of
from stages.artifacts.patience import stop_waiting, wait_for_stores
from stages.artifacts.publish import files_below, import_files, manifest_of, publish
from stages.artifacts.reach import ancestors
from stages.artifacts.refs import NO_REFERENCE, Move, Ref, check_ref_name, promote, read_ref, ref_names, refs, rollback
from stages.artifacts.repair import FilesAtHand, is_about_manifest, repair
from stages.artifacts.results import Result, parse_result, read_result, result_key, results, write_result
from stages.artifacts.runs import LogTail, append_log, list_runs, log_key, read_log, read_run, run_names, write_run
from stages.artifacts.secrets import find_secret, redact, redact_event
from stages.artifacts.store import (
    Damaged,
    FullStore,
    NotInStore,
    ObjectInfo,
    ReadOnlyStore,
    Store,
    StoreError,
    hash_file,
    open_store,
)
from stages.artifacts.usage import Share, Usage, usage
from stages.artifacts.verify import Damage, verify_all, verify_artifact, verify_artifacts
from stages.artifacts.work import WorkArea

__all__ = [
    "NO_REFERENCE",
    "SEEN",
    "Collection",
    "Damage",
    "Damaged",
    "DataObject",
    "FileEntry",
    "FilesAtHand",
    "FolderStore",
    "FullStore",
    "Garbage",
    "HashCache",
    "Lease",
    "LeaseLost",
    "LeaseRecord",
    "LogTail",
    "Manifest",
    "Move",
    "Night",
    "Nights",
    "NotInStore",
    "ObjectInfo",
    "ReadOnlyStore",
    "Ref",
    "Result",
    "Share",
    "Store",
    "StoreError",
    "Usage",
    "WorkArea",
    "acquire",
    "ancestors",
    "append_log",
    "canonical_json",
    "check_digest",
    "check_path",
    "check_ref_name",
    "collect",
    "fetch",
    "files_below",
    "find_objects",
    "find_secret",
    "has_blobs",
    "hash_file",
    "import_files",
    "is_about_manifest",
    "is_complete",
    "keep_code",
    "leases",
    "list_runs",
    "log_key",
    "manifest_of",
    "open_cache",
    "open_store",
    "parse_result",
    "promote",
    "publish",
    "pull",
    "read_lease",
    "read_log",
    "read_manifest",
    "read_nights",
    "read_ref",
    "read_result",
    "read_run",
    "redact",
    "redact_event",
    "ref_names",
    "refs",
    "repair",
    "resolve_digest",
    "result_key",
    "results",
    "rollback",
    "run_names",
    "size_of",
    "stop_waiting",
    "usage",
    "verify_all",
    "verify_artifact",
    "verify_artifacts",
    "wait_for_stores",
    "write_night",
    "write_result",
    "write_run",
]
