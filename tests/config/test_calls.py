"""Parts named in a list, with arguments."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from modelyard.config import load_config
from modelyard.config.calls import Call, parse_list, split_list
from modelyard.errors import ConfigError, UserError
from modelyard.registry import AUGMENTATIONS, HOOKS

relaxed = settings(deadline=None)
PRINTABLE = st.text(st.characters(exclude_categories=("Cc", "Cs", "Cn", "Zl", "Zp")), max_size=12)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | PRINTABLE,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(PRINTABLE, inner, max_size=2),
    max_leaves=4,
)
ARGUMENTS = st.dictionaries(st.from_regex(r"[a-z_]{1,6}", fullmatch=True), VALUES, max_size=3)


@pytest.mark.parametrize(
    ("written", "name", "arguments"),
    [
        ("early_stop", "early_stop", {}),
        (" early_stop ", "early_stop", {}),
        ("early_stop()", "early_stop", {}),
        ("early_stop(patience=5)", "early_stop", {"patience": 5}),
        ("+early_stop( patience = 5 , metric = loss )", "+early_stop", {"patience": 5, "metric": "loss"}),
        ("-progress", "-progress", {}),
        ("h(a=true, b=[1, 2], c=null, d='x, y', e=it's)", "h",
         {"a": True, "b": [1, 2], "c": None, "d": "x, y", "e": "it's"}),
        ({"early_stop": {"patience": 5}}, "early_stop", {"patience": 5}),
        ({"early_stop": None}, "early_stop", {}),
        ({"h": {1: 2}}, "h", {"1": 2}),
        (Call("a", {"b": 1}), "a", {"b": 1}),
    ],
)  # fmt: skip
def test_a_call_is_read_as_text_or_as_a_yaml_mapping(written: object, name: str, arguments: dict[str, Any]) -> None:
    assert Call.parse(written) == Call(name, arguments)


@pytest.mark.parametrize(
    "written",
    ["", "two words", "a(b", "a(5)", "a(b=1, 2)", "a(2b=1)", "a(b=[1)", "a(b='x)", {"a": 5}, {"a": {}, "b": {}}],
)
def test_what_is_no_call_is_refused(written: object) -> None:
    with pytest.raises(ValueError, match=r"is not a name|is not key=value|key: value pairs|is not a valid YAML value"):
        Call.parse(written)


@pytest.mark.parametrize("written", ["early_stop(patience=[1)", "early_stop(5)", "early_stop(", [{"early_stop": 5}]])
def test_a_call_that_can_not_be_read_is_a_config_error(written: object) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(hooks=written)
    assert [problem.key for problem in caught.value.problems] == ["hooks"]


@relaxed
@given(ARGUMENTS)
def test_a_call_written_out_and_read_again_is_the_same(arguments: dict[str, Any]) -> None:
    call = Call("+hook", arguments)
    assert Call.parse(str(call)) == call


@relaxed
@given(ARGUMENTS, ARGUMENTS)
def test_a_list_of_calls_written_out_and_read_again_is_the_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    calls = [Call("one", one), Call("two"), Call("three", other)]
    assert [Call.parse(part) for part in parse_list(", ".join(map(str, calls)))] == calls


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("", []),
        ("a", ["a"]),
        ("a, b(c=1, d=2)", ["a", "b(c=1, d=2)"]),
        ("a,,b,", ["a", "b"]),
        ("a(b=[1, {c: 2, d: 3}]), e", ["a(b=[1, {c: 2, d: 3}])", "e"]),
        ("a(b='x, (y'), c", ["a(b='x, (y')", "c"]),
        ('a(b="x\\", y"), c', ['a(b="x\\", y")', "c"]),
        ("don't, stop", ["don't", "stop"]),
    ],
)
def test_commas_inside_brackets_and_quotes_do_not_split(text: str, parts: list[str]) -> None:
    assert split_list(text) == parts


@pytest.mark.parametrize("text", ["[a, b]", "a,b", ["a", "b"], ("a", "b")])
def test_lists_are_read_from_yaml_and_from_words(text: object) -> None:
    assert parse_list(text) == ["a", "b"]


def test_one_value_is_a_list_of_one_and_nothing_is_none() -> None:
    assert parse_list(5) == [5]
    assert parse_list(None) == []


def test_arguments_are_checked_against_the_options_of_the_part() -> None:
    options = Call("early_stop", {"patience": "7"}).options(HOOKS)
    assert options.model_dump()["patience"] == 7
    assert Call("pad_and_crop").options(AUGMENTATIONS).model_dump() == {"padding": 4, "fill": "black"}


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (Call("early_stop", {"patiense": 7}), ["patiense", "'patience'"]),
        (Call("early_stop", {"zzz": 7}), ["zzz", "metric", "min_delta"]),
        (Call("early_stop", {"patience": "soon"}), ["patience", "must be a whole number"]),
        (Call("early_stop", {"patience": 0}), ["patience", "greater than or equal to 1"]),
        (Call("stop_at"), ["value", "is required"]),
        (Call("progress", {"x": 1}), ["no arguments"]),
        (Call("early_stopp"), ["'early_stop'"]),
    ],
)
def test_a_wrong_argument_is_named_with_what_would_be_right(call: Call, words: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        call.options(HOOKS)
    assert all(word in str(caught.value) for word in words), str(caught.value)
