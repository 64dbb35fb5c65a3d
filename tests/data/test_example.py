"""The wire format of tf.train.Example, without TensorFlow."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from record_files import parse_example

from modelyard.data.records.example import describe_example, encode_example, find_features

WORDS = st.integers(-(2**63), 2**63 - 1)
FLOATS = st.floats(width=32, allow_nan=False)
FEATURES = st.dictionaries(
    st.text(max_size=12),
    st.one_of(
        st.binary(max_size=300),
        WORDS,
        FLOATS,
        st.lists(WORDS, min_size=1, max_size=40),
        st.lists(FLOATS, min_size=1, max_size=40),
        st.lists(st.binary(max_size=9), min_size=1, max_size=5),
    ),
    max_size=6,
)


def plain(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def listed(features: dict[str, Any]) -> dict[str, list[Any]]:
    return {name: values if isinstance(values, list) else values.tolist() for name, values in features.items()}


@given(FEATURES)
def test_what_is_written_is_read(features: dict[str, Any]) -> None:
    assert listed(parse_example(encode_example(features))) == {name: plain(value) for name, value in features.items()}


@given(FEATURES)
def test_bytes_do_not_depend_on_the_order_of_the_features(features: dict[str, Any]) -> None:
    assert encode_example(dict(reversed(features.items()))) == encode_example(features)


@settings(max_examples=40, deadline=None)
@given(FEATURES)
def test_tensorflow_reads_and_writes_the_same(two_devices: None, features: dict[str, Any]) -> None:
    import tensorflow as tf

    theirs = tf.train.Example()
    for name, value in features.items():
        first = plain(value)[0]
        kind = "bytes_list" if isinstance(first, bytes) else "float_list" if isinstance(first, float) else "int64_list"
        getattr(theirs.features.feature[name], kind).value.extend(plain(value))
    assert tf.train.Example.FromString(encode_example(features)) == theirs
    assert listed(parse_example(theirs.SerializeToString())) == {name: plain(value) for name, value in features.items()}


@given(st.binary(max_size=400))
def test_random_bytes_are_refused_with_a_reason_or_read(data: bytes) -> None:
    try:
        parse_example(data)
        describe_example(data)
    except ValueError as error:
        assert str(error)  # noqa: PT017


@given(FEATURES.filter(bool), st.data())
def test_a_cut_off_record_is_refused(features: dict[str, Any], data: st.DataObject) -> None:
    record = encode_example(features)
    cut = data.draw(st.integers(1, len(record) - 1))
    with pytest.raises(ValueError, match="byte"):
        find_features(record[:cut])


@settings(max_examples=200, deadline=None)
@given(FEATURES, st.data())
def test_a_changed_byte_never_crashes_and_never_reads_what_protobuf_reads_differently(
    two_devices: None, features: dict[str, Any], data: st.DataObject
) -> None:
    from google.protobuf.message import DecodeError
    from tensorflow.train import Example

    record = bytearray(encode_example(features))
    if not record:
        return
    record[data.draw(st.integers(0, len(record) - 1))] = data.draw(st.integers(0, 255))
    try:
        ours = listed(parse_example(bytes(record)))
    except ValueError:
        return
    try:
        theirs = Example.FromString(bytes(record)).features.feature
    except DecodeError:
        return
    for name, feature in theirs.items():
        if not name:
            continue  # a feature that lost its name; protobuf leaves out some of those
        kind = feature.WhichOneof("kind")
        expected = list(getattr(feature, kind).value) if kind else []
        assert np.array_equal(np.array(ours[name]), np.array(expected), equal_nan=kind == "float_list")


def test_numbers_that_are_not_packed_are_read() -> None:
    floats = b"\x0d" + np.float32(1.5).tobytes() + b"\x0d" + np.float32(-2).tobytes()
    numbers = b"\x08\x05\x08\xac\x02"
    record = b""
    for name, field, body in ((b"f", 0x12, floats), (b"n", 0x1A, numbers)):
        feature = bytes([field, len(body)]) + body
        entry = b"\x0a\x01" + name + bytes([0x12, len(feature)]) + feature
        record += bytes([0x0A, len(entry)]) + entry
    record = bytes([0x0A, len(record)]) + record
    assert listed(parse_example(record)) == {"f": [1.5, -2.0], "n": [5, 300]}


def test_only_wanted_features_are_found_and_where_they_are() -> None:
    record = encode_example({"image": b"pixels", "label": 7, "other": [1.0, 2.0]})
    found = find_features(record, ["image", "label", "none"])
    assert sorted(found) == ["image", "label"]
    ((start, end),) = found["image"].spans
    assert record[start:end] == b"pixels"
    assert found["image"].kind == "bytes"
    assert found["label"].kind == "ints"


def test_of_features_of_one_name_the_last_counts() -> None:
    first, last = (encode_example({"label": value}) for value in (1, 2))
    assert listed(parse_example(first + last)) == {"label": [2]}


def test_a_list_that_ends_inside_a_number_is_refused() -> None:
    record = encode_example({"label": 5})
    assert record.endswith(b"\x05")
    with pytest.raises(ValueError, match="a number is cut off"):
        find_features(record[:-1] + b"\x85")


def test_a_length_beyond_the_record_allocates_nothing() -> None:
    with pytest.raises(ValueError, match="beyond its end"):
        parse_example(b"\x0a\xff\xff\xff\xff\xff\xff\xff\x7f")


@pytest.mark.parametrize("value", [object(), {"a": 1}, 2**63, np.uint64(2**63), None, ["a", 1]])
def test_a_value_that_is_no_feature_is_refused_by_name(value: Any) -> None:
    with pytest.raises(ValueError, match="feature x"):
        encode_example({"x": value})


def test_arrays_and_single_numbers_of_numpy_are_written() -> None:
    features = {
        "a": np.arange(3, dtype=np.uint8),
        "b": np.float64(0.5),
        "c": np.int32(4),
        "d": np.ones((2, 2), np.float16),
    }
    parsed = listed(parse_example(encode_example(features)))  # type: ignore[arg-type]
    assert parsed == {"a": [0, 1, 2], "b": [0.5], "c": [4], "d": [1.0] * 4}


def test_features_are_listed_with_kind_and_size() -> None:
    record = encode_example({"image": b"x" * 3072, "label": 1, "box": [0.5] * 4, "names": [b"a", b"bc"], "none": []})
    assert describe_example(record) == [
        "box: 4 floats",
        "image: 3,072 bytes",
        "label: 1 integer",
        "names: 2 values of 3 bytes",
        "none: empty",
    ]
