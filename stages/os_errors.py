"""What the operating system refuses, in words that say what to do about it.

Light: the store, the stage process and `flows` use it.
"""

from __future__ import annotations

import errno

_ADVICE = {
    errno.ENOSPC: "no space is left on the disk; free some, or choose a place on another disk",
    errno.EDQUOT: "the disk quota is used up; free some space, have the quota raised, or choose another place",
    errno.EROFS: "the file system is mounted read-only; mount it for writing, or choose another place",
    errno.EMFILE: "this process has too many files open; raise its limit (ulimit -n)",
    errno.ENFILE: "this machine has too many files open; raise its limit (sysctl fs.file-max), or end what holds them",
    errno.ENAMETOOLONG: "the name is too long for this file system; choose a shorter path",
    errno.EXDEV: "another file system is mounted inside that folder; put all of it on one, for files are renamed there",
    errno.EIO: "the disk, or the network to it, failed (input/output error); the system's log (dmesg) says more",
}


def explained(error: OSError) -> str:
    """The reason of an error, and what to do where that is not plain: the end of a sentence, without a full stop."""
    return _ADVICE.get(error.errno or 0) or error.strerror or str(error)
