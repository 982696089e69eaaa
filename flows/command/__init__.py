"""The verbs of the `headrace` command, which `flows.cli` dispatches to, and what they print."""
