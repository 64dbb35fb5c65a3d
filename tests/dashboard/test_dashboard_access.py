"""Who may see and change something: the token, Host, Origin; and texts of strangers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from starlette.testclient import TestClient
from written_runs import BASE, CHANGE, TOKEN, id_of, opened, rows_of, running, write_run

ACTIONS = ("stop", "resume", "delete", "note")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    top = tmp_path_factory.mktemp("runs")
    write_run(top / "one", step=5)
    (top / "search").mkdir()
    (top / "search" / "matrix.yaml").write_text("matrix_version: 1\ncells: {}\n")
    (top / "search" / "leaderboard.html").write_text("<script>alert(1)</script>")
    return top


@pytest.fixture
def client(runs: Path) -> object:
    with opened(runs) as made:
        yield made


def test_nothing_is_seen_without_the_token(runs: Path, client: TestClient) -> None:
    one = id_of(client, "one")
    group = client.get("/api/runs").json()["groups"][0]["id"]
    client.cookies.clear()
    paths = ["/api/runs", f"/api/runs/{one}", f"/api/runs/{one}/log", f"/api/curves?run={one}&metric=train+loss"]
    for path in [*paths, f"/files/{group}/leaderboard.html"]:
        answer = client.get(path)
        assert answer.status_code == 401, path
        assert "one" not in answer.json()["error"].split()
    page = client.get("/")
    assert page.status_code == 401
    assert "main.js" not in page.text
    assert client.get("/", params={"token": "wrong"}).status_code == 401
    assert client.get("/", params={"token": "wröng"}).status_code == 401
    client.cookies.set("modelyard-dashboard-8600", "guess")
    assert client.get("/api/runs").status_code == 401


def test_the_cookie_is_not_the_token_and_no_script_reads_it(runs: Path, client: TestClient) -> None:
    client.cookies.clear()
    cookie = client.get("/", params={"token": TOKEN}).headers["set-cookie"]
    assert TOKEN not in cookie
    assert "HttpOnly" in cookie
    assert "SameSite=strict" in cookie
    assert TOKEN not in client.get("/").text


@pytest.mark.parametrize("action", ACTIONS)
def test_changes_need_the_token_in_a_header(runs: Path, client: TestClient, action: str) -> None:
    path = f"/api/runs/{id_of(client, 'one')}/{action}"
    assert client.post(path, json={}).status_code == 403, "the cookie alone"
    assert client.post(path, json={}, headers={"X-Modelyard-Token": "wrong"}).status_code == 403
    assert client.post(path, data={"token": TOKEN}).status_code == 403, "a form of another page"
    assert client.get(path, headers=CHANGE).status_code == 405, "an image of another page"
    assert (runs / "one" / "config.yaml").exists()
    assert not (runs / "training_log.md").exists()


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "evil.example"},
        {"Host": "evil.example:8600"},
        {"Host": "127.0.0.1.evil.example"},
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://127.0.0.1:9999"},
    ],
)
def test_other_hosts_and_pages_of_other_sites_are_refused_also_with_the_token(
    runs: Path, client: TestClient, headers: dict[str, str]
) -> None:
    one = id_of(client, "one")
    for action in ACTIONS:
        answer = client.post(f"/api/runs/{one}/{action}", json={}, headers={**CHANGE, **headers})
        assert answer.status_code == 403, headers
    assert client.get("/api/runs", headers=headers).status_code == 403
    assert client.get("/", params={"token": TOKEN}, headers=headers).status_code == 403
    assert (runs / "one" / "config.yaml").exists()
    assert (
        client.get("/api/runs", headers={"Host": "localhost:8600", "Origin": "http://localhost:8600"}).status_code
        == 200
    )


def test_ids_that_are_not_known_and_paths_do_nothing(runs: Path, client: TestClient, tmp_path: Path) -> None:
    outside = write_run(tmp_path / "outside")
    strange = ["0" * 16, "..", "%2e%2e", "..%2f..%2fetc", str(outside).replace("/", "%2f"), "one", "%00", "ü"]
    for name in strange:
        for path in (f"/api/runs/{name}", f"/api/runs/{name}/log", f"/files/{name}/leaderboard.html"):
            assert client.get(path).status_code in (401, 404), path
        for kind in ("runs", "groups", "bin", "x"):
            for action in (*ACTIONS, "restore", "x"):
                assert client.post(f"/api/{kind}/{name}/{action}", json={}, headers=CHANGE).status_code in (404, 405)
        assert client.get("/api/curves", params={"run": name, "metric": "train loss"}).json() == {}
    group = client.get("/api/runs").json()["groups"][0]["id"]
    for name in ("matrix.yaml", "../one/config.yaml", "..%2fone%2fconfig.yaml", "report.html"):
        assert client.get(f"/files/{group}/{name}").status_code == 404
    for name in ("../app.py", "..%2fapp.py", "/etc/passwd", "vendor/../../app.py", "__init__.py"):
        assert client.get(f"/page/{name}").status_code == 404
    assert (outside / "config.yaml").exists()


@pytest.mark.parametrize("query", ["since=-1", "since=1e9", "since=" + "9" * 400, "since=x"])
def test_a_malformed_number_is_the_clients_mistake(runs: Path, client: TestClient, query: str) -> None:
    assert client.get(f"/api/runs?{query}").status_code == 400


@pytest.mark.parametrize("body", [b"[" * 50_000, b"7", b"{", b"\xff", b'{"text": [1], "kind": {}}'])
def test_a_malformed_request_is_the_clients_mistake(runs: Path, client: TestClient, body: bytes) -> None:
    answer = client.post(f"/api/runs/{id_of(client, 'one')}/note", content=body, headers=CHANGE)
    assert answer.status_code in (400, 409)
    assert (
        client.post(f"/api/runs/{id_of(client, 'one')}/note", content=b" " * 70_000, headers=CHANGE).status_code == 413
    )


def test_the_policy_lets_nothing_run_but_the_pages_own_files(runs: Path, client: TestClient) -> None:
    page = client.get("/")
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "script-src 'self';" in policy
    assert "unsafe" not in policy
    assert "frame-ancestors 'none'" in policy
    assert page.headers["x-content-type-options"] == "nosniff"
    for inline in ("<style", "style=", "onclick", "javascript:"):
        assert inline not in page.text
    for name in ("main.js", "dom.js", "run.js", "table.js", "curves.js", "compare.js"):
        text = client.get(f"/page/{name}").text
        for markup in (
            "innerHTML",
            "outerHTML",
            "insertAdjacentHTML",
            "document.write",
            "eval(",
            'setAttribute("style',
        ):
            assert markup not in text, name
    group = client.get("/api/runs").json()["groups"][0]["id"]
    stranger = client.get(f"/files/{group}/leaderboard.html")
    assert stranger.headers["content-security-policy"].startswith("sandbox;")
    assert "script-src" not in stranger.headers["content-security-policy"]


def test_texts_of_strangers_are_json_and_never_markup(tmp_path: Path) -> None:
    bad = "<script>alert(1)</script>"
    path = write_run(tmp_path / "runs" / "<img src=x onerror=alert(1)>", model=bad, hypothesis=bad)
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["dataset"]["classes"] = [bad] * 300
    (path / "manifest.json").write_text(json.dumps(manifest))
    (tmp_path / "runs" / "training_log.md").write_text(f"\n**Note of {path.name}**, 2026-01-01 00:00:00:\n\n> {bad}\n")
    with opened(tmp_path / "runs") as client:
        row = rows_of(client)[path.name]
        assert row["options"]["model"] == bad
        answer = client.get(f"/api/runs/{row['id']}")
        assert answer.headers["content-type"] == "application/json"
        assert answer.json()["classes"] == [bad] * 200
        assert answer.json()["class_count"] == 300
        assert answer.json()["notes"][0]["text"] == bad


def test_long_texts_and_logs_are_cut(tmp_path: Path) -> None:
    path = write_run(tmp_path / "runs" / "one", hypothesis="x" * 500_000)
    (path / "runlogs" / "chief.log").write_text("y" * 3_000_000)
    with opened(tmp_path / "runs") as client:
        row = rows_of(client)["one"]
        assert len(row["options"]["hypothesis"]) < 500
        assert len(client.get(f"/api/runs/{row['id']}").json()["options"]["hypothesis"]) == 100_000
        log = client.get(f"/api/runs/{row['id']}/log").json()
        assert len(log["text"]) == 100_000
        with open(path / "runlogs" / "chief.log", "a") as file:
            file.write("new")
        more = client.get(f"/api/runs/{row['id']}/log", params={"after": log["end"]}).json()
        assert more == {"text": "new", "start": 3_000_000, "end": 3_000_003}


def test_a_running_run_can_not_be_deleted_by_whoever_has_the_token(tmp_path: Path) -> None:
    path = write_run(tmp_path / "runs" / "one")
    with opened(tmp_path / "runs") as client, running(path):
        answer = client.post(f"/api/runs/{id_of(client, 'one')}/delete", headers=CHANGE)
        assert answer.status_code == 409
        assert "running" in answer.json()["error"]
        assert (path / "config.yaml").exists()
    assert BASE.startswith("http://127.0.0.1")
