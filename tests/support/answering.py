"""HTTP servers that give one answer to everything, for what no real service would say on request."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, HTTPServer


@contextmanager
def answering(status: int, body: bytes = b"{}", kind: str = "application/json", key: str | None = None) -> Iterator[str]:
    """Its URL; with `key` it answers so to that Authorization header only, else 401."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self.send_response(status if key in (None, self.headers.get("Authorization")) else 401)
            self.send_header("Content-Type", kind)
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_POST

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


@contextmanager
def dripping(begins: bytes) -> Iterator[str]:
    """The URL of one whose answer begins so and goes on byte by byte, for ever."""
    over = threading.Event()
    connections: list[socket.socket] = []

    def answer(connection: socket.socket) -> None:
        with suppress(OSError):
            connection.recv(65536)
            connection.sendall(begins)
            while not over.wait(0.02):
                connection.sendall(b" ")

    def listen() -> None:
        with suppress(OSError):
            while True:
                connection, _ = listener.accept()
                connections.append(connection)
                threading.Thread(target=answer, args=(connection,), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=listen, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            over.set()
            listener.shutdown(socket.SHUT_RDWR)
            for connection in connections:
                connection.close()
