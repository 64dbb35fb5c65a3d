"""Where the secret of a cluster comes from, and when there must be one."""

from __future__ import annotations

from pathlib import Path

import pytest

from modelyard.cluster.description import Cluster, Member
from modelyard.cluster.secret import SECRET, SECRET_FILE, find_secret, new_secret
from modelyard.errors import ConfigError

WORD = "0123456789abcdef"


def cluster(*addresses: str) -> Cluster:
    return Cluster(Member("worker", 0), {"worker": addresses}, "TF_CONFIG")


LOCAL, REMOTE = cluster("127.0.0.1:1", "localhost:2", "[::1]:3"), cluster("127.0.0.1:1", "10.0.0.7:2")


def test_a_secret_comes_from_a_variable_or_a_file(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text(f"{WORD}\n")
    for where in (LOCAL, REMOTE):
        assert find_secret(where, False, {SECRET: f" {WORD} "}) == WORD.encode()
        assert find_secret(where, False, {SECRET_FILE: str(file), SECRET: ""}) == WORD.encode()
        assert find_secret(where, False, {SECRET: "x" * 20, SECRET_FILE: "/nowhere"}) == b"x" * 20
        assert find_secret(where, True, {SECRET: WORD}) == WORD.encode()  # used, if there is one


def test_only_a_cluster_on_loopback_does_without() -> None:
    assert find_secret(LOCAL, False, {}) == b""
    assert find_secret(REMOTE, True, {}) == b""
    with pytest.raises(ConfigError) as caught:
        find_secret(REMOTE, False, {})
    for words in ("environment: MODELYARD_CLUSTER_SECRET: is not set", "openssl rand -hex 32", "--insecure_cluster"):
        assert words in str(caught.value)
    assert caught.value.status == 2


@pytest.mark.parametrize("host", ["0.0.0.0", "127.example.com", "localhost.example.com", "10.0.0.1", "[fe80::1]", "::"])
def test_other_addresses_are_not_loopback(host: str) -> None:
    assert not cluster("127.0.0.1:1", f"{host}:2").is_local


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "localhost", "LOCALHOST.", "[::1]", "[::ffff:127.0.0.1]"])
def test_addresses_on_loopback(host: str) -> None:
    assert cluster(f"{host}:2").is_local


def test_a_cluster_without_addresses_is_not_local() -> None:
    assert not Cluster().is_local


@pytest.mark.parametrize(
    ("content", "words"),
    [(None, "can't be read"), ("", "is empty"), ("short", "has 5 characters"), ("x" * 9999, "more than 4096")],
)
def test_a_file_that_is_no_secret_is_an_error(tmp_path: Path, content: str | None, words: str) -> None:
    file = tmp_path / "secret"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ConfigError, match=words) as caught:
        find_secret(LOCAL, True, {SECRET_FILE: str(file)})
    assert SECRET_FILE in str(caught.value)


def test_new_secrets_are_long_and_differ() -> None:
    assert len({new_secret() for _ in range(10)}) == 10
    assert find_secret(REMOTE, False, {SECRET: new_secret()})
