"""The small changes to a module's source that a test should detect.

Never changed: texts (strings with a blank, f-strings, arguments of `raise`), docstrings,
assertions, annotations, decorators, imports and `__all__`.  At the top level of a module or class
only constants change; types, tables and aliases stay.
"""

from __future__ import annotations

import ast
import copy
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import CodeType
from typing import Any

COMPARISONS: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
}
ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Pow: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}
FUNCTIONS = {"min": "max", "max": "min", "any": "all", "all": "any", "sorted": "list"}
OPPOSITE = {ast.And: ast.Or, ast.Or: ast.And}
ALREADY_CHANGED = (ast.Compare, ast.BoolOp, ast.UnaryOp)
"""Conditions with operators of their own; all others are negated as a whole."""
LONG, AROUND = 160, 40
FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(eq=False)
class Mutant:
    module: Path
    function: str
    """Dotted name; empty for module-level code."""
    line: int
    lines: range
    """Lines of the statement: a test that reaches none of them cannot detect the mutant."""
    before: str
    after: str
    name: str
    compiled: Callable[[], CodeType]


def mutants(path: Path, shown: str) -> Iterator[Mutant]:
    """All mutants of one module; `shown` is its name in reports."""
    tree = ast.parse(path.read_text())
    seen: Counter[str] = Counter()
    for change in _changes(tree):
        before, after = change.texts()
        name = f"{shown} {change.function or '(module)'}: {before} => {after}"
        seen[name] += 1
        if seen[name] > 1:
            name += f" ({seen[name]})"

        def compiled(change: _Change = change) -> CodeType:
            with change.made():
                return compile(tree, str(path), "exec", dont_inherit=True)

        first, last = change.statement.lineno, change.statement.end_lineno or 0
        body = getattr(change.statement, "body", None)
        if isinstance(body, list) and change.old is not change.statement:
            last = body[0].lineno  # only the head of an `if`, `for`, `while`, `with`
        line = getattr(change.old, "lineno", first)
        yield Mutant(
            path, change.function, line, range(first, last + 1), before, after, name, compiled
        )


@dataclass
class _Change:
    """Replaces a node by another: `holder.key`, or `holder[key]` in a list."""

    holder: Any
    key: Any
    old: ast.AST
    new: ast.AST
    statement: ast.stmt
    function: str

    @contextmanager
    def made(self) -> Iterator[None]:
        ast.copy_location(self.new, self.old)
        ast.fix_missing_locations(self.new)
        self._put(self.new)
        try:
            yield
        finally:
            self._put(self.old)

    def texts(self) -> tuple[str, str]:
        """The changed line, before and after."""
        if self.old is self.statement:
            return ast.unparse(self.old).splitlines()[0], ast.unparse(self.new).splitlines()[0]
        before = ast.unparse(self.statement).splitlines()
        with self.made():
            after = ast.unparse(self.statement).splitlines()
        differing = (pair for pair in zip(before, after, strict=False) if pair[0] != pair[1])
        return _excerpts(*next(differing))

    def _put(self, node: ast.AST) -> None:
        if isinstance(self.holder, list):
            self.holder[self.key] = node
        else:
            setattr(self.holder, self.key, node)


def _excerpts(before: str, after: str) -> tuple[str, str]:
    """Shorten long lines to the difference and some context."""
    if max(len(before), len(after)) <= LONG:
        return before, after
    same = _alike(before, after)
    same_end = _alike(before[same:][::-1], after[same:][::-1])
    first = max(0, same - AROUND)
    ends = (len(text) - same_end + AROUND for text in (before, after))
    one, other = (text[first:end] for text, end in zip((before, after), ends, strict=True))
    return f"…{one}…", f"…{other}…"


def _alike(one: str, other: str) -> int:
    """Length of the common prefix of two texts."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(one), len(other)))


@dataclass
class _Place:
    statement: ast.stmt
    function: str = ""
    scope: str = ""
    returns_bool: bool = False


def _changes(tree: ast.Module) -> Iterator[_Change]:
    for index, statement in enumerate(tree.body):
        yield from _visit(tree.body, index, statement, _Place(statement))


def _visit(holder: Any, key: Any, node: ast.AST, place: _Place) -> Iterator[_Change]:
    if _is_left_out(node, place):
        return
    if isinstance(node, ast.stmt):
        place = replace(place, statement=node)
    for new in _alternatives(node, place):
        yield _Change(holder, key, node, new, place.statement, place.function)
    if isinstance(node, ast.Raise):
        return
    if isinstance(node, (ast.ClassDef, *FUNCTION)):
        yield from _visit_definition(node, place)
        return
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "decorator_list"):
            continue
        if isinstance(value, ast.AST):
            yield from _visit(node, field, value, place)
        elif isinstance(value, list):
            for index, one in enumerate(value):
                if isinstance(one, ast.AST):
                    yield from _visit(value, index, one, place)


def _visit_definition(node: Any, place: _Place) -> Iterator[_Change]:
    scope = f"{place.scope}.{node.name}" if place.scope else node.name
    inside = replace(place, scope=scope)
    if isinstance(node, FUNCTION):
        for field in ("defaults", "kw_defaults"):
            values = getattr(node.args, field)
            for index, value in enumerate(values):
                if value is not None:
                    yield from _visit(values, index, value, place)
        if not place.function:  # one within another is a part of that
            returned = node.returns
            is_bool = isinstance(returned, ast.Name) and returned.id == "bool"
            inside = replace(inside, function=scope, returns_bool=is_bool)
    for index, statement in enumerate(node.body):
        yield from _visit(node.body, index, statement, inside)


def _is_left_out(node: ast.AST, place: _Place) -> bool:
    match node:
        case ast.Expr(ast.Call(ast.Name("assert_never"))):
            return True
        case ast.Assert() | ast.Import() | ast.ImportFrom() | ast.JoinedStr() | ast.pattern():
            return True
        case ast.Expr(ast.Constant()):  # a docstring, or `...`
            return True
        case ast.Assign([ast.Name("__all__")]):
            return True
        case ast.Assign() | ast.AnnAssign() if not place.function:
            return not any(isinstance(one, ast.Constant) for one in ast.walk(node.value or node))
    return False


def _alternatives(node: ast.AST, place: _Place) -> Iterator[ast.AST]:
    match node:
        case ast.Constant(bool() as value):
            yield ast.Constant(not value)
        case ast.Constant(int() | float() as value):
            yield ast.Constant(value + 1)
            yield ast.Constant(value - 1)
        case ast.Constant(str() as value) if value and " " not in value:
            yield ast.Constant(f"X{value}")
    if not place.function:
        return
    match node:
        case ast.Compare():
            for index, op in enumerate(node.ops):
                for other in COMPARISONS[type(op)]:
                    yield _with(node, ops=[*node.ops[:index], other(), *node.ops[index + 1 :]])
        case ast.BoolOp(op, values):
            yield _with(node, op=OPPOSITE[type(op)]())
            for index in range(len(values)):
                left = [*values[:index], *values[index + 1 :]]
                yield left[0] if len(left) == 1 else _with(node, values=left)
        case ast.UnaryOp(ast.Not(), operand):
            yield operand
        case ast.BinOp(op=op) if type(op) in ARITHMETIC:
            yield _with(node, op=ARITHMETIC[type(op)]())
        case ast.Call(ast.Name(name)) if name in FUNCTIONS:
            keywords = [] if name == "sorted" else node.keywords
            yield _with(node, func=ast.Name(FUNCTIONS[name], ast.Load()), keywords=keywords)
        case ast.comprehension() if node.ifs:
            yield _with(node, ifs=[])
        case ast.Slice():
            for bound in ("lower", "upper"):
                if getattr(node, bound) is not None:
                    yield _with(node, **{bound: None})
        case ast.Return(value) if value is not None:
            if not isinstance(value, ast.Constant):
                truths = (True, False) if place.returns_bool else (None,)
                yield from (_with(node, value=ast.Constant(truth)) for truth in truths)
        case ast.Expr(ast.Call() | ast.Await()):
            yield ast.Pass()
        case ast.Assign(targets) if not all(isinstance(one, ast.Name) for one in targets):
            yield ast.Pass()
        case ast.AnnAssign(ast.Attribute()):
            yield ast.Pass()
        case ast.AugAssign(op=op) if type(op) in ARITHMETIC:
            yield ast.Pass()
            yield _with(node, op=ARITHMETIC[type(op)]())
        case ast.Delete() | ast.Raise() | ast.Break() | ast.Continue():
            yield ast.Pass()
        case ast.If(test=test) | ast.IfExp(test=test) | ast.While(test=test):
            if not isinstance(test, ALREADY_CHANGED):
                yield _with(node, test=ast.UnaryOp(ast.Not(), test))


def _with(node: ast.AST, **fields: Any) -> ast.AST:
    changed = copy.copy(node)
    for field, value in fields.items():
        setattr(changed, field, value)
    return changed
