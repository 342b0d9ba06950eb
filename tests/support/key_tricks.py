"""Ways to get past a check of keys, sent as raw bytes, because a well-behaved client would tidy them up."""

from __future__ import annotations

import socket
from contextlib import suppress
from urllib.parse import urlsplit

ANSWER_S = 30.0
MORE_S = 1.0
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "PROPFIND")
# Outside the OpenAPI page: its own pages, mounted applications, ours.
HIDDEN = ("/openapi.json", "/docs", "/docs/oauth2-redirect", "/redoc", "/metrics/", "/loopwright/sync", "/no-such-path", "/")
# Targets that some layer may take for /health and another for /pause.
TARGETS = (
    "//health/../pause", "/health/../pause", "/health/..%2fpause", "/health%2f..%2fpause", "/health/%2e%2e/pause",
    "/%70ause", "/pause/", "//pause", "/./pause", "/pause?x=/health", "/pause#/health", "/pause;/health", "/health;/../pause",
    "/HEALTH", "/health/", "/health//", "//health", "/health%00", "/health%20", "/health.json", "/health\\..\\pause",
    "http://127.0.0.1/pause", "http://127.0.0.1//health/../pause", "*",
)  # fmt: skip
# A key, but not as the one Authorization header that is wanted.
HEADERS = (
    "X-API-Key: {key}", "Api-Key: {key}", "Cookie: Authorization=Bearer {key}", "Proxy-Authorization: Bearer {key}",
    "Authorization: {key}", "Authorization: Basic {key}", "Authorization: Bearer", "Authorization: Bearer {key}x",
    "Authorization: Bearer x\r\nAuthorization: Bearer {key}", "Authorization: Bearer {key}\r\nAuthorization: Bearer {key}",
    "X-Original-URL: /health", "X-Rewrite-URL: /health", "X-Forwarded-Prefix: /health", "X-HTTP-Method-Override: GET",
    "Host: health", "Upgrade: h2c\r\nConnection: Upgrade, HTTP2-Settings\r\nHTTP2-Settings: AAMAAABk",
)  # fmt: skip


def raw(url: str, request: str) -> list[int]:
    """The status codes of the answers to these bytes; empty: the connection was closed without one."""
    parts = urlsplit(url)
    assert parts.hostname is not None and parts.port is not None
    with socket.create_connection((parts.hostname, parts.port), timeout=ANSWER_S) as connection:
        connection.sendall(request.encode("latin-1"))
        answer = b""
        # A connection that is kept open after an answer says nothing more.
        with suppress(TimeoutError, ConnectionError):
            while part := connection.recv(65536):
                answer += part
                connection.settimeout(MORE_S)
    return [int(line[9:12]) for line in answer.split(b"\r\n") if line.startswith(b"HTTP/1.")]


def ask(url: str, target: str, method: str = "POST", *headers: str) -> list[int]:
    lines = [f"{method} {target} HTTP/1.1", "Host: 127.0.0.1", "Content-Length: 0", "Connection: close", *headers]
    return raw(url, "\r\n".join(lines) + "\r\n\r\n")


def refused(statuses: list[int]) -> bool:
    """By the check (401), or by the HTTP parser before it (400, or no answer)."""
    return set(statuses) <= {400, 401}


def let_through(url: str, key: str, paths: list[str]) -> list[str]:
    """Everything tried that was not refused; the keyless health check aside."""
    found = []
    for path in paths:
        for method in METHODS:
            for headers in ((), ("Authorization: Bearer wrong",), (f"Authorization: Bearer {key[:-1]}",)):
                open_to_all = path == "/health" and method in ("GET", "HEAD")
                if not open_to_all and not refused(ask(url, path, method, *headers)):
                    found.append(f"{method} {path} {headers}")
    for target in TARGETS:
        found += [f"{method} {target}" for method in METHODS if not refused(ask(url, target, method))]
    for header in HEADERS:
        if not refused(ask(url, "/pause", "POST", header.format(key=key))):
            found.append(f"POST /pause with {header}")
    pause = "POST /pause HTTP/1.1\r\nHost: a\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
    if raw(url, f"GET /health HTTP/1.1\r\nHost: a\r\n\r\n{pause}")[1:] not in ([], [401]):
        found.append("POST /pause after GET /health on one connection")
    hiding = f"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n{pause}"
    if raw(url, f"GET /health HTTP/1.1\r\nHost: a\r\n{hiding}")[1:] not in ([], [400], [401]):
        found.append("POST /pause hidden in the body of GET /health")
    return found
