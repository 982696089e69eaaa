"""`python -m flows.lineage.browser` is `headrace browse`."""

import sys

from flows.cli import main

sys.argv[:] = [sys.argv[0], "browse", *sys.argv[1:]]
main()
