"""Benchmarks: each module runs alone (`python -m tests.benchmarks.NAME [--quick]`), and `python -m tests.benchmarks`
runs them all and writes docs/benchmarks.md.

A benchmark checks equal results before it times anything, alternates what it compares, and prints as its last line one
JSON object: `{"benchmark": NAME, "ratios": {...}, "goals": {...}, "machine": {...}}`. A goal is `[">=", number]` or
`["<=", number]`. Modules whose name starts with an underscore are parts of others. What would clash with our pins lives
in a virtual environment of its own.
"""
