"""The manifest is checked with the models of the Kubernetes API and with its rules, and run on this machine."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from conftest import environment
from modelyard.cluster.environment import find_cluster
from modelyard.cluster.secret import find_secret
from modelyard.launcher.submit import submit
from waiting import PATIENCE

EVERYTHING: dict[str, Any] = {
    "image": "registry.example/team/mine:1",
    "namespace": "team",
    "cpus": 3.5,
    "memory": "16Gi",
    "gpus": 2,
    "time": "12h",
    "claim": "shared",
    "data_claim": "pictures",
    "service_account": "trainer",
    "secret": "keys",
    "pull_secret": "registry",
    "node_selector": {"gpu": "a100", "1": "0o17"},
    "env": {"NCCL_DEBUG": "INFO", "PRICE": "$5 $(HOME)"},
}
LITTLE = {"image": "mine:1"}
SHAPES: list[dict[str, Any]] = [{}, {"workers": 2}, {"workers": 3, "ps": 2, "evaluator": True}]
OPTIONS = ("train-and-evaluate", "--model", "mlp", "--dataset", "digits", "--threads", "1", "--train_steps", "60")
KINDS = {"Service": "V1Service", "Secret": "V1Secret", "Job": "V1Job"}


def all_documents(resources: dict[str, Any], name: str = "mine", **shape: Any) -> list[dict[str, Any]]:
    words = ["train", "--model_dir", f"gs://bucket/{name}"]
    return list(yaml.safe_load_all(submit("kubernetes", words, resources=resources, dry_run=True, **shape).text))


def manifest(resources: dict[str, Any], name: str = "mine", **shape: Any) -> dict[str, dict[str, Any]]:
    """The documents by kind, of a run with one Job."""
    documents = all_documents(resources, name, **shape)
    found = {document["kind"]: document for document in documents}
    assert len(found) == len(documents)
    return found


def container(job: dict[str, Any]) -> dict[str, Any]:
    (found,) = job["spec"]["template"]["spec"]["containers"]
    assert isinstance(found, dict)
    return found


def variables(job: dict[str, Any]) -> dict[str, str]:
    return {one["name"]: one["value"] for one in container(job)["env"] if "value" in one}


def variables_of(documents: dict[str, dict[str, Any]]) -> dict[str, str]:
    """The environment of the container, with what comes from the Secret of the manifest."""
    found = {}
    for one in documents["Job"]["spec"]["template"]["spec"]["containers"][0]["env"]:
        reference = one.get("valueFrom", {}).get("secretKeyRef")
        if reference is not None:
            assert reference["name"] == documents["Secret"]["metadata"]["name"]
        found[one["name"]] = documents["Secret"]["stringData"][reference["key"]] if reference else one["value"]
    return found


def as_model(value: Any, kind: str, where: str) -> Any:
    """Converts a value to the client's model of it, which checks required keys, names and types."""
    client = pytest.importorskip("kubernetes.client")
    if match := re.fullmatch(r"[lL]ist\[(.*)\]", kind):
        assert isinstance(value, list), where
        return [as_model(item, match[1], f"{where}[{i}]") for i, item in enumerate(value)]
    if match := re.fullmatch(r"[dD]ict[\[(]str, (.*)[\])]", kind):
        assert isinstance(value, dict), where
        assert all(isinstance(key, str) for key in value), where
        return {key: as_model(item, match[1], f"{where}.{key}") for key, item in value.items()}
    plain = {"str": str, "int": int, "bool": bool, "object": (str, int)}
    if kind in plain:
        assert isinstance(value, plain[kind]), f"{where}: {value!r} is not a {kind}"
        assert isinstance(value, bool) == (kind == "bool"), f"{where}: {value!r} is not a {kind}"
        return value
    model = getattr(client, kind)
    assert isinstance(value, dict), where
    names = {theirs: ours for ours, theirs in model.attribute_map.items()}
    assert set(value) <= set(names), f"{where} has unknown {set(value) - set(names)}"
    return model(**{names[k]: as_model(v, model.openapi_types[names[k]], f"{where}.{k}") for k, v in value.items()})


@pytest.mark.parametrize("resources", [LITTLE, EVERYTHING], ids=["little", "everything"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_manifest_matches_the_api(resources: dict[str, Any], shape: dict[str, Any]) -> None:
    client = pytest.importorskip("kubernetes.client")
    documents = all_documents(resources, **shape)
    assert {document["kind"] for document in documents} == set(KINDS)
    for document in documents:
        model = as_model(document, KINDS[document["kind"]], document["kind"])
        assert client.ApiClient().sanitize_for_serialization(model) == document


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("spec", "backofLimit", 3),
        ("spec", "completions", "2"),
        ("metadata", "name", 5),
        ("spec", "template", None),
        ("spec", "parallelism", True),
    ],
)
def test_that_check_finds_errors(section: str, key: str, value: Any) -> None:
    pytest.importorskip("kubernetes.client")
    document = manifest(LITTLE, workers=2)["Job"]
    document[section][key] = value
    if value is None:
        del document[section][key]
    with pytest.raises((AssertionError, ValueError)):
        as_model(document, "V1Job", "Job")


@pytest.mark.parametrize("name", ["mine", "X" * 90, "1-st.Run_", "a" * 56 + "-b"])
def test_the_rules_that_the_models_do_not_check(name: str) -> None:
    documents = manifest(EVERYTHING, name=name, workers=6)
    job, service = documents["Job"], documents["Service"]
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    assert spec["completionMode"] == "Indexed"
    assert spec["completions"] == spec["parallelism"] == 6
    # A policy for failures goes with restartPolicy Never only; its values are in order, without 0.
    assert pod["restartPolicy"] == "Never"
    for rule in spec["podFailurePolicy"]["rules"]:
        values = rule.get("onExitCodes", {}).get("values", [1])
        assert values == sorted(set(values))
        assert 0 not in values
    # JOB-INDEX is the host name of a pod, and the Service its domain.
    label = r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?"
    assert re.fullmatch(label, service["metadata"]["name"])
    assert pod["subdomain"] == service["metadata"]["name"]
    assert re.fullmatch(label, f"{job['metadata']['name']}-4096")
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"] is True
    assert service["spec"]["selector"].items() <= job["spec"]["template"]["metadata"]["labels"].items()
    assert pod["securityContext"]["runAsNonRoot"] is True
    mounted = {mount["name"] for mount in pod["containers"][0]["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["volumes"]} == {"runs", "data", "shared-memory"}


def test_a_user_error_fails_the_job_and_a_lost_peer_does_not_count() -> None:
    rules = manifest(LITTLE)["Job"]["spec"]["podFailurePolicy"]["rules"]
    actions = {code: rule["action"] for rule in rules for code in rule.get("onExitCodes", {}).get("values", [])}
    assert actions == {2: "FailJob", 75: "Ignore", 143: "Ignore"}
    assert rules[1] == {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}


@pytest.mark.parametrize("shape", SHAPES[1:], ids=str)
def test_every_index_finds_its_role(shape: dict[str, Any]) -> None:
    documents = manifest(LITTLE, **shape)
    job, variables = documents["Job"], variables_of(documents)
    seen = []
    for index in range(job["spec"]["completions"]):
        cluster = find_cluster(environ={**variables, "JOB_COMPLETION_INDEX": str(index)})
        assert cluster.address(cluster.me).startswith(f"mine-{index}.mine:")
        seen.append(cluster.me)
        assert len(find_secret(cluster, False, variables)) == 64
    assert len(set(seen)) == len(seen) == sum(len(hosts) for hosts in cluster.addresses.values())
    assert sorted(map(str, cluster.members)) == sorted(map(str, seen))


def test_the_secret_is_in_the_manifest_once_and_new_every_time() -> None:
    words = ["train", "--model_dir", "gs://b/m"]
    texts = [submit("kubernetes", words, resources=LITTLE, dry_run=True).text for _ in range(2)]
    secrets = [re.findall(r"\b[0-9a-f]{64}\b", text) for text in texts]
    assert [len(found) for found in secrets] == [1, 1]
    assert secrets[0] != secrets[1]
    own = manifest({**LITTLE, "env": {"MODELYARD_CLUSTER_SECRET_FILE": "/secrets/run"}})
    assert "MODELYARD_CLUSTER_SECRET" not in variables_of(own)


def test_only_roles_that_compute_get_gpus_and_each_role_is_a_job_then() -> None:
    """All pods of a Job are equal."""
    gpus = {**LITTLE, "gpus": 2}
    documents = all_documents(gpus, workers=3, ps=2, evaluator=True)
    (service,) = (document for document in documents if document["kind"] == "Service")
    jobs = {document["metadata"]["name"]: document for document in documents if document["kind"] == "Job"}
    assert {name: job["spec"]["completions"] for name, job in jobs.items()} == {
        "mine-chief": 1,
        "mine-worker": 3,
        "mine-ps": 2,
        "mine-evaluator": 1,
    }
    limits = {
        name: container(job).get("resources", {}).get("limits", {}).get("nvidia.com/gpu") for name, job in jobs.items()
    }
    assert limits == {"mine-chief": None, "mine-worker": "2", "mine-ps": None, "mine-evaluator": "2"}
    seen = []
    for name, job in jobs.items():
        assert job["spec"]["template"]["spec"]["subdomain"] == service["metadata"]["name"] == "mine"
        assert service["spec"]["selector"].items() <= job["spec"]["template"]["metadata"]["labels"].items()
        for index in range(job["spec"]["completions"]):
            cluster = find_cluster(environ={**variables(job), "JOB_COMPLETION_INDEX": str(index)})
            assert cluster.address(cluster.me) == f"{name}-{index}.mine:2222"
            seen.append(str(cluster.me))
    assert sorted(seen) == sorted(map(str, cluster.members))
    for equal in ({"workers": 3}, {"workers": 3, "evaluator": True}):  # all compute
        assert container(manifest(gpus, **equal)["Job"])["resources"]["limits"] == {"nvidia.com/gpu": "2"}
    assert "Job" in manifest(LITTLE, workers=3, ps=2)  # none has a GPU


def test_the_names_of_several_jobs_leave_room_for_pods() -> None:
    for name in ("X" * 90, "a" * 46 + "-b"):
        for document in all_documents({**LITTLE, "gpus": 1}, name=name, workers=2, ps=1, evaluator=True):
            assert re.fullmatch(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?", f"{document['metadata']['name']}-4096")


@pytest.mark.slow
def test_the_processes_of_the_job_form_a_cluster_and_finish(tmp_path: Path) -> None:
    """Uses its command and variables; hosts and Python are those of this machine, with a port per process."""
    resources = {**LITTLE, "claim": "shared", "mount": str(tmp_path)}
    words = [*OPTIONS, "--model_dir", str(tmp_path / "run")]
    text = submit("kubernetes", words, workers=2, resources=resources, dry_run=True).text
    documents = {document["kind"]: document for document in yaml.safe_load_all(text)}
    job, variables = documents["Job"], variables_of(documents)
    container = job["spec"]["template"]["spec"]["containers"][0]
    for index, port in enumerate(_free_ports(job["spec"]["completions"])):
        variables["TF_CONFIG"] = variables["TF_CONFIG"].replace(f"run-{index}.run:2222", f"127.0.0.1:{port}")
    assert container["args"][0] == "modelyard"
    command = [word.replace("$$", "$") for word in container["command"]]
    command += [sys.executable, "-m", *container["args"]]
    started = [
        subprocess.Popen(
            command,
            env=environment(**variables, JOB_COMPLETION_INDEX=str(index)),
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for index in range(job["spec"]["completions"])
    ]
    outputs = [process.communicate(timeout=PATIENCE)[0] for process in started]
    assert [process.returncode for process in started] == [0, 0], "\n".join(outputs)
    assert (tmp_path / "run" / "checkpoints" / "step-00000060").is_dir()
    assert {path.name for path in (tmp_path / "run" / "runlogs").iterdir()} >= {"worker-0.log", "worker-1.log"}


def _free_ports(count: int) -> list[int]:
    held = [socket.socket() for _ in range(count)]
    for one in held:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in held]
    for one in held:
        one.close()
    return ports
