"""Where the `headrace` command starts: `flows.cli`, with Ctrl-C quiet from the first moment on.

Importing the command takes some tenths of a second. Whoever presses Ctrl-C in them wants an end, not a traceback; and
nothing that would have to be saved has begun.
"""

from __future__ import annotations

import os
import signal

INTERRUPTED = 130


def main() -> None:
    """Import the command and run it. Ctrl-C before it runs ends the process at once, with exit code 130."""
    before = signal.getsignal(signal.SIGINT)  # a shell has it ignored for what runs in the background
    if before is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, lambda number, frame: os._exit(INTERRUPTED))
    from flows.cli import main as run

    signal.signal(signal.SIGINT, before)
    run()


if __name__ == "__main__":
    main()
