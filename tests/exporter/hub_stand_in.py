"""A stand-in of the Hugging Face Hub's HTTP API on the loopback interface: the part an export talks to."""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class StandIn:
    """Repositories and their misfortunes; whatever ends in .safetensors lies in large-file storage."""

    repositories: dict[str, dict[str, bytes]]  # id -> file -> content
    served: dict[str, bytes] = field(default_factory=dict)  # file -> content that comes instead
    gated: bool = False
    cut_after: int | None = None  # position in a large file at which every connection breaks
    requests: list[tuple[str, str, str | None, str | None]] = field(default_factory=list)  # method, path, Range, token

    def downloads(self) -> dict[str, str | None]:
        """File -> Range asked for, of every download."""
        files = [(path, asked) for method, path, asked, _ in self.requests if method == "GET" and "/resolve/" in path]
        return {path.split("/", 5)[5]: asked for path, asked in files}

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        path = urlsplit(handler.path).path
        self.requests.append((handler.command, path, handler.headers["Range"], handler.headers["Authorization"]))
        parts = path.removeprefix("/api/models").split("/", 5)
        files = self.repositories.get("/".join(parts[1:3]))
        if files is None:
            _send(handler, 404, b"{}", {"X-Error-Code": "RepoNotFound"})
        elif len(parts) > 4 and parts[4] not in ("main", COMMIT):
            _send(handler, 404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        elif path.startswith("/api/models/"):
            _send(handler, 200, json.dumps(_listing("/".join(parts[1:3]), files)).encode(), {})
        elif self.gated:
            _send(handler, 403, b"{}", {"X-Error-Code": "GatedRepo", "X-Repo-Commit": COMMIT})
        else:
            self._send_file(handler, parts[5], self.served.get(parts[5], files[parts[5]]))

    def _send_file(self, handler: BaseHTTPRequestHandler, name: str, content: bytes) -> None:
        etag = hashlib.sha256(content).hexdigest()
        headers = {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT, "X-Linked-Size": str(len(content))}
        start, size = int((handler.headers["Range"] or "bytes=0-")[6:].split("-")[0]), len(content)
        if start:
            headers["Content-Range"] = f"bytes {start}-{size - 1}/{size}"
        cut = self.cut_after if name.endswith(".safetensors") and handler.command == "GET" else None
        handler.close_connection |= cut is not None
        if cut is None or start < cut:
            _send(handler, 206 if start else 200, content[start:], headers, cut and cut - start)


def _listing(name: str, files: dict[str, bytes]) -> dict[str, object]:
    siblings: list[dict[str, object]] = []
    for file, content in files.items():
        entry: dict[str, object] = {
            "rfilename": file,
            "size": len(content),
            "blobId": hashlib.sha1(content).hexdigest(),
        }
        if file.endswith(".safetensors"):
            entry["lfs"] = {"sha256": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 134}
        siblings.append(entry)
    return {"id": name, "sha": COMMIT, "siblings": siblings, "private": False, "tags": [], "downloads": 0}


def _send(
    handler: BaseHTTPRequestHandler, status: int, body: bytes, headers: dict[str, str], cut: int | None = None
) -> None:
    handler.send_response(status)
    for name, value in {"Content-Length": str(len(body)), **headers}.items():
        handler.send_header(name, value)
    handler.end_headers()
    if handler.command == "GET":
        handler.wfile.write(body[:cut])


@contextmanager
def serving(stand_in: StandIn) -> Iterator[str]:
    """Serve from a thread; lends the address for HF_ENDPOINT."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            stand_in.answer(self)

        def do_HEAD(self) -> None:
            stand_in.answer(self)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
