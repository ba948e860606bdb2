"""Who may use the page: the name of the host in a request, the token, and headers that limit what a page may do."""

from __future__ import annotations

import hmac
import ipaddress
import socket
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qsl, urlencode

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

SECURITY_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a host."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


class Guard:
    """Checks every request before the application sees it.

    Another web site can make a browser send requests to a name of its own that resolves to this machine (DNS
    rebinding). So a request must name an address, `localhost`, this machine, or the host that the user chose.
    """

    def __init__(self, app: ASGIApp, host: str, token: str | None) -> None:
        self._app = app
        self._names = {"localhost", host.lower(), socket.gethostname().lower()}
        self._token = token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in SECURITY_HEADERS.items():
                    headers[name] = value
            await send(message)

        response = self._rejection(scope)
        await (response or self._app)(scope, receive, send_with_headers)

    def _rejection(self, scope: Scope) -> Response | None:
        """Return the response to a request that the application does not get; None if it gets it."""
        headers = Headers(scope=scope)
        if not self._is_known(headers.get("host", "")):
            return PlainTextResponse("The host of this request is not this server.", 421)
        if scope["method"] not in ("GET", "HEAD"):
            return PlainTextResponse("This server only reads.", 405, {"Allow": "GET, HEAD"})
        if self._token is None:
            return None
        query = parse_qsl(scope["query_string"].decode("latin-1"))
        given = [value for name, value in query if name == "token"]
        if given and self._is_token(given[0]):
            return self._sign_in(scope, [(name, value) for name, value in query if name != "token"])
        bearer = headers.get("authorization", "").removeprefix("Bearer ")
        if self._is_token(bearer) or self._is_token(_cookie(headers, self._cookie_name(scope))):
            return None
        return PlainTextResponse("Open the page with the address that 'shoal serve' printed: it has a token.", 401)

    def _sign_in(self, scope: Scope, query: list[tuple[str, str]]) -> Response:
        """Keep the token in a cookie, and remove it from the address."""
        path = "/" + scope["path"].lstrip("/")  # "//other.example" would lead to another host
        response = RedirectResponse(path + (f"?{urlencode(query)}" if query else ""), 303)
        assert self._token is not None
        name, secure = self._cookie_name(scope), scope["scheme"] == "https"
        response.set_cookie(name, self._token, httponly=True, samesite="strict", secure=secure)
        return response

    def _is_token(self, given: str) -> bool:
        assert self._token is not None
        return hmac.compare_digest(given.encode(), self._token.encode())

    def _is_known(self, host: str) -> bool:
        name = host.rsplit(":", 1)[0] if not host.endswith("]") else host
        try:
            ipaddress.ip_address(name.strip("[]"))
        except ValueError:
            return name.lower() in self._names
        return True

    @staticmethod
    def _cookie_name(scope: Scope) -> str:
        """Cookies are the same for all ports of a host, so the name has the port."""
        return f"shoal_{scope['server'][1] if scope.get('server') else 0}"


def _cookie(headers: Headers, name: str) -> str:
    try:
        found = SimpleCookie(headers.get("cookie", "")).get(name)
    except CookieError:
        return ""
    return "" if found is None else found.value
