"""A small Google Cloud Storage server, for tests: the part of the JSON API that gcsfs uses, with preconditions.

The emulators that can be installed as packages ignore ``ifGenerationMatch``, and locks depend on it. Every request is
handled whole before the next, as Google promises for one object. Only gcsfs speaks to it; the real service was not
tried.
"""

from __future__ import annotations

import hashlib
import importlib
import itertools
import json
import re
import threading
from base64 import b64encode
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

import pytest

from waiting import PATIENCE

BUCKET = "yard"
_OBJECT = re.compile(r"(?:/download)?/storage/v1/b/([^/]+)/o/(.+)")
_LIST = re.compile(r"/storage/v1/b/([^/]+)/o")
_BUCKET = re.compile(r"/storage/v1/b/([^/]+)")
_UPLOAD = re.compile(r"/upload/storage/v1/b/([^/]+)/o")


class GoogleServer(ThreadingHTTPServer):
    """Objects in memory."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.objects: dict[tuple[str, str], tuple[bytes, int]] = {}
        self.sessions: dict[str, tuple[str, str, str | None, bytearray]] = {}
        self.generations = itertools.count(1_700_000_000_000_000)
        self.guard = threading.Lock()

    @property
    def url(self) -> str:
        """Its address."""
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # headers and body together: two packets would wait for each other
    server: GoogleServer

    def log_message(self, *_: Any) -> None:
        """Prints nothing."""

    def do_GET(self) -> None:
        path, query, _ = self._request()
        with self.server.guard:
            if match := _OBJECT.fullmatch(path):
                key = (match[1], unquote(match[2]))
                found = self.server.objects.get(key)
                if found is None:
                    self._fail(404)
                elif path.startswith("/download") or query.get("alt") == "media":
                    self._answer(200, found[0], {"X-Goog-Generation": str(found[1]), **_hashes(found[0])})
                else:
                    self._json(_described(key, found))
            elif (match := _LIST.fullmatch(path)) and match[1] == BUCKET:
                self._json(self._listed(match[1], query))
            elif (match := _BUCKET.fullmatch(path)) and match[1] == BUCKET:
                self._json({"kind": "storage#bucket", "name": match[1]})
            else:
                self._fail(404)

    def do_POST(self) -> None:
        path, query, body = self._request()
        match = _UPLOAD.fullmatch(path)
        with self.server.guard:
            if match is None or match[1] != BUCKET:
                self._fail(404)
            elif "upload_id" in query:
                self._continue(query["upload_id"], body)
            elif query.get("uploadType") == "resumable":
                number = str(next(self.server.generations))
                self.server.sessions[number] = (match[1], query["name"], query.get("ifGenerationMatch"), bytearray())
                self._answer(200, b"", {"Location": f"{self.server.url}{path}?upload_id={number}"})
            elif query.get("uploadType") == "multipart":
                boundary = b"--" + re.findall(r'boundary="?([^";]+)', self.headers["Content-Type"])[0].encode()
                _, described, rest = body.split(boundary, 2)
                name = json.loads(described.strip().partition(b"\n\n")[2])["name"]
                content = rest[: rest.rindex(b"\n" + boundary)].partition(b"\n\n")[2]
                self._store((match[1], name), content, query.get("ifGenerationMatch"))
            else:
                self._store((match[1], query["name"]), body, query.get("ifGenerationMatch"))

    def do_DELETE(self) -> None:
        path, query, _ = self._request()
        match = _OBJECT.fullmatch(path)
        with self.server.guard:
            key = (match[1], unquote(match[2])) if match else ("", "")
            if key not in self.server.objects:
                self._fail(404)
            elif not self._matches(key, query.get("ifGenerationMatch")):
                self._fail(412)
            else:
                del self.server.objects[key]
                self._answer(204, b"", {})

    def _continue(self, number: str, body: bytes) -> None:
        bucket, name, condition, content = self.server.sessions[number]
        content += body
        total = self.headers.get("Content-Range", "").rpartition("/")[2]
        if total.isdecimal() and len(content) < int(total):
            self._answer(308, b"", {"Range": f"bytes=0-{len(content) - 1}"})
        else:
            self._store((bucket, name), bytes(content), condition)

    def _store(self, key: tuple[str, str], content: bytes, condition: str | None) -> None:
        if not self._matches(key, condition):
            self._fail(412)
            return
        self.server.objects[key] = content, next(self.server.generations)
        self._json(_described(key, self.server.objects[key]))

    def _matches(self, key: tuple[str, str], condition: str | None) -> bool:
        """Whether the object is of the generation that the request asks for; 0 if it must not exist."""
        return condition is None or int(condition) == self.server.objects.get(key, (b"", 0))[1]

    def _listed(self, bucket: str, query: dict[str, str]) -> dict[str, Any]:
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        items, folders = [], set()
        for key, found in sorted(self.server.objects.items()):
            if key[0] != bucket or not key[1].startswith(prefix):
                continue
            rest = key[1][len(prefix) :]
            if delimiter and delimiter in rest:
                folders.add(prefix + rest.partition(delimiter)[0] + delimiter)
            else:
                items.append(_described(key, found))
        return {"kind": "storage#objects", "items": items, "prefixes": sorted(folders)}

    def _request(self) -> tuple[str, dict[str, str], bytes]:
        parts = urlsplit(self.path)
        if self.headers.get("Transfer-Encoding", "").lower() == "chunked":
            body = b"".join(iter(self._chunk, b""))
        else:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        return parts.path, dict(parse_qsl(parts.query)), body

    def _chunk(self) -> bytes:
        data = self.rfile.read(int(self.rfile.readline(), 16))
        self.rfile.readline()
        return data

    def _json(self, value: dict[str, Any]) -> None:
        self._answer(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _fail(self, status: int) -> None:
        self._answer(status, json.dumps({"error": {"code": status, "message": str(status)}}).encode(), {})

    def _answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        if status != 204:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def _described(key: tuple[str, str], found: tuple[bytes, int]) -> dict[str, Any]:
    data, generation = found
    return {
        "kind": "storage#object",
        "bucket": key[0],
        "name": key[1],
        "size": str(len(data)),
        "generation": str(generation),
        "metageneration": "1",
        "etag": f"g{generation}",
        "md5Hash": b64encode(hashlib.md5(data).digest()).decode(),
        "updated": "2026-01-01T00:00:00.000Z",
        "timeCreated": "2026-01-01T00:00:00.000Z",
    }


def _hashes(data: bytes) -> dict[str, str]:
    return {"X-Goog-Hash": f"md5={b64encode(hashlib.md5(data).digest()).decode()}"}


@contextmanager
def google_store() -> Iterator[GoogleServer]:
    """A server with one empty bucket, on a port that the system gives; gcsfs reaches it through the environment."""
    with pytest.MonkeyPatch.context() as patch:
        # Else it asks another service about the bucket, which is not here.
        patch.setenv("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
        gcsfs = pytest.importorskip("gcsfs")
        patch.setenv("FSSPEC_GCS_TOKEN", "anon")  # for other processes; fsspec has read the environment of this one
        patch.setitem(importlib.import_module("fsspec.config").conf, "gcs", {"token": "anon"})
        server = GoogleServer()
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        patch.setenv("STORAGE_EMULATOR_HOST", server.url)
        gcsfs.GCSFileSystem.clear_instance_cache()
        try:
            yield server
        finally:
            gcsfs.GCSFileSystem.clear_instance_cache()
            server.shutdown()
            server.server_close()
            thread.join(PATIENCE)
