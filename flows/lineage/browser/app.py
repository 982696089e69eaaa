"""The web application: one function for each address. What a page shows is worked out in the `*_pages` modules.

Invariants:
- Read-only: no address changes anything in the store.
- Addresses are stable, for other programs point to them: /artifact/sha256:…, /run/NAME, /ref/NAME, /file/SHA256.
- What cannot be shown is a page with one sentence that says why, with status 404 for what is not there and 503 for a
  store that cannot be read; a damaged file or record never brings down more than its own page.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, Any
from urllib.parse import quote

from fastapi import FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response, StreamingResponse
from fastapi.staticfiles import StaticFiles
from starlette.exceptions import HTTPException

from flows.lineage.browser import artifact_pages, checks, comparison, pieces, question_pages, run_pages
from flows.lineage.browser.guard import HEADERS, LOOPBACK, Guard
from flows.lineage.browser.rendering import HERE, environment
from flows.lineage.browser.site import NoPage, Site
from stages.artifacts import Damaged, FileEntry, Store, StoreError

Page = Annotated[int, Query(ge=0, le=10_000_000)]


def create_app(site: Site, hosts: Collection[str] = LOOPBACK) -> FastAPI:
    """The application that shows a store.

    Args:
        hosts: the names and addresses, without ports, that requests may be for.
    """
    templates = environment()
    app = FastAPI(title="Headrace", docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(Guard, hosts=hosts, root=site.links.root)
    app.mount("/static", StaticFiles(directory=HERE / "static"), name="static")
    common: dict[str, Any] = {
        "link": site.links,
        "site": site,
        "store": site.store.url,
        "version": _version(),
        "here": "",
        "running": False,
        "query": "",
    }

    def show(template: str, shown: dict[str, Any], status: int = 200) -> HTMLResponse:
        text = templates.get_template(template).render(common | shown)
        # A name of a store may hold half of a character pair, which UTF-8 cannot.
        return HTMLResponse(text.encode("utf-8", "replace"), status, {"Cache-Control": "no-store"})

    def refused(sentence: str, status: int) -> HTMLResponse:
        return show("error.html", {"title": "Nothing to show", "sentence": sentence, "status": status}, status)

    @app.exception_handler(NoPage)
    def no_page(request: Request, error: NoPage) -> HTMLResponse:
        return refused(str(error), 404)

    @app.exception_handler(StoreError)
    def store_error(request: Request, error: StoreError) -> HTMLResponse:
        return refused(f"{str(error).rstrip('.')}.", 500 if isinstance(error, Damaged) else 503)

    @app.exception_handler(HTTPException)
    def http_error(request: Request, error: HTTPException) -> Response:
        if error.status_code == 404:
            return refused("There is no page at this address.", 404)
        return refused(str(error.detail), error.status_code)

    @app.exception_handler(RequestValidationError)
    def bad_request(request: Request, error: RequestValidationError) -> HTMLResponse:
        return refused("The address has a page number or a place that is not a whole number from 0 on.", 400)

    @app.exception_handler(Exception)
    def defect(request: Request, error: Exception) -> PlainTextResponse:
        # This is outside of every middleware, so the headers are added here; the server's log has the whole error.
        told = "This page could not be made, and the server's output says why. `headrace verify` checks the store.\n"
        return PlainTextResponse(told, 500, HEADERS)

    @app.get("/")
    def home() -> HTMLResponse:
        return show("home.html", run_pages.home(site))

    @app.get("/runs")
    def runs(page: Page = 0, state: str = "", recipe: str = "") -> HTMLResponse:
        return show("runs.html", run_pages.runs(site, page, state or None, recipe or None))

    @app.get("/run/{name}")
    def run(name: str) -> HTMLResponse:
        return show("run.html", run_pages.run(site, name))

    @app.get("/run/{name}/log")
    def logs(name: str) -> HTMLResponse:
        return show("log.html", run_pages.logs(site, name))

    @app.get("/run/{name}/log/{step}")
    def log(name: str, step: str, at: Annotated[int | None, Query(ge=0)] = None) -> HTMLResponse:
        return show("log.html", run_pages.log(site, name, step, at))

    @app.get("/run/{name}/why/{step}")
    def why(name: str, step: str) -> HTMLResponse:
        return show("why.html", run_pages.why(site, name, step))

    @app.get("/artifacts")
    def artifacts(page: Page = 0, kind: str = "") -> HTMLResponse:
        return show("artifacts.html", artifact_pages.artifacts(site, page, kind or None))

    @app.get("/artifact/{digest}")
    def artifact(digest: str, files: Page = 0) -> Response:
        full = site.digest(digest)
        if full != digest:
            return RedirectResponse(site.links.artifact(full))
        return show("artifact.html", artifact_pages.artifact(site, digest, files))

    @app.get("/artifact/{digest}/lineage")
    def lineage(digest: str) -> HTMLResponse:
        return show("lineage.html", artifact_pages.lineage(site, digest))

    @app.get("/artifact/{digest}/children")
    def children(digest: str, page: Page = 0) -> HTMLResponse:
        return show("children.html", artifact_pages.children(site, digest, page))

    @app.get("/artifact/{digest}/step")
    def step(digest: str, step: Annotated[int, Query(ge=1)]) -> RedirectResponse:
        return RedirectResponse(site.links.artifact(digest, "step", step))

    @app.get("/artifact/{digest}/step/{number}")
    def trace(digest: str, number: int) -> HTMLResponse:
        return show("trace.html", artifact_pages.trace(site, digest, number))

    @app.get("/artifact/{digest}/check")
    def check(digest: str, ancestors: bool = False) -> HTMLResponse:
        return show("check.html", checks.check(site, digest, ancestors=ancestors))

    @app.get("/artifact/{digest}/rows")
    def rows(digest: str, split: str = "", page: Page = 0) -> HTMLResponse:
        return show("rows.html", artifact_pages.dataset_rows(site, digest, split, page))

    @app.get("/artifact/{digest}/file/{path:path}")
    def file(digest: str, path: str, at: Annotated[int, Query(ge=0)] = 0, page: Page = 0) -> HTMLResponse:
        return show("file.html", artifact_pages.file(site, digest, path, at, page))

    @app.get("/artifact/{digest}/raw/{path:path}")
    def raw(digest: str, path: str) -> Response:
        entry, is_picture = artifact_pages.raw(site, digest, path)
        return _raw(site.store, entry, is_picture)

    @app.get("/refs")
    def refs() -> HTMLResponse:
        return show("refs.html", question_pages.refs(site))

    @app.get("/ref/{name}")
    def ref(name: str, metric: str = "") -> HTMLResponse:
        return show("ref.html", question_pages.ref(site, name, metric or None))

    @app.get("/compare")
    def compare(a: str = "", b: str = "") -> HTMLResponse:
        return show("compare.html", comparison.compare(site, a.strip(), b.strip()))

    @app.get("/search")
    def search(q: str = "") -> HTMLResponse:
        return show("search.html", question_pages.search(site, q[:200]))

    @app.get("/file/{sha256}")
    def impact(sha256: str, page: Page = 0) -> HTMLResponse:
        return show("impact.html", question_pages.impact(site, sha256.removeprefix("sha256:"), page))

    @app.get("/room")
    def room() -> HTMLResponse:
        return show("room.html", question_pages.room(site))

    @app.get("/metric/{name:path}")
    def metric(name: str, page: Page = 0) -> HTMLResponse:
        return show("metric.html", question_pages.metric(site, name, page))

    return app


def _raw(store: Store, entry: FileEntry, is_picture: bool) -> Response:
    """A file as a download; a PNG, as a picture of a page. No browser takes it for a page of this server."""
    headers = {
        "Content-Length": str(entry.size),
        "Content-Security-Policy": "default-src 'none'; sandbox",
        "ETag": f'"{entry.sha256}"',
        "X-Checksum-Sha256": entry.sha256,
    }
    if is_picture:
        kind = "image/png"
    else:
        kind = "application/octet-stream"
        headers["Content-Disposition"] = f"attachment; filename*=UTF-8''{quote(entry.path.rpartition('/')[2], safe='')}"
    if (data := pieces.whole(store, entry)) is not None:
        return Response(data, headers=headers, media_type=kind)
    return StreamingResponse(_checked(store, entry), headers=headers, media_type=kind)


def _checked(store: Store, entry: FileEntry) -> Iterator[bytes]:
    """The bytes of a large file piece by piece; the last is held back until the hash of all is right, so that a damaged
    file is a download that breaks off."""
    digest, held = hashlib.sha256(), b""
    for start in range(0, entry.size, 1 << 20):
        data = pieces.read_range(store, entry, start, 1 << 20)
        digest.update(data)
        if held:
            yield held
        held = data
    if digest.hexdigest() != entry.sha256:
        raise Damaged(f"{entry.path} is damaged: its bytes ({entry.blob}) have another hash than its name")
    yield held


def _version() -> str:
    try:
        return f"Headrace {version('headrace')}"
    except PackageNotFoundError:
        return "Headrace"
