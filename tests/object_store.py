"""A real S3 server on this machine, for tests: moto's, spoken to through s3fs like any other."""

from __future__ import annotations

import logging
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

BUCKET = "yard"


@contextmanager
def object_store() -> Iterator[dict[str, str]]:
    """A server with one empty bucket, on a port that the system gives; yields the environment to reach it."""
    server_module = pytest.importorskip("moto.server")
    s3fs = pytest.importorskip("s3fs")
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server: Any = server_module.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    environment = {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "testing",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }
    # What it holds outlives it, in this process: another module's objects must not be there.
    reset = urllib.request.Request(f"http://{host}:{port}/moto-api/reset", method="POST")
    urllib.request.build_opener(urllib.request.ProxyHandler({})).open(reset).close()
    with pytest.MonkeyPatch.context() as patch:
        _make_atomic(patch)
        for name, value in environment.items():
            patch.setenv(name, value)
        s3fs.S3FileSystem.clear_instance_cache()
        s3fs.S3FileSystem(use_listings_cache=False).mkdir(BUCKET)
        yield environment
        s3fs.S3FileSystem.clear_instance_cache()
    server.stop()


def _make_atomic(patch: pytest.MonkeyPatch) -> None:
    """Moto compares and writes in two steps, between which another thread may write. S3 does both in one."""
    from moto.s3.responses import S3Response

    guard = threading.RLock()

    def whole(change: Any) -> Any:
        def call(*arguments: Any) -> Any:
            with guard:
                return change(*arguments)

        return call

    for name in ("put_object", "delete_object"):
        patch.setattr(S3Response, name, whole(getattr(S3Response, name)))
