"""The lineage browser: pages that show a store's runs, artifacts and references, to walk from any model to its data.

The model: an application (`app`) over a `Site`: a store, its index, and the addresses of pages. Each address calls one
function of a `*_pages` module, which reads the store and gives what its template shows. Pictures (`layout`, `drawing`)
and charts (`charts`) are SVG made here, so that every page reads without scripts.

Invariants:
- Read-only, and open to this machine alone unless asked otherwise (`guard`, `serve`).
- No text of a store is ever markup (`rendering`); no path of a visitor ever reaches the store (`pieces`).
- A page reads a bounded amount, whatever the size of the store or of a file.
"""
