"""Validation of a configuration file; the error names the first wrong value and its line."""

from __future__ import annotations

import difflib
import json
import types
import typing
from typing import Annotated, Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from lightyear_node.config import strict_yaml
from lightyear_node.config.fields import PATTERN_WORDS

Model = typing.TypeVar("Model", bound=BaseModel)


def validated(model: type[Model], values: dict[str, Any], document: strict_yaml.Document) -> Model:
    """Build the record; raises a `ConfigError` that names the line and what to do."""
    try:
        return model.model_validate(values)
    except ValidationError as problem:
        first = _most_helpful(problem)
        where = first["loc"]
        if first["type"] == "duplicate_peer":
            where = ("peers", first["ctx"]["index"])
            raise document.error(where, first["msg"], hint="keep one of them") from None
        key = ".".join(str(part) for part in where)
        if first["type"] == "extra_forbidden":
            raise document.error(where, *_unknown_key(model, where)) from None
        if first["type"] == "missing":
            raise document.error(where, f"`{key}` is missing", hint="add that key") from None
        message = first["msg"].removeprefix("Value error, ")
        shown = _shown(first.get("input"))
        if first["type"] == "string_pattern_mismatch":
            message = PATTERN_WORDS.get(first["ctx"]["pattern"], message)
        text = f"`{key}`: {message}{shown}" if key else message
        raise document.error(where, text, hint="correct that value") from None


def table_in(annotation: Any) -> type[BaseModel] | None:
    """The model in an annotation such as `Rule`, `Rule | None` or `tuple[Peer, ...]`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if typing.get_origin(annotation) in (tuple, types.UnionType, typing.Union, Annotated):
        found = (table_in(argument) for argument in typing.get_args(annotation))
        return next((model for model in found if model), None)
    return None


def _most_helpful(problem: ValidationError) -> ErrorDetails:
    """The first error; but an unknown key before a missing one: it is probably misspelt."""
    errors = problem.errors()
    if errors[0]["type"] == "missing":
        return next((one for one in errors if one["type"] == "extra_forbidden"), errors[0])
    return errors[0]


def _shown(value: object) -> str:
    plain = isinstance(value, str | int | float | bool)
    return f" (it is {json.dumps(value)[:80]})" if plain else ""


def _unknown_key(model: type[BaseModel], where: tuple[str | int, ...]) -> tuple[str]:
    known = list(_table_at(model, where[:-1]).model_fields)
    key = str(where[-1])
    nearest = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    advice = f"did you mean `{nearest[0]}`?" if nearest else f"known keys: {', '.join(known)}"
    return (f"unknown key `{key[:80]}`: {advice}",)


def _table_at(model: type[BaseModel], where: tuple[str | int, ...]) -> type[BaseModel]:
    for part in where:
        if isinstance(part, str) and part in model.model_fields:
            model = table_in(model.model_fields[part].annotation) or model
    return model
