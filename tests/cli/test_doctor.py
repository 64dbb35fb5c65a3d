"""`modelyard doctor` says what each engine sees, and the part this process would take in a cluster."""

from __future__ import annotations

import json

import pytest

from modelyard.cli import doctor

doctor_asks = doctor._ask

TF_CONFIG = {
    "cluster": {"chief": ["a:1"], "worker": ["b:2", "c:3"], "ps": ["d:4"]},
    "task": {"type": "worker", "index": 1},
    "model_dir": "/runs/one",
    "environment": "cloud",
}


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rest of the examination asks TensorFlow and JAX, in processes of their own."""
    monkeypatch.setattr(doctor, "_ask", lambda code: {"version": "1.2.3", "devices": []})
    monkeypatch.setattr("modelyard.system.machine.gpus", list)
    for name in ("TF_CONFIG", "SLURM_STEP_ID", "JOB_COMPLETION_INDEX", "MODELYARD_CLUSTER_SECRET"):
        monkeypatch.delenv(name, raising=False)


def checks(capsys: pytest.CaptureFixture[str]) -> list[dict[str, object]]:
    doctor.doctor(json=True)
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
    monkeypatch.setenv("MODELYARD_CLUSTER_SECRET", "nobody may see this")
    found = [(check["check"], check["result"]) for check in checks(capsys)]
    assert found == [
        ("cluster", "worker 1, parameter servers: trains at its own pace (from TF_CONFIG)"),
        ("cluster role", "worker"),
        ("cluster index", "1"),
        ("cluster mode", "parameter servers"),
        ("cluster address", "c:3"),
        ("cluster member", "chief at a:1, the coordinator"),
        ("cluster member", "worker-0 at b:2"),
        ("cluster member", "ps-0 at d:4"),
        ("cluster secret", "given"),
        ("cluster model_dir", "/runs/one"),
        ("cluster environment", "cloud"),
    ]
    doctor.doctor()
    shown = capsys.readouterr().out
    assert "chief at a:1, the coordinator" in shown
    assert "nobody may see this" not in shown


def test_a_secret_that_is_missing_is_a_problem(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TF_CONFIG", json.dumps(TF_CONFIG))
    with pytest.raises(SystemExit):
        doctor.doctor(json=True)
    assert "openssl rand -hex 32" in capsys.readouterr().out


def test_everything_wrong_with_tf_config_is_shown(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = {"cluster": {"worker": ["b"], "boss": ["a:1"]}, "task": {"type": "worker", "index": 7}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(wrong))
    with pytest.raises(SystemExit) as caught:
        doctor.doctor(json=True)
    assert caught.value.code == 1
    problems = [check for check in json.loads(capsys.readouterr().out) if check["check"] == "cluster"]
    assert len(problems) >= 3
    assert all(problem["ok"] is False and problem["result"].startswith("TF_CONFIG: ") for problem in problems)


H200 = "NVIDIA H200, 143771 MiB, 570.00"


def engines(monkeypatch: pytest.MonkeyPatch, chosen: str, **seen: dict[str, object]) -> dict[str, tuple[str, object]]:
    monkeypatch.setattr("modelyard.system.machine.gpus", lambda: [H200])
    monkeypatch.setattr("modelyard.config.backend.choose_engine", lambda name: (chosen, "auto: JAX sees NVIDIA H200"))
    monkeypatch.setattr(doctor, "_ask", lambda code: next(seen[n] for n in seen if f"import json, {n}" in code))
    monkeypatch.setattr("modelyard.config.backend.is_installed", lambda name: name in seen)
    return {name: (result, ok) for name, result, ok in doctor.examine()}


def test_both_engines_say_what_they_see(monkeypatch: pytest.MonkeyPatch) -> None:
    found = engines(
        monkeypatch,
        "jax",
        jax={"version": "0.10.2", "devices": ["NVIDIA H200"]},
        tensorflow={"version": "2.21.0", "devices": [], "built": "; no CUDA"},
    )
    assert found["engine"] == ("jax (auto: JAX sees NVIDIA H200)", True)
    assert found["jax"] == ("0.10.2 sees NVIDIA H200", True)
    text, ok = found["tensorflow"]
    assert text.startswith("2.21.0 sees no accelerator; no CUDA. The driver has 1: pip install 'modelyard[cpu]'")
    assert ok is None, "nobody uses it here"


def test_an_engine_that_does_not_see_what_auto_took_it_for_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    text, ok = engines(monkeypatch, "jax", jax={"version": "0.10.2", "devices": []})["jax"]
    assert "sees no accelerator. The driver has 1: pip install 'modelyard[jax]' (or 'modelyard[jax-gpu]'" in text
    assert ok is False


def test_an_engine_that_is_missing_is_no_problem_and_a_broken_one_is(monkeypatch: pytest.MonkeyPatch) -> None:
    found = engines(monkeypatch, "jax", jax={"error": "ImportError: no jaxlib"})
    assert found["jax"] == ("can't be used: ImportError: no jaxlib", False)
    text, ok = found["tensorflow"]
    assert text.startswith("not installed: pip install 'modelyard[cpu]'")
    assert ok is None


def test_what_an_engine_that_crashes_said_last_is_shown() -> None:
    assert doctor_asks("raise ImportError('no jaxlib')") == {"error": "ImportError: no jaxlib"}
    assert "exit status" in str(doctor_asks("import os; os.abort()")["error"])
    assert doctor_asks("print('{}')") == {}


def test_a_platform_that_jax_does_not_have_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    monkeypatch.setattr("modelyard.config.backend.is_installed", lambda name: True)
    monkeypatch.setattr("modelyard.config.backend.choose_engine", lambda name: ("jax", "auto"))
    monkeypatch.setattr(doctor, "_ask_jax", lambda: {"error": "AssertionError"})
    (said,) = (result for name, result, _ in doctor._engines() if name == "jax")
    assert said.startswith("can't be used: AssertionError (JAX_PLATFORMS=cuda is set")
