"""What TensorFlow's own servers do, which is why those of a local cluster listen on loopback only."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from conftest import environment
from waiting import PATIENCE

SERVER = """
import sys, tensorflow as tf
server = tf.distribute.Server({"worker": ["127.0.0.1:0"]}, job_name="worker", task_index=0)
print(server.target, flush=True)
sys.stdin.read()
"""
CLIENT = """
import sys, tensorflow as tf
tf.config.experimental_connect_to_host(sys.argv[1])
with tf.device("/job:worker/replica:0/task:0/device:CPU:0"):
    print(tf.io.read_file(sys.argv[2]).numpy().decode(), flush=True)
"""


@pytest.mark.slow
@pytest.mark.tensorflow_only("TensorFlow's server")
def test_a_server_of_tensorflow_reads_files_for_whoever_reaches_it(tmp_path: Path) -> None:
    """docs/security.md and docs/cluster.md say so. If this fails, TensorFlow has learned to ask for a password."""
    (tmp_path / "secret").write_text("of the user who trains")
    with subprocess.Popen(
        [sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment()
    ) as server:
        assert server.stdout is not None
        target = server.stdout.readline().strip()
        words = [sys.executable, "-c", CLIENT, target, str(tmp_path / "secret")]
        done = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE, env=environment(), check=False)
        server.kill()
    assert done.stdout.strip() == "of the user who trains", done.stderr[-2000:]
