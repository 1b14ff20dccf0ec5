"""Strict YAML with scientific notation, no implicit conversions, and line numbers in every error.

YAML 1.1 reads `1e6` as text, `no` as false, `1:30` as 90, and keeps the last of two equal keys. Here `1e6`, `3e-4` and
`1_000` are numbers, only true and false are booleans, and duplicate keys, anchors, tags and oversized files are
errors. Only dicts, lists, strings, numbers, true, false and null are constructed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import yaml
from yaml.composer import Composer
from yaml.emitter import Emitter
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode
from yaml.parser import Parser
from yaml.reader import Reader
from yaml.representer import SafeRepresenter
from yaml.resolver import BaseResolver
from yaml.scanner import Scanner
from yaml.serializer import Serializer

from qfleet.config.schema import Config
from qfleet.core.errors import UserError

MAX_BYTES = 256 * 1024
MAX_DEPTH = 24

_TAG = "tag:yaml.org,2002:"
_DIGITS = r"[0-9]+(?:_[0-9]+)*"
_SCALARS = [
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", rf"[-+]?{_DIGITS}", list("-+0123456789")),
    ("float", rf"[-+]?(?:{_DIGITS}(?:\.(?:{_DIGITS})?)?|\.{_DIGITS})(?:[eE][-+]?[0-9]+)?", list("-+.0123456789")),
    ("float", r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)", list("-+.")),
]


class _Resolver(BaseResolver):
    """Implicit types of plain scalars: numbers, true, false or null; everything else is text."""


for _name, _pattern, _first in _SCALARS:
    _Resolver.add_implicit_resolver(_TAG + _name, re.compile(rf"^(?:{_pattern})$"), _first)


class _NotAllowed(yaml.MarkedYAMLError):
    """Valid YAML that is not allowed in a config."""


class _Reader(Reader, Scanner, Parser, Composer, _Resolver):
    """Text -> nodes with line numbers."""

    def __init__(self, text: str) -> None:
        Reader.__init__(self, text)
        Scanner.__init__(self)
        Parser.__init__(self)
        Composer.__init__(self)
        _Resolver.__init__(self)
        self.depth = 0

    def compose_node(self, parent: Node | None, index: Any) -> Node | None:
        mark = self.peek_event().start_mark
        if self.check_event(yaml.AliasEvent):
            raise _NotAllowed(problem="an alias (*name); write out the value", problem_mark=mark)
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise _NotAllowed(problem=f"nested more than {MAX_DEPTH} levels deep", problem_mark=mark)
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node


def read_yaml(path: str | Path, opener: Callable[[str, int], int] | None = None) -> dict[str, Any]:
    """Read the mapping in a YAML file; every failure is a UserError that names the file. `opener` as for `open`."""
    path = Path(path)
    try:
        if path.is_dir():
            raise UserError(f"{path}: is a directory; a YAML file is needed")
        with open(path, "rb", opener=opener) as file:
            raw = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise UserError(f"{path}: there is no such file") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read ({getattr(error, 'strerror', None) or error})") from None
    if len(raw) > MAX_BYTES:
        raise UserError(f"{path}: larger than {MAX_BYTES // 1024} KiB, the limit for a config; is it the right file?")
    return parse_mapping(decode(raw, str(path)), str(path))


def decode(raw: bytes, origin: str) -> str:
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        where, byte = f"{origin}:{raw[: error.start].count(bytes([10])) + 1}", raw[error.start]
        raise UserError(f"{where}: not UTF-8 text (byte 0x{byte:02x}); save the file as UTF-8") from None


def parse_mapping(text: str, origin: str) -> dict[str, Any]:
    """Parse a whole document: a mapping of keys to values."""
    node = _compose(text, origin)
    if node is None or (isinstance(node, ScalarNode) and node.tag == _TAG + "null"):
        raise UserError(f"{origin}: is empty; write at least one `key: value`")
    if not isinstance(node, MappingNode):
        raise UserError(f"{origin}:{node.start_mark.line + 1}: `key: value` lines are needed, not a {_kind(node)}")
    value: dict[str, Any] = _convert(node, origin)
    return value


def parse_override(text: str) -> tuple[str, Any]:
    """Parse `a.b=c` to ("a.b", c), with c read as YAML: `hidden=[64, 64]`, `learner.learning_rate=3e-4`."""
    key, equals, value = text.partition("=")
    example = "write key=value, such as learner.learning_rate=3e-4"
    if not equals:
        raise UserError(f"{text!r}: is not an override; {example}")
    if not re.fullmatch(r"[^\W\d][\w-]*(\.[\w-]+)*", key):
        raise UserError(f"{text!r}: {key!r} is not a dotted key; {example}")
    if not value.strip():
        raise UserError(f"{text!r}: has no value; {example}, {key}=null for none or {key}='\"\"' for empty text")
    try:
        node = _compose(value, key)
        plain = node is None or (isinstance(node, ScalarNode) and node.style is None)
        read = getattr(node, "value", "") if plain else value.strip()
        if node is None or read != value.strip():
            raise UserError(f"only {read!r} of it would be read")
        return key, _convert(node, key)
    except UserError as error:
        problem = str(error).removeprefix(f"{key}:1: ")
        raise UserError(f"{text!r}: cannot read the value: {problem}; quote it if it is text: {key}='\"…\"'") from None


def _compose(text: str, origin: str) -> Node | None:
    try:
        node: Node | None = _Reader(text).get_single_node()
        return node
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise UserError(f"{origin}:{mark.line + 1 if mark else 1}: {_plain(error)}") from None
    except yaml.reader.ReaderError as error:
        where, code = f"{origin}:{text[: error.position].count(chr(10)) + 1}", ord(text[error.position])
        raise UserError(f"{where}: a control character (0x{code:02x}); remove it") from None


def _plain(error: yaml.MarkedYAMLError) -> str:
    """PyYAML's error message in plain words."""
    problem = error.problem or "unreadable"
    if isinstance(error, _NotAllowed):
        return problem
    if "'\\t'" in problem or "tab" in problem:
        return "a tab; indent with spaces"
    if "but found another document" in problem:
        return "a second document (---); one file holds one config"
    context = f" {error.context}" if error.context else ""
    return f"not valid YAML: {problem}{context}"


def _kind(node: Node) -> str:
    if isinstance(node, SequenceNode):
        return "list"
    return "mapping" if isinstance(node, MappingNode) else f"single value ({str(node.value)[:40]})"


def _convert(node: Node, origin: str) -> Any:
    """Nodes -> values; reports all problems of the document at once."""
    problems: list[str] = []
    value = _value(node, origin, problems)
    if problems:
        raise UserError("\n".join(problems))
    return value


def _value(node: Node, origin: str, problems: list[str]) -> Any:
    where = f"{origin}:{node.start_mark.line + 1}"
    if isinstance(node, SequenceNode) and node.tag == _TAG + "seq":
        return [_value(item, origin, problems) for item in node.value]
    if isinstance(node, MappingNode) and node.tag == _TAG + "map":
        return _mapping(node, origin, problems)
    try:
        if isinstance(node, ScalarNode):
            return _scalar(node)
    except (KeyError, ValueError):
        pass
    problems.append(f"{where}: {str(node.tag).removeprefix(_TAG)!r} cannot be used here; write a plain value")
    return None


def _mapping(node: MappingNode, origin: str, problems: list[str]) -> dict[str, Any]:
    lines: dict[str, int] = {}
    result: dict[str, Any] = {}
    for key_node, value_node in node.value:
        line = key_node.start_mark.line + 1
        if not isinstance(key_node, ScalarNode) or key_node.tag != _TAG + "str":
            problems.append(f"{origin}:{line}: a key must be a word, not a {_kind(key_node)}; quote it if it is text")
            continue
        key = key_node.value
        if key in lines:
            problems.append(f"{origin}:{line}: {key!r} is given twice, first in line {lines[key]}; remove one")
        lines[key] = line
        result[key] = _value(value_node, origin, problems)
    return result


def _scalar(node: ScalarNode) -> Any:
    text = node.value
    kind = node.tag.removeprefix(_TAG)
    match kind:
        case "str":
            return text
        case "null":
            return None
        case "bool":
            return {"true": True, "false": False}[text.lower()]
        case "int":
            return int(text.replace("_", ""))
        case "float":
            return float(text.replace("_", "").lower().replace(".inf", "inf").replace(".nan", "nan"))
    raise KeyError(kind)


class _Writer(Emitter, Serializer, SafeRepresenter, _Resolver):
    """Values -> text that `read_yaml` and other YAML readers parse to the same values."""

    def __init__(self, stream: Any, **options: Any) -> None:
        Emitter.__init__(self, stream, width=120, allow_unicode=True)
        Serializer.__init__(self)
        SafeRepresenter.__init__(self, default_flow_style=False, sort_keys=False)
        _Resolver.__init__(self)

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_text(self, data: str) -> ScalarNode:
        foreign = yaml.SafeLoader("").resolve(ScalarNode, data, (True, False)) != _TAG + "str"
        return self.represent_scalar(_TAG + "str", data, style="'" if foreign else None)

    def represent_short_list(self, data: list[Any]) -> Node:
        flow = not any(isinstance(item, (dict, list)) for item in data)
        return self.represent_sequence(_TAG + "seq", data, flow_style=flow)


_Writer.add_representer(str, _Writer.represent_text)
_Writer.add_representer(list, _Writer.represent_short_list)


def dump_yaml(data: dict[str, Any]) -> str:
    text: str = yaml.dump(data, Dumper=_Writer)
    return text


def to_yaml(model: Config) -> str:
    """The whole config as YAML. Keys without effect are omitted, so that reading it back gives an equal config."""
    return dump_yaml(_effective(model))


def _effective(model: Config, parent_inactive: Collection[str] = ()) -> dict[str, Any]:
    """Values of a model without its inactive keys and without those that a parent section declares inactive."""
    plain = model.model_dump(mode="json")
    inactive = {*parent_inactive, *model.inactive()}
    result: dict[str, Any] = {}
    for name in type(model).model_fields:
        value = getattr(model, name)
        if name in inactive:
            continue
        if isinstance(value, Config):
            inner = _effective(value, [key.removeprefix(f"{name}.") for key in inactive if key.startswith(f"{name}.")])
            result |= {name: inner} if inner else {}
        else:
            result[name] = plain[name]
    return result
