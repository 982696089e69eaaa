"""What an S3 server says of an object, listed or asked for alone, and whether it is what was hashed."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from stages.artifacts.s3_transfer import Hashed


class Stored(NamedTuple):
    """What the server says of an object: its size in bytes, and its ETag or its SHA-256 checksum, "" where not told."""

    size: int
    etag: str = ""
    checksum: str = ""

    def differs(self, hashed: Hashed) -> bool:
        """Whether it is certainly another object than was hashed."""
        same_sort = self.checksum.partition("-")[2] == hashed.checksum.partition("-")[2]
        return self.size != hashed.size or bool(self.checksum and same_sort and self.checksum != hashed.checksum)


def of_head(head: dict[str, Any]) -> Stored:
    etag, checksum = str(head.get("ETag", "")).strip('"'), str(head.get("ChecksumSHA256", ""))
    return Stored(int(head["ContentLength"]), etag, checksum)


def has_another_md5(stored: Stored, md5: str) -> bool:
    """Whether an object was only listed, and its ETag looks like an MD5 but is not that of the bytes."""
    return stored.etag != md5 and not stored.checksum and re.fullmatch(r"[0-9a-f]{32}", stored.etag) is not None


def vouched_for(head: dict[str, Any], hashed: Hashed) -> bool:
    """Whether a stored object with a strange ETag is what was hashed: its checksum says so, or KMS made the ETag."""
    stored = of_head(head)
    return stored.checksum == hashed.checksum or "kms" in str(head.get("ServerSideEncryption", ""))
