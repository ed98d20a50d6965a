"""Options of rules: which there are, of which kinds, and whether given values are such.

An option is a field of a rule's class, or a keyword parameter of a user's function.  Its kind is
its annotation, or, where a function has none, that of its default.
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
ARGUMENTS = ("own", "peers", "probe", "turn")
"""What a user's function is given, in this order, before its options."""


def options_of_class(kind: Any) -> dict[str, str]:
    """The names of the options, and each one's kind in words: `float`, `int | None`."""
    return {field.name: _in_words(field.type) for field in fields(kind)}


def options_of_function(name: str, function: Callable[..., Any]) -> dict[str, str]:
    """The same for a user's function; raises `ConfigError` if it is not made as a rule is."""
    parameters = list(inspect.signature(function).parameters.values())
    given, rest = parameters[: len(ARGUMENTS)], parameters[len(ARGUMENTS) :]
    by_place = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    if len(given) < len(ARGUMENTS) or any(parameter.kind not in by_place for parameter in given):
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
    """Raise `ConfigError` for an option that does not exist, or a value of another kind."""
    for option, value in given.items():
        if option not in known:
            message = f'rule {name} has no option "{option}"'
            raise ConfigError(message, hint=nearest(option, known))
        if not _is_a(value, known[option]):
            wanted = known[option].replace(" | ", " or ")
            article = "an" if wanted.startswith("int") else "a"
            raise ConfigError(f"rule {name}: {option} is {value!r}, not {article} {wanted}")


def nearest(word: str, known: Iterable[str]) -> str:
    """A hint for a word that is not among the known ones."""
    words = list(known)
    near = difflib.get_close_matches(word, words, n=1)
    if near:
        return f'did you mean "{near[0]}"?'
    return "known: " + ", ".join(words) if words else "it has none"


def _is_a(value: Any, kind: str) -> bool:
    kinds = kind.split(" | ")
    if isinstance(value, bool):  # which Python counts among the integers
        return "bool" in kinds
    return any(isinstance(value, KINDS[each]) for each in kinds)


def _kind_of_parameter(name: str, parameter: inspect.Parameter) -> str:
    if parameter.annotation is not parameter.empty:
        kind = _in_words(parameter.annotation)
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


def _in_words(annotation: Any) -> str:
    return annotation.__name__ if isinstance(annotation, type) else str(annotation)
