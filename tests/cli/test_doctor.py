"""`modelyard doctor` explains the part this process would take in a cluster."""

from __future__ import annotations

import json

import pytest

from modelyard.cli import doctor

TF_CONFIG = {
    "cluster": {"chief": ["a:1"], "worker": ["b:2", "c:3"], "ps": ["d:4"]},
    "task": {"type": "worker", "index": 1},
    "model_dir": "/runs/one",
    "environment": "cloud",
}


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rest of the examination asks TensorFlow, in a process of its own."""
    monkeypatch.setattr(doctor, "_ask_tensorflow", lambda: {"cuda": None, "cudnn": None, "gpus": []})
    monkeypatch.setattr(doctor, "gpus", list)
    for name in ("TF_CONFIG", "SLURM_STEP_ID", "JOB_COMPLETION_INDEX"):
        monkeypatch.delenv(name, raising=False)


def checks(capsys: pytest.CaptureFixture[str]) -> list[dict[str, object]]:
    doctor.run(as_json=True)
    found: list[dict[str, object]] = json.loads(capsys.readouterr().out)
    return [check for check in found if str(check["check"]).startswith("cluster")]


def test_a_process_alone_is_said_to_be_alone(capsys: pytest.CaptureFixture[str]) -> None:
    (check,) = checks(capsys)
    assert str(check["result"]).startswith("alone")
    assert check["ok"] is None


def test_role_address_and_the_others_are_explained(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TF_CONFIG", json.dumps(TF_CONFIG))
    found = [(check["check"], check["result"]) for check in checks(capsys)]
    assert found == [
        ("cluster", "worker 1, parameter servers: trains at its own pace (from TF_CONFIG)"),
        ("cluster role", "worker"),
        ("cluster index", "1"),
        ("cluster mode", "parameter servers"),
        ("cluster address", "c:3"),
        ("cluster member", "chief at a:1, the lead"),
        ("cluster member", "worker-0 at b:2"),
        ("cluster member", "ps-0 at d:4"),
        ("cluster model_dir", "/runs/one"),
        ("cluster environment", "cloud"),
    ]
    doctor.run(as_json=False)
    assert "chief at a:1, the lead" in capsys.readouterr().out


def test_everything_wrong_with_tf_config_is_shown(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = {"cluster": {"worker": ["b"], "boss": ["a:1"]}, "task": {"type": "worker", "index": 7}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(wrong))
    with pytest.raises(SystemExit) as caught:
        doctor.run(as_json=True)
    assert caught.value.code == 1
    problems = [check for check in json.loads(capsys.readouterr().out) if check["check"] == "cluster"]
    assert len(problems) >= 3
    assert all(problem["ok"] is False and problem["result"].startswith("TF_CONFIG: ") for problem in problems)
