"""Many small objects at once, by a client of compiled code (`obstore`, the Rust crate object_store).

botocore takes 2 ms of one core to put or get an object, which for 20,000 small files is nearly all of the time; this
client takes a sixth of that. It does nothing but whole puts and gets of blobs, which can be repeated at will and are
known by their hash. The model: it never decides anything. Whatever it cannot do, for whatever reason, it says so, and
the caller does it with botocore, which waits for a busy server, knows every setting, and says what is wrong.

Invariants:
- It talks to the same address, as the same user, as the botocore client that it stands in for.
- What it puts carries its SHA-256, which the server checks, and is hashed before it is sent.
- A process that was forked from one that has used it does not use it: its threads are the parent's.
"""

from __future__ import annotations

import hashlib
import os
import re
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import botocore.session

from stages.artifacts.s3_client import CONNECT_SECONDS, READ_SECONDS

_FAILURES = 3  # then the others go by botocore, which waits as long as a busy server needs
_PLAIN = re.compile(r"[A-Za-z0-9_./-]*")  # names that no client has to encode
_LIFE = timedelta(minutes=10)  # for which credentials that botocore gives out are good
_first_process: int | None = None


def open_bulk(session: botocore.session.Session, address: str, region: str, prefix: str) -> BulkClient | None:
    """A client for the objects below a prefix of a bucket; None where botocore alone knows how to reach them.

    Args:
        session: of botocore, whose credentials are used.
        address: URL of the bucket, whether its name is in the host's or in the path, as botocore asks it.
        prefix: "" or with "/" at its end.
    """
    global _first_process
    _first_process = _first_process or os.getpid()
    secure = address.startswith("https://")
    if _first_process != os.getpid() or not _PLAIN.fullmatch(prefix):
        return None
    if secure and session.get_config_variable("ca_bundle"):  # it trusts what the system trusts
        return None
    try:
        import obstore
        from obstore.store import S3Store as Objects
    except ImportError:  # there is not a package for every system
        return None
    store = Objects(
        "bucket",  # of no meaning: it is in the address
        prefix=prefix or None,
        config={"aws_endpoint_url_s3": address},  # the one name that no variable of the environment overrides
        virtual_hosted_style_request=True,  # so it takes the address as it is
        region=region,
        checksum_algorithm="sha256",
        unsigned_payload=True,  # as botocore is told: the signed SHA-256 of what is stored vouches for it
        skip_signature=False,
        credential_provider=lambda: _credentials(session),
        client_options={
            "allow_http": not secure,
            "connect_timeout": f"{CONNECT_SECONDS} s",
            "timeout": f"{READ_SECONDS} s",
        },
        retry_config={"max_retries": 0},
    )
    url = obstore.sign(store, "GET", "-", timedelta(minutes=1)).partition("?")[0]
    return BulkClient(store) if url == f"{address}/{prefix}-" else None


def _credentials(session: botocore.session.Session) -> Any:
    frozen = session.get_credentials().get_frozen_credentials()  # they are there: botocore has used them
    expires = datetime.now(UTC) + _LIFE if frozen.token else None
    found = {"access_key_id": frozen.access_key, "secret_access_key": frozen.secret_key, "expires_at": expires}
    return found | ({"token": frozen.token} if frozen.token else {})


class BulkClient:
    """Puts and gets whole objects. Safe for many threads.

    Args:
        store: of obstore.
    """

    def __init__(self, store: Any) -> None:
        self._store = store
        self._failures = 0

    def put(self, key: str, path: Path, sha256: bytes) -> bool:
        """Store a file that has this SHA-256. False where that is to be done otherwise."""
        if self._failures >= _FAILURES:
            return False
        import obstore

        try:
            data = path.read_bytes()
            if hashlib.sha256(data).digest() != sha256:
                return False
            obstore.put(self._store, key, data, use_multipart=False)
        except Exception:  # whatever it is: botocore does it again, and says it
            self._failures += 1
            return False
        return True

    def get(self, key: str, size: int) -> bytes | None:
        """The bytes of an object of this size; None where it is to be got otherwise."""
        if self._failures >= _FAILURES or not _PLAIN.fullmatch(key):
            return None
        import obstore

        try:
            answer = obstore.get(self._store, key)
            if answer.meta["size"] != size:
                return None
            return bytes(answer.bytes())
        except FileNotFoundError:
            return None
        except Exception:  # as above
            self._failures += 1
            return None
