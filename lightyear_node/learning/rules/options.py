"""Options of rules: their names and types, and the check of given values.

An option is a field of a rule's class, or a keyword parameter of a user's function.  Its type is
its annotation or, if a function has none, the type of its default.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from typing import Any

from lightyear_node.errors import ConfigError

KINDS: Mapping[str, tuple[type, ...]] = {
    "bool": (bool,),
    "int": (int,),
    "float": (int, float),
    "str": (str,),
    "None": (type(None),),
}
ARGUMENTS = ("own", "peers", "validation", "context")
"""Positional arguments of a user's function, before its options."""


def options_of_class(kind: Any) -> dict[str, str]:
    """Names of the options and their types as text: `float`, `int | None`."""
    return {field.name: _type_text(field.type) for field in fields(kind)}


def options_of_function(name: str, function: Callable[..., Any]) -> dict[str, str]:
    """The same for a user's function; raises `ConfigError` if its signature is not a rule's."""
    parameters = list(inspect.signature(function).parameters.values())
    given, rest = parameters[: len(ARGUMENTS)], parameters[len(ARGUMENTS) :]
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    if len(given) < len(ARGUMENTS) or any(parameter.kind not in positional for parameter in given):
        raise ConfigError(
            f"rule {name}: its function does not take ({', '.join(ARGUMENTS)})",
            hint="see docs/own-rule.md for what a rule looks like",
        )
    options: dict[str, str] = {}
    for parameter in rest:
        named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        if parameter.kind not in named or parameter.default is parameter.empty:
            raise ConfigError(
                f"rule {name}: `{parameter}` is no option",
                hint="every option is a keyword parameter with a default",
            )
        options[parameter.name] = _kind_of_parameter(name, parameter)
    return options


def check_options(name: str, known: Mapping[str, str], given: Mapping[str, Any]) -> None:
    """Raise `ConfigError` for an unknown option or a value of another type."""
    for option, value in given.items():
        if option not in known:
            message = f'rule {name} has no option "{option}"'
            raise ConfigError(message, hint=nearest(option, known))
        if not _is_a(value, known[option]):
            wanted = known[option].replace(" | ", " or ")
            article = "an" if wanted.startswith("int") else "a"
            raise ConfigError(f"rule {name}: {option} is {value!r}, not {article} {wanted}")


def nearest(word: str, known: Iterable[str]) -> str:
    """Hint for an unknown word: the nearest known one, or all."""
    words = list(known)
    near = difflib.get_close_matches(word, words, n=1)
    if near:
        return f'did you mean "{near[0]}"?'
    return "known: " + ", ".join(words) if words else "it has none"


def _is_a(value: Any, kind: str) -> bool:
    kinds = kind.split(" | ")
    if isinstance(value, bool):  # a subclass of int
        return "bool" in kinds
    return any(isinstance(value, KINDS[each]) for each in kinds)


def _kind_of_parameter(name: str, parameter: inspect.Parameter) -> str:
    if parameter.annotation is not parameter.empty:
        kind = _type_text(parameter.annotation)
    elif parameter.default is None:
        kind = " | ".join(KINDS)
    else:
        kind = type(parameter.default).__name__
    if not set(kind.split(" | ")) <= KINDS.keys():
        raise ConfigError(
            f"rule {name}: option {parameter.name} is a {kind}",
            hint="options are of type bool, int, float or str, or None",
        )
    return kind


def _type_text(annotation: Any) -> str:
    return annotation.__name__ if isinstance(annotation, type) else str(annotation)
