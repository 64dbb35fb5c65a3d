"""Bodies of plain numbers: what is read without the parser is what the parser reads."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modelyard.data.image_spec import ImageSpec
from modelyard.serving.http import json_tensors
from modelyard.serving.http.limits import Limits, RequestError
from modelyard.serving.servable import DEFAULT
from serving_parts import facts

IMAGE = ImageSpec((2, 3, 1), "uint8")
MOST = 4
LIMITS = Limits(max_instances=MOST)
EVERY_BYTE = np.arange(258).clip(0, 255).astype(np.uint8).reshape(43, 2, 3, 1)


def parsed(body: bytes) -> np.ndarray | None:
    """As the parser has it; None where it refuses."""
    try:
        request = json_tensors.parse_json(body)
        rows, _, _ = json_tensors.predict_rows(request, DEFAULT, ("image",), {"image": IMAGE}, LIMITS)
        return json_tensors.images_from_rows(rows["image"], IMAGE, json_tensors.FileDecoder(facts(image=IMAGE), LIMITS))
    except RequestError:
        return None


def body_of(pixels: np.ndarray, separators: tuple[str, str] = (",", ":"), **more: str) -> bytes:
    return json.dumps({**more, "instances": pixels.tolist()}, separators=separators).encode()


@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": ")])
@pytest.mark.parametrize("more", [{}, {"signature_name": "serving_default"}])
def test_every_byte_is_read(separators: tuple[str, str], more: dict[str, str]) -> None:
    found = json_tensors.parse_uint8_images(body_of(EVERY_BYTE, separators, **more), IMAGE, 100)
    assert found is not None
    assert found.dtype == np.uint8
    np.testing.assert_array_equal(found, EVERY_BYTE)


GOOD = b'{"instances":[[[[1],[20],[255]],[[0],[5],[6]]]]}'


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b"20", b"256"), (b"20", b"999"), (b"20", b"1000"), (b"20", b"99999999999999999999"), (b"20", b"020"),
        (b"20", b"00"), (b"20", b""), (b"20", b"-2"), (b"20", b"2.0"), (b"20", b"2e1"), (b"20", b"true"),
        (b"20", b"2 0"), (b"20", b" 20"), (b"20", b"2,0"), (b"20", b'"20"'), (b"[20]", b"20"), (b"[20],", b""),
        (b"[6]", b"[]"), (b"[1]", b"[]"), (b"]}", b"],}"), (b"]}", b'],"x":1}'), (b"instances", b"inputs"),
        (b"[[[[", b"[1[[["), (b"]]}", b"]3]}"), (b"],[", b"]7,["), (b"],[", b"],7["), (b"[[[[", b"[[[[["),
        (b'{"ins', b'{"signature_name":"other","ins'), (b"[[[[1", b"[[[1"), (b"]}", b"]}]}"), (b"[[[[", b"[[ [["),
    ],
)  # fmt: skip
def test_what_is_unusual_is_left_to_the_parser(old: bytes, new: bytes) -> None:
    assert json_tensors.parse_uint8_images(GOOD, IMAGE, MOST) is not None
    assert GOOD.count(old) >= 1
    assert json_tensors.parse_uint8_images(GOOD.replace(old, new, 1), IMAGE, MOST) is None


def test_too_many_images_none_and_other_types_are_left_to_the_parser() -> None:
    assert json_tensors.parse_uint8_images(body_of(EVERY_BYTE[: MOST + 1]), IMAGE, MOST) is None
    assert json_tensors.parse_uint8_images(b'{"instances":[]}', IMAGE, MOST) is None
    assert json_tensors.parse_uint8_images(GOOD, ImageSpec((2, 3, 1), "float32"), MOST) is None


@settings(max_examples=500, deadline=None)
@given(st.data())
def test_a_damaged_body_is_never_read_as_something_else(data: st.DataObject) -> None:
    blanks = data.draw(st.booleans())
    body = bytearray(body_of(EVERY_BYTE[: data.draw(st.integers(1, 2))], (", ", ": ") if blanks else (",", ":")))
    for _ in range(data.draw(st.integers(0, 3))):
        place = data.draw(st.integers(0, len(body) - 1))
        byte = data.draw(st.sampled_from(b'0129,[] -.e"}\n\xff'))
        how = data.draw(st.sampled_from(["put", "insert", "drop"]))
        body[place : place + (how != "insert")] = b"" if how == "drop" else bytes([byte])
    quick = json_tensors.parse_uint8_images(bytes(body), IMAGE, MOST)
    if quick is not None:
        wanted = parsed(bytes(body))
        assert wanted is not None
        np.testing.assert_array_equal(quick, wanted)
