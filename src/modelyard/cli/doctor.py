"""The command doctor: checks this machine."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from modelyard.cli.output import Json, show, table
from modelyard.errors import ConfigError, UserError

if TYPE_CHECKING:
    from modelyard.cluster.description import Cluster

_LOW_DISK = 2 << 30
Check = tuple[str, str, bool | None]
"""Name, result, and whether it is fine; None for information."""


def doctor(json: Json = False) -> None:
    """Check this machine: versions, engine, CPU, GPUs, memory, disk, and its role in a cluster."""
    from rich.text import Text

    checks = examine()
    marks = {True: Text("ok", "green"), False: Text("problem", "red"), None: Text("–", "dim")}
    listed = table(("check", "", "result"), [(name, marks[ok], result) for name, result, ok in checks])
    show([{"check": name, "result": result, "ok": ok} for name, result, ok in checks], [listed], as_json=json)
    if any(ok is False for _, _, ok in checks):
        sys.exit(1)


def examine() -> list[Check]:
    """Returns all checks."""
    from modelyard.config.backend import is_installed
    from modelyard.system.machine import available_cores, cpu_flags, hardware, versions

    machine, found, free = hardware(), versions(), shutil.disk_usage(Path.cwd()).free
    checks: list[Check] = [
        ("python", found["python"], sys.version_info >= (3, 11)),
        ("packages", ", ".join(f"{name} {version}" for name, version in found.items() if name != "python"), None),
        ("cpu", f"{machine['cpu']}, {available_cores()} cores", None),
        ("memory", f"{machine['memory_gib']} GiB", machine["memory_gib"] >= 2),
        ("disk", f"{free / 2**30:.1f} GiB free here", free >= _LOW_DISK),
    ]
    checks += _engines()
    if "avx512f" not in cpu_flags() and is_installed("tensorflow"):
        checks.append(("oneDNN", "switched on for TensorFlow, since this CPU has no AVX-512", None))
    writable = os.access(Path.cwd(), os.W_OK)
    checks.append(("run folders", "can be made here" if writable else "this folder is not writable", writable))
    return checks + _cluster()


def _cluster() -> list[Check]:
    """Returns the role of this process in a cluster, or what is wrong with its description."""
    from modelyard.cluster.environment import find_cluster

    try:
        cluster = find_cluster()
    except ConfigError as error:
        return [("cluster", str(problem), False) for problem in error.problems]
    if not cluster.source:
        return [("cluster", "alone: neither TF_CONFIG nor SLURM's variables name other processes", None)]
    checks: list[Check] = [("cluster", f"{cluster.describe()} (from {cluster.source})", True)]
    me = cluster.me
    checks += [
        ("cluster role", me.role, None),
        ("cluster index", str(me.index), None),
        ("cluster mode", "alone" if cluster.is_alone else cluster.mode, None),
    ]
    if cluster.addresses.get(me.role):
        checks.append(("cluster address", cluster.address(me), None))
    for member in cluster.members:
        if member != me:
            note = ", the coordinator" if member == cluster.coordinator else ""
            checks.append(("cluster member", f"{member.file_name} at {cluster.address(member)}{note}", None))
    if not cluster.is_alone:
        checks.append(_secret(cluster))
    checks.append(("cluster model_dir", cluster.model_dir or "not given: --model_dir is needed", None))
    checks.append(("cluster environment", cluster.environment, None))
    return checks


def _secret(cluster: Cluster) -> Check:
    """Returns whether the processes have a secret, which is not shown."""
    from modelyard.cluster.secret import find_secret

    try:
        given = find_secret(cluster, insecure=False)
    except ConfigError as error:
        return ("cluster secret", str(error.problems[0]), False)
    return ("cluster secret", "given" if given else "none: all processes are on this machine", None)


def _engines() -> list[Check]:
    """Returns which engine ``auto`` chooses, and what each of them sees: that should be what the driver sees."""
    from modelyard.config.backend import INSTALL, choose_engine, count_devices, is_installed
    from modelyard.system.machine import gpus

    driver = gpus()
    checks: list[Check] = [("GPUs (driver)", "; ".join(driver) or "none", None)]
    try:
        chosen, reason = choose_engine("auto")
    except UserError as error:
        return [*checks, ("engine", str(error), False)]
    checks.append(("engine", f"{chosen} ({reason})", True))
    for name, ask in (("tensorflow", _ask_tensorflow), ("jax", _ask_jax)):
        if not is_installed(name):
            checks.append((name, f"not installed: {INSTALL[name]}", None))
            continue
        seen = ask()
        if "error" in seen:
            # For a platform without a plugin, JAX raises AssertionError without a message.
            asked = os.environ.get("JAX_PLATFORMS") if name == "jax" else None
            hint = f" (JAX_PLATFORMS={asked} is set: is that platform's build of JAX installed?)" if asked else ""
            checks.append((name, f"can't be used: {seen['error']}{hint}", False))
            continue
        result = f"{seen['version']} sees {count_devices(seen['devices']) or 'no accelerator'}{seen.get('built', '')}"
        incomplete = len(seen["devices"]) < len(driver)
        if incomplete:
            result += f". The driver has {len(driver)}: {INSTALL[name]}"
        checks.append((name, result, None if name != chosen else not incomplete))  # an unused engine may be incomplete
    return checks


def _ask_tensorflow() -> dict[str, Any]:
    return _ask(
        "import json, tensorflow as tf; b = tf.sysconfig.get_build_info();"
        "built = f\"; CUDA {b['cuda_version']}, cuDNN {b['cudnn_version']}\" if b.get('cuda_version') else '; no CUDA';"
        "names = [tf.config.experimental.get_device_details(d).get('device_name', d.name)"
        " for d in tf.config.list_physical_devices('GPU')];"
        "print(json.dumps({'version': tf.__version__, 'devices': names, 'built': built}))"
    )


def _ask_jax() -> dict[str, Any]:
    return _ask(
        "import json, jax;"
        "names = [d.device_kind for d in jax.devices() if d.platform != 'cpu'];"
        "print(json.dumps({'version': jax.__version__, 'devices': names}))"
    )


def _ask(code: str) -> dict[str, Any]:
    """Runs code in a subprocess, since a broken installation may crash, and returns the JSON that it prints."""
    # JAX would allocate most of a GPU's memory, where others may be training.
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    try:
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=environment, check=False
        )
        if done.returncode:
            lines = done.stderr.strip().splitlines()
            return {"error": lines[-1] if lines else f"exit status {done.returncode}"}
        answer: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
        return answer
    except (OSError, subprocess.TimeoutExpired, ValueError, IndexError) as error:
        return {"error": str(error)}
