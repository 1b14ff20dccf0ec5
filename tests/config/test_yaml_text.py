"""Strict YAML: what a scalar means, what is refused, and that writing is the inverse of reading."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from qfleet.config import parse_mapping, parse_override, read_yaml
from qfleet.config.strict_yaml import MAX_BYTES, dump_yaml
from qfleet.core.errors import UserError

SCALARS: list[tuple[str, Any]] = [
    ("1e6", 1e6), ("1E6", 1e6), ("3e-4", 3e-4), ("-2.5e+3", -2500.0), ("1_000", 1000), ("1_000_000", 1_000_000),
    ("1_000.5", 1000.5), (".5", 0.5), ("5.", 5.0), ("+7", 7), ("-7", -7), ("010", 10), ("0", 0), ("1e999", math.inf),
    ("true", True), ("True", True), ("FALSE", False), ("null", None), ("~", None), ("Null", None),
    ("yes", "yes"), ("no", "no"), ("on", "on"), ("off", "off"), ("y", "y"), ("1:30", "1:30"),
    ("2020-01-01", "2020-01-01"), ("0x10", "0x10"), ("1_", "1_"), ("1e", "1e"),
    ("_1", "_1"), ("nan", "nan"), ("v1", "v1"),
    ("my.mod:Thing", "my.mod:Thing"), ("ALE/Pong-v5", "ALE/Pong-v5"),
    ("'1e6'", "1e6"), ('"true"', "true"), ("''", ""), ("[64, 64]", [64, 64]), ("[1e3, a]", [1000.0, "a"]),
    ("{size: 5, name: x}", {"size": 5, "name": "x"}), ("[]", []), ("{}", {}), ("a=b", "a=b"),
]


@pytest.mark.parametrize(("text", "value"), SCALARS)
def test_scalars_mean_the_same_in_files_and_overrides(text: str, value: Any) -> None:
    for read in (parse_override(f"a.b={text}")[1], parse_mapping(f"x: {text}\n", "f")["x"]):
        assert read == value and type(read) is type(value)


def test_dot_nan_is_a_number_that_config_refuses_later() -> None:
    assert math.isnan(parse_override("a=.nan")[1])


BAD_FILES = [
    ("", "f.yaml: is empty"),
    ("# only a comment\n", "f.yaml: is empty"),
    ("null\n", "f.yaml: is empty"),
    ("a: 1\nb:\n\tc: 2\n", "f.yaml:3: a tab; indent with spaces"),
    ("a: [1, 2\n", "f.yaml:2: not valid YAML"),
    ("a: 1\n b: 2\n", "f.yaml:2: not valid YAML"),
    ("- 1\n- 2\n", "f.yaml:1: `key: value` lines are needed, not a list"),
    ("just text\n", "f.yaml:1: `key: value` lines are needed, not a single value (just text)"),
    ("a:1\n", "not a single value (a:1)"),
    ("a: 1\nb: 2\na: 3\n", "f.yaml:3: 'a' is given twice, first in line 1; remove one"),
    ("a: &x [1]\nb: *x\n", "f.yaml:2: an alias (*name); write out the value"),
    ("a: 1\n---\nb: 2\n", "f.yaml:2: a second document (---)"),
    ("1: 2\n", "f.yaml:1: a key must be a word, not a single value (1)"),
    ("true: 2\n", "a key must be a word"),
    ("? [1, 2]\n: 3\n", "a key must be a word, not a list"),
    ("a: !!python/object/apply:os.system ['true']\n", "f.yaml:1:"),
    ("a: !!binary aGk=\n", "'binary' cannot be used here"),
    ("a: !!set {x, y}\n", "'set' cannot be used here"),
    ("a: !!int many\n", "'int' cannot be used here"),
    ("a: " + "[" * 100 + "]" * 100 + "\n", "nested more than 24 levels deep"),
    ("a: " + "{a: " * 5000 + "\n", "f.yaml:1:"),
    ("a: \x01\n", "f.yaml:1: a control character (0x01); remove it"),
    ("a: 1\nb: @x\n", "f.yaml:2: not valid YAML"),
    ("a: " + "9" * 5000 + "\n", "'int' cannot be used here"),
]


@pytest.mark.parametrize(("text", "message"), BAD_FILES)
def test_bad_files_are_refused_by_name_and_line(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "f.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(UserError) as caught:
        read_yaml(tmp_path / "f.yaml")
    assert message in str(caught.value).replace(f"{tmp_path}/", "")


def test_all_duplicate_keys_are_reported_at_once() -> None:
    with pytest.raises(UserError) as caught:
        parse_mapping("a: 1\na: 2\nb:\n  c: 1\n  c: 2\n", "f")
    assert str(caught.value).splitlines() == ["f:2: 'a' is given twice, first in line 1; remove one",
                                              "f:5: 'c' is given twice, first in line 4; remove one"]


def test_files_that_are_not_text_files(tmp_path: Path) -> None:
    for path, message in [(tmp_path, "is a directory"), (tmp_path / "none.yaml", "there is no such file"),
                          (tmp_path / ("x" * 300), "cannot be read"), (Path("a\0b"), "cannot be read")]:
        with pytest.raises(UserError, match=message):
            read_yaml(path)
    latin = tmp_path / "latin.yaml"
    latin.write_bytes("a: 1\nb: \xe9\n".encode("latin-1"))
    with pytest.raises(UserError, match=r"latin.yaml:2: not UTF-8 text \(byte 0xe9\); save the file as UTF-8"):
        read_yaml(latin)
    big = tmp_path / "big.yaml"
    big.write_bytes(b"a: " + b"x" * MAX_BYTES)
    with pytest.raises(UserError, match="larger than 256 KiB"):
        read_yaml(big)


def test_nothing_in_a_file_is_ever_executed(tmp_path: Path) -> None:
    sentinel = tmp_path / "sentinel"
    for tag in ("!!python/object/apply:pathlib.Path.touch", "!!python/object/new:pathlib.Path"):
        with pytest.raises(UserError):
            parse_mapping(f"a: {tag} ['{sentinel}']\n", "f")
    assert not sentinel.exists()


def test_a_byte_order_mark_is_no_part_of_the_first_key(tmp_path: Path) -> None:
    (tmp_path / "bom.yaml").write_bytes(b"\xef\xbb\xbfa: 1\n")
    assert read_yaml(tmp_path / "bom.yaml") == {"a": 1}


@pytest.mark.parametrize(("text", "message"), [
    ("seed", "is not an override; write key=value, such as learner.learning_rate=3e-4"),
    ("=3", "'' is not a dotted key"), ("a b=3", "'a b' is not a dotted key"), ("a..b=3", "not a dotted key"),
    (".a=3", "not a dotted key"), ("--seed=3", "not a dotted key"), ("3a=3", "not a dotted key"),
    ("a=", "has no value"), ("a=  ", "has no value"), ("a=[1", "cannot read the value"),
    ("a=#x", "only '' of it would be read"), ("a=&x 3", "only '3' of it would be read"),
    ("a=x #y", "only 'x' of it would be read; quote it if it is text: a='\"…\"'"),
    ("a=*x", "an alias"), ("a=@x", "cannot read the value"), ("a=!!int 3", "only '3' of it would be read"),
    ("a={b: 1, b: 2}", "'b' is given twice"),
])
def test_malformed_overrides_are_refused_with_an_example(text: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        parse_override(text)
    assert str(caught.value).startswith(repr(text)) and message in str(caught.value)


WORDS = st.from_regex(r"[a-z]\w{0,8}", fullmatch=True)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(
        st.characters(exclude_categories=["Cs", "Cc", "Co", "Cn"], exclude_characters="\ufeff￾￿"), max_size=20)
    | st.sampled_from([text for text, _ in SCALARS]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3),
    max_leaves=8,
)


@settings(deadline=None, max_examples=60)
@given(st.dictionaries(WORDS, VALUES, min_size=1, max_size=4))
def test_reading_is_the_inverse_of_writing(data: dict[str, Any]) -> None:
    assert repr(parse_mapping(dump_yaml(data), "f")) == repr(data)


TRAPS = st.floats(allow_nan=False) | st.sampled_from(["no", "1:30", "1e6", "2020-01-01"])


@settings(deadline=None, max_examples=60)
@given(st.dictionaries(st.sampled_from(["a", "b", "c"]), TRAPS, min_size=1))
def test_other_yaml_readers_read_the_same(data: dict[str, Any]) -> None:
    assert yaml.safe_load(dump_yaml(data)) == data
