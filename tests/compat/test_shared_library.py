"""A C function is replaced for one library, while a block runs."""

from __future__ import annotations

import _socket
import ctypes
import socket
import sys
from pathlib import Path

import pytest

from modelyard.compat.shared_library import replaced

FOLDER = Path(getattr(_socket, "__file__", "/nowhere/x")).parent
KIND = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_uint32)


@pytest.mark.skipif(sys.platform != "linux" or not hasattr(_socket, "__file__"), reason="not a library of its own here")
def test_a_function_is_replaced_for_a_library_and_then_restored() -> None:
    asked: list[bytes] = []

    def bind(descriptor: int, where: int, length: int) -> int:
        asked.append(ctypes.string_at(where, length))
        return 0

    with socket.socket() as one, socket.socket() as two:
        with replaced("bind", KIND(bind), FOLDER) as entries:
            assert entries == 1
            one.bind(("127.0.0.1", 0))
        assert [where[4:8] for where in asked] == [bytes([127, 0, 0, 1])]
        assert one.getsockname()[1] == 0  # the system was not asked
        two.bind(("127.0.0.1", 0))
        assert two.getsockname()[1] != 0
    assert len(asked) == 1


def test_libraries_of_other_folders_are_left_alone(tmp_path: Path) -> None:
    with replaced("bind", KIND(lambda *_: -1), tmp_path) as entries:
        assert entries == 0
