"""What stands before every page: which hosts it answers to, and what a browser may do with it.

The pages have no log-in. On the loopback address they are for whoever is on this machine, and a page of the web that
had its name resolve to that address (DNS rebinding) must not read them with the visitor's browser: so a request whose
Host header is none of the names that were allowed is refused. Nothing from elsewhere is ever loaded, and no script or
style but the two files of this package runs, whatever text of the store a page shows.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Collection

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

LOOPBACK = ("localhost", "127.0.0.1", "[::1]")
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; style-src 'self'; script-src 'self'; img-src 'self'; connect-src 'self'; "
        "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}


class Guard:
    """ASGI middleware: refuses foreign Host headers and what other sites load, and adds `HEADERS` to every answer.

    Args:
        hosts: names and addresses, without ports, that requests may be for.
        root: path that a proxy serves the pages under, which it may take away before it passes a request on, or leave.
    """

    def __init__(self, app: ASGIApp, hosts: Collection[str], root: str = "") -> None:
        self.app = app
        self.root = root
        self.hosts = frozenset(host.lower() for host in hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        asked = Headers(scope=scope)
        host = host_of(asked.get("host", ""))
        if host not in self.hosts:
            named = f"These pages do not answer to the host name {host[:100]!r}."
            refusal = PlainTextResponse(f"{named} Name it with --allow-host if it is yours.\n", 400)
        elif asked.get("sec-fetch-site") == "cross-site" and asked.get("sec-fetch-mode") != "navigate":
            refusal = PlainTextResponse("A page of another site may link to these pages, not load from them.\n", 403)
        else:
            await self.app({**scope, "root_path": self.root}, receive, guarded)
            return
        await refusal(scope, receive, guarded)


def host_of(header: str) -> str:
    """The host of a Host header, in lower case and without its port; "" where it is none."""
    match = re.fullmatch(r"(\[[0-9A-Fa-f:.]+\]|[^:/@\s]+)(?::\d{1,5})?", header.strip())
    return match[1].lower() if match else ""


def is_loopback(address: str) -> bool:
    """Whether only this machine can reach an address that a server is bound to."""
    try:
        return ipaddress.ip_address(address.strip("[]")).is_loopback
    except ValueError:
        return address.lower() == "localhost"
