"""A web page of another site can't use the server, by whatever name it calls it."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
from starlette.datastructures import Headers
from starlette.testclient import TestClient

import modelyard
from modelyard.errors import ConfigError
from modelyard.serving.http.hosts import Hosts
from modelyard.serving.http.limits import RequestError
from serving_parts import service

LOCAL = Hosts("127.0.0.1", "127.0.0.1")
PROXIED = Hosts("127.0.0.1", "127.0.0.1", ["models.example.com"])
OPEN = Hosts("0.0.0.0", "0.0.0.0")
LIMITED = Hosts("0.0.0.0", "0.0.0.0", ["Models.example.com."])


def status(hosts: Hosts, host: str | None, origin: str | None = None) -> int:
    headers = {} if host is None else {"host": host}
    try:
        hosts.check(Headers(headers if origin is None else {**headers, "origin": origin}))
    except RequestError as error:
        return error.status
    return 200


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:8501", "127.0.0.1:8501", "[::1]:8501", "10.0.0.7", None])
def test_a_server_on_loopback_is_called_by_address_or_as_localhost(host: str | None) -> None:
    assert [status(each, host) for each in (LOCAL, PROXIED, OPEN, LIMITED)] == [200] * 4


@pytest.mark.parametrize(
    "host",
    [
        "evil.example", "evil.example:8501", "localhost.evil.example", "127.0.0.1.evil.example", "[::1].evil.example",
        "evil.example@127.0.0.1", "\x1b[2J", "models.example.org",
    ],
)  # fmt: skip
def test_a_name_that_was_pointed_here_is_refused(host: str) -> None:
    """The browser believes that the server is its page's own: DNS rebinding."""
    assert status(LOCAL, host) == status(PROXIED, host) == status(LIMITED, host) == 403
    assert status(LOCAL, host, f"http://{host}") == 403


def test_other_names_can_be_allowed() -> None:
    assert status(LOCAL, "models.example.com") == 403
    assert status(PROXIED, "models.example.com") == status(LIMITED, "MODELS.example.com:80") == 200
    assert status(Hosts("127.0.0.1", "127.0.0.1", ["*"]), "evil.example", "https://evil.example") == 200
    assert status(Hosts("box.lan", "127.0.1.1"), "box.lan:8501") == 200, "the name that was given to --host"


def test_a_server_for_other_machines_accepts_every_name_unless_some_are_allowed() -> None:
    assert status(OPEN, "box.lan") == 200
    assert (OPEN.accepts_all_names, LIMITED.accepts_all_names, LOCAL.accepts_all_names) == (True, False, False)


@pytest.mark.parametrize(
    ("origin", "expected"),
    [
        ("http://127.0.0.1:8501", 200), ("http://evil.example", 403), ("http://127.0.0.1:3000", 403), ("null", 403),
        ("http://[", 403), ("", 403), ("https://models.example.com", 403),
    ],
)  # fmt: skip
def test_pages_of_other_origins_are_refused(origin: str, expected: int) -> None:
    assert status(LOCAL, "127.0.0.1:8501", origin) == expected
    assert status(OPEN, "127.0.0.1:8501", origin) == expected


def test_the_page_works_behind_a_proxy_whose_name_is_allowed() -> None:
    assert status(PROXIED, "127.0.0.1:8501", "https://models.example.com") == 200
    assert status(PROXIED, "models.example.com", "https://models.example.com") == 200


def test_two_hosts_are_refused() -> None:
    with pytest.raises(RequestError) as refused:
        LOCAL.check(Headers(raw=[(b"host", b"localhost"), (b"host", b"evil.example")]))
    assert refused.value.status == 400


@pytest.fixture
def client() -> Iterator[TestClient]:
    made = service()
    made._hosts = LOCAL
    with TestClient(made.app(), base_url="http://localhost") as client:
        yield client


@pytest.mark.parametrize("path", ["/", "/about", "/healthz", "/metrics", "/openapi.json", "/v1/models/mine"])
def test_every_path_checks_it(client: TestClient, path: str) -> None:
    assert client.get(path).status_code == 200
    refused = client.get(path, headers={"host": "evil.example"})
    assert (refused.status_code, refused.headers["connection"]) == (403, "close")
    assert "--allowed_host evil.example" in refused.json()["error"]
    assert client.get(path, headers={"origin": "http://evil.example"}).status_code == 403


@pytest.mark.parametrize("name", ["http://x", "x:80", "10.0.0.1:80", "a/b", "a b", "\x1b"])
def test_an_allowed_host_is_a_name(name: str) -> None:
    with pytest.raises(ConfigError, match="without scheme and port"):
        modelyard.serve("nothing", allowed_host=name)


def test_a_path_in_the_log_is_quoted(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    made = service()
    monkeypatch.setattr(made, "_check_name", lambda found: 1 / 0)
    with TestClient(made.app(), raise_server_exceptions=False) as client, caplog.at_level(logging.ERROR):
        assert client.get("/v1/models/mine%1b[2J").status_code == 500
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == [
        "GET '/v1/models/mine\\x1b[2J' failed"
    ]
