"""The verb `browse`: opens a store and serves its pages until it is told to end.

Invariants:
- Loopback, unless another address is asked for; then the addresses and names that requests may be for must be given, or
  be that address.
- What is wrong (a store that cannot be read, a port in use) is said before anything is served.
"""

from __future__ import annotations

import contextlib
import errno
import socket
import sys
import webbrowser
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import typer
import uvicorn

from flows import figures
from flows.lineage.browser.app import create_app
from flows.lineage.browser.guard import LOOPBACK, is_loopback
from flows.lineage.browser.site import open_site
from flows.lineage.signature import signed_artifact
from stages.artifacts import StoreError

PORT = 4280


@dataclass(frozen=True)
class Address:
    """Where to serve.

    Attributes:
        host: address to bind to.
        port: 0 for any free one.
        root: path under which a proxy serves the pages, such as "/headrace"; "" for none.
        allowed: further host names that requests may be for, without ports.
    """

    host: str = "127.0.0.1"
    port: int = PORT
    root: str = ""
    allowed: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.root and (not self.root.startswith("/") or self.root.endswith("/") or "//" in self.root):
            raise StoreError(f"--root-path {self.root!r}: give a path such as /headrace, without a slash at its end")
        if any("/" in name or name == "*" or not name for name in self.allowed):
            raise StoreError("--allow-host takes a host name or an address, such as models.example.org")

    @property
    def hosts(self) -> tuple[str, ...]:
        """What a Host header may be, without its port."""
        own = f"[{self.host}]" if ":" in self.host else self.host
        return (*LOOPBACK, *(() if self.host in ("0.0.0.0", "::") else (own,)), *self.allowed)


def browse(
    store_url: str,
    address: Address,
    *,
    open_browser: bool = False,
    signed: Sequence[Path] = (),
    public_key: Path | None = None,
) -> None:
    """Serve the pages of a store until Ctrl-C or SIGTERM.

    Args:
        signed: folders that `attest --sign` signed; a check of an artifact compares the store with them.
        public_key: to check them by.

    Raises:
        StoreError: the store or a signed folder cannot be read, or the address not be bound.
    """
    if bool(signed) != (public_key is not None):
        raise StoreError("--signed DIR and --public-key FILE go together")
    for folder in signed:
        signed_artifact(folder)  # says what is wrong with it
    pairs = tuple((folder, public_key) for folder in signed if public_key is not None)
    listener = _bind(address)
    with listener:
        site = open_site(store_url, address.root, _say_progress, pairs)
        app = create_app(site, address.hosts)
        host, port = listener.getsockname()[:2]
        url = (
            f"http://{'localhost' if is_loopback(host) else f'[{host}]' if ':' in host else host}:{port}{address.root}/"
        )
        typer.echo(f"Pages of store {site.store.url}: {url}  (Ctrl-C ends)")
        if not is_loopback(host):
            names = (
                ", ".join(name for name in address.hosts if name not in LOOPBACK) or "no other name: see --allow-host"
            )
            typer.echo(
                f"Open to the network, without a log-in: whoever reaches {host} reads this store. Answers to {names}."
            )
        sys.stdout.flush()
        if open_browser:
            webbrowser.open(url)
        config = uvicorn.Config(
            app,
            log_level="warning",
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_graceful_shutdown=2,
        )
        with contextlib.suppress(KeyboardInterrupt):  # the end of serving, and no failure of it
            uvicorn.Server(config).run(sockets=[listener])


def _bind(address: Address) -> socket.socket:
    try:
        family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address.host, address.port))
        listener.listen(128)  # whoever comes before the index is made waits
        return listener
    except OSError as error:
        hint = "; give another --port, or 0 for any" if error.errno == errno.EADDRINUSE else ""
        raise StoreError(f"cannot serve on {address.host}:{address.port}: {error.strerror or error}{hint}") from None


def _say_progress(read: int) -> None:
    if sys.stderr.isatty():
        typer.echo(f"\rIndexing: {figures.count(read)} objects read", nl=False, err=True)


def address_of(host: str, port: int, root: str, allowed: Sequence[str]) -> Address:
    """What the options of the command say.

    Raises:
        StoreError: one of them is not usable.
    """
    return Address(host, port, root.rstrip("/") if root != "/" else "", tuple(allowed))
