"""A strict YAML parser whose errors name the line.

Stricter than YAML: at most 1 MiB, no aliases, no tags, no duplicate keys, limited nesting and
numbers.  An alias can expand a small file without bound, a tag can change the meaning of a value,
and a duplicate key hides one of two values.  The keys' meaning is not known here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from lightyear_node.errors import ConfigError

FILE_BYTES_MAX = 1 << 20
DEPTH_MAX = 16
NUMBER_BITS_MAX = 64
"""No setting needs more; Python refuses to print very long numbers."""

KeyPath = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class Document:
    """The plain values of a file, and the line of each."""

    path: Path
    values: dict[str, Any]
    lines: Mapping[KeyPath, int]

    def error(self, where: KeyPath, message: str, *, hint: str | None = None) -> ConfigError:
        line = next(
            (self.lines[where[:n]] for n in range(len(where), 0, -1) if where[:n] in self.lines), 1
        )
        return ConfigError(f"{self.path}:{line}: {message}", hint=hint)


def read(path: Path) -> Document:
    text = _read_text(path)
    try:
        root = yaml.compose(text, Loader=_Loader)
        lines: dict[KeyPath, int] = {}
        values = {} if root is None else _plain(root, (), lines, path)
    except yaml.MarkedYAMLError as problem:
        line = problem.problem_mark.line + 1 if problem.problem_mark else 1
        raise ConfigError(
            f"{path}:{line}: {problem.problem or 'this is not valid YAML'}",
            hint="correct that line; text that begins with a bracket needs quotes, as in"
            ' "[2001:db8::1]:7443"',
        ) from None
    except (yaml.YAMLError, ValueError, ArithmeticError) as problem:
        raise ConfigError(f"{path}: not valid YAML: {_one_line(problem)}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path}:1: expected `key: value` lines at the top level")
    return Document(path, values, lines)


def _read_text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            raw = file.read(FILE_BYTES_MAX + 1)
    except FileNotFoundError:
        raise ConfigError(
            f"{path}: no such file",
            hint="check the path; `lightyear-node peers add` makes a peers.yaml",
        ) from None
    except OSError as problem:
        raise ConfigError(
            f"{path}: cannot be read: {problem.strerror}", hint="check its owner and mode"
        ) from None
    if len(raw) > FILE_BYTES_MAX:
        raise ConfigError(
            f"{path}: larger than 1 MiB", hint="a federation's file is a few kilobytes: wrong file?"
        )
    try:
        return raw.decode()
    except UnicodeDecodeError as problem:
        line = raw.count(b"\n", 0, problem.start) + 1
        raise ConfigError(f"{path}:{line}: not UTF-8 text", hint="save it as UTF-8") from None


class _Loader(yaml.SafeLoader):
    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            raise yaml.MarkedYAMLError(
                problem="aliases (`*name`) are not allowed: write the value out",
                problem_mark=self._here(),
            )
        if getattr(self.peek_event(), "tag", None) is not None:  # type: ignore[no-untyped-call]
            raise yaml.MarkedYAMLError(
                problem="tags (`!name`) are not allowed: write the plain value",
                problem_mark=self._here(),
            )
        self.depth += 1
        if self.depth > DEPTH_MAX:
            raise yaml.MarkedYAMLError(problem="nested too deeply", problem_mark=self._here())
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def _here(self) -> yaml.Mark:
        mark: yaml.Mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
        return mark


def _plain(node: yaml.Node, where: KeyPath, lines: dict[KeyPath, int], path: Path) -> Any:
    line = node.start_mark.line + 1
    lines.setdefault(where, line)
    if isinstance(node, yaml.MappingNode):
        mapping: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key_line = key_node.start_mark.line + 1
            if not isinstance(key_node, yaml.ScalarNode):
                raise ConfigError(f"{path}:{key_line}: a key must be a plain word")
            key = str(key_node.value)
            if key in mapping:
                raise ConfigError(
                    f"{path}:{key_line}: key `{key}` appears twice", hint="keep one of them"
                )
            lines[(*where, key)] = key_line
            mapping[key] = _plain(value_node, (*where, key), lines, path)
        return mapping
    if isinstance(node, yaml.SequenceNode):
        return [_plain(item, (*where, index), lines, path) for index, item in enumerate(node.value)]
    value = scalar(node)
    if isinstance(value, int) and value.bit_length() > NUMBER_BITS_MAX:
        raise ConfigError(f"{path}:{line}: a number of more than {NUMBER_BITS_MAX} bits")
    return value


def scalar(node: yaml.Node) -> Any:
    """The value of a scalar by YAML's rules: number, boolean, null or text."""
    return yaml.SafeLoader("").construct_object(node, deep=True)


def parse_scalar(text: str) -> Any:
    """Parse the value of an environment variable as YAML."""
    try:
        root = yaml.compose(text, Loader=_Loader)
        return None if root is None else _plain(root, (), {}, Path("environment"))
    except (yaml.YAMLError, ValueError, ArithmeticError):
        return text


def _one_line(problem: Exception) -> str:
    return " ".join(str(problem).split())[:200]
