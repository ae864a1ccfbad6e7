"""A server on loopback that speaks OpenAI's protocol and answers from a script."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

Reply = dict[str, Any] | bytes | None  # an object, raw bytes, or None: the connection is dropped


class Request(NamedTuple):
    number: int  # of this request, from 0
    path: str
    body: dict[str, Any]
    headers: dict[str, str]

    @property
    def said(self) -> str:
        """The last message."""
        return str(self.body["messages"][-1]["content"])


class ChatServer(ThreadingHTTPServer):
    """`behave` gets each request and gives (status, reply) or (status, reply, headers)."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, behave: Callable[[Request], tuple[Any, ...]]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.behave = behave
        self.requests: list[Request] = []
        self.guard = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that was killed is no error here."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: ChatServer

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.guard:
            request = Request(len(self.server.requests), self.path, body, dict(self.headers))
            self.server.requests.append(request)
        status, reply, *more = self.server.behave(request)
        if reply is None:
            self.close_connection = True
            return
        data = reply if isinstance(reply, bytes) else json.dumps(reply).encode()
        self.send_response(status)
        for name, value in (more[0] if more else {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet."""


def chat_reply(text: str, *, finish: str = "stop", tokens: int = 3, **message: Any) -> dict[str, Any]:
    """A chat completion."""
    message = {"role": "assistant", "content": text, **message}
    return {
        "choices": [{"index": 0, "message": message, "finish_reason": finish}],
        "usage": {"completion_tokens": tokens},
    }


@contextmanager
def serving(behave: Callable[[Request], tuple[Any, ...]]) -> Iterator[ChatServer]:
    server = ChatServer(behave)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
