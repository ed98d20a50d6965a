"""House rules over the source: module names, sizes, construction, wording, what tests touch.

Each rule is a function from sources to violations, and is first shown to find a planted one.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import cache

import pytest

from tests.support.paths import PACKAGE, ROOT

FUNCTION_LINES_MAX = 70
COLLABORATORS_MAX = 8

METAPHORS = (
    r"anew",
    r"borrow(s|ed|ing)?",
    r"desks?",
    r"doors?",
    r"everybody(?:'s)?",
    r"goes home",
    r"in words",
    r"knock(s|ed|ing)?",
    r"lend(s|ing)?",
    r"mischief",
    r"nobody(?:'s)?",
    r"said",
    r"shelf|shelves",
    r"somebody(?:'s)?",
    r"stor(y|ies)",
    r"told",
    r"turned away",
    r"wards?",
    r"who(m)?ever",
)
"""Words that docstrings and comments do not use: metaphors, and machines spoken of as people."""

PRIVATE_USES_ALLOWED = {
    "sim/planted.py": "a planted bug is a change of the implementation",
    "support/module_hooks.py": "torch has no public accessor for hooks",
}
"""Test modules that may touch private attributes, and why."""
DOCUMENTED = {"_exit", "_replace"}
"""Names with an underscore that the standard library documents."""
PATCHING = {"delattr", "getattr", "hasattr", "object", "patch", "setattr"}
"""Functions that take an attribute's name as a string."""

Sources = Mapping[str, str]
"""The text of each module by its path below its folder, such as `node/daemon.py`."""


@cache
def package_sources() -> Sources:
    """Every module of the package except the generated ones."""
    paths = sorted(PACKAGE.rglob("*.py"))
    texts = {path.relative_to(PACKAGE).as_posix(): path.read_text() for path in paths}
    return {name: text for name, text in texts.items() if not name.startswith("v1/")}


@cache
def sources_of_tests() -> Sources:
    paths = sorted((ROOT / "tests").rglob("*.py"))
    return {path.relative_to(ROOT / "tests").as_posix(): path.read_text() for path in paths}


@cache
def parse(source: str) -> ast.Module:
    return ast.parse(source)


def classes(sources: Sources) -> Iterator[tuple[str, ast.ClassDef]]:
    for path, source in sources.items():
        for node in ast.walk(parse(source)):
            if isinstance(node, ast.ClassDef):
                yield path, node


# --- the rules -----------------------------------------------------------------------------------


def unnamed_modules(sources: Sources, map_page: str) -> list[str]:
    """Find modules named neither in the code of the map page nor in their folder's docstring."""
    in_map = set(re.findall(r"\w+", " ".join(re.findall(r"```.*?```|`[^`]+`", map_page, re.S))))
    unnamed = []
    for path in sources:
        folder, _, file = path.rpartition("/")
        name = file.removesuffix(".py")
        if name in {"__init__", "__main__"} or name in in_map:
            continue
        init = sources.get(f"{folder}/__init__.py" if folder else "__init__.py", "")
        docstring = ast.get_docstring(parse(init)) or ""
        listed = re.findall(r"`([^`]+)`|^\s*(\w+)", docstring, re.MULTILINE)
        if name not in re.findall(r"\w+", " ".join(" ".join(pair) for pair in listed)):
            unnamed.append(path)
    return unnamed


def repeated_class_names(sources: Sources) -> list[str]:
    counts = Counter(node.name for _, node in classes(sources))
    return [name for name, count in counts.items() if count > 1]


def long_functions(sources: Sources) -> list[str]:
    found = []
    for path, source in sources.items():
        for node in ast.walk(parse(source)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines > FUNCTION_LINES_MAX:
                    found.append(f"{path}: {node.name} has {lines} lines")
    return found


def large_constructors(sources: Sources) -> list[str]:
    """Find constructors with too many parameters.  Plain data records are exempt."""
    found = []
    for path, node in classes(sources):
        count = len(constructor_parameters(node))
        if count > COLLABORATORS_MAX and not is_data_record(node):
            found.append(f"{path}: {node.name} takes {count}")
    return found


def constructor_parameters(node: ast.ClassDef) -> list[str]:
    init = methods(node).get("__init__")
    if init is not None:
        arguments = init.args
        return [
            one.arg for one in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)
        ][1:]
    return dataclass_fields(node) if decorator(node, "dataclass") is not None else []


def dataclass_fields(node: ast.ClassDef) -> list[str]:
    """List the fields that must be given; one with a default is state, not a collaborator."""
    return [
        ast.unparse(one.target)
        for one in node.body
        if isinstance(one, ast.AnnAssign)
        and "ClassVar" not in ast.unparse(one.annotation)
        and one.value is None
    ]


def is_data_record(node: ast.ClassDef) -> bool:
    """Tell whether this is a frozen dataclass, a named tuple or a pydantic model."""
    if any(base.split(".")[-1] in {"BaseModel", "NamedTuple", "Strict"} for base in bases(node)):
        return True
    return "frozen=True" in (decorator(node, "dataclass") or "")


def late_attributes(sources: Sources) -> list[str]:
    """Find attributes that come into being after construction.

    Methods that the constructor calls on self belong to the construction.
    """
    by_name = {node.name: node for _, node in classes(sources)}
    found = []
    for path, node in classes(sources):
        known = known_attributes(node, by_name)
        for name, method in methods(node).items():
            late = sorted(assigned_to_self(method) - known)
            found.extend(f"{path}: {node.name}.{name} creates self.{one}" for one in late)
    return found


def known_attributes(node: ast.ClassDef, by_name: Mapping[str, ast.ClassDef]) -> set[str]:
    """Collect what the constructors and the bodies of a class and its bases define."""
    known = set()
    for base in bases(node):
        if base in by_name and base != node.name:
            known |= known_attributes(by_name[base], by_name)
    known |= set(methods(node))  # properties with a setter
    for method in construction(node):
        known |= assigned_to_self(method)
    for one in node.body:
        if isinstance(one, ast.Assign):
            known |= {ast.unparse(target) for target in one.targets}
        elif isinstance(one, ast.AnnAssign) and (
            one.value is not None or decorator(node, "dataclass") is not None
        ):
            known.add(ast.unparse(one.target))
    return known


def construction(node: ast.ClassDef) -> list[ast.AST]:
    """List the constructor and the methods that it calls on self, directly or not."""
    own, reached = methods(node), ["__init__", "__post_init__"]
    for name in reached:
        for call in ast.walk(own.get(name, ast.Pass())):
            match call:
                case ast.Call(func=ast.Attribute(value=ast.Name(id="self"), attr=called)):
                    if called not in reached:
                        reached.append(called)
    return [own[name] for name in reached if name in own]


def assigned_to_self(method: ast.AST) -> set[str]:
    return {
        node.attr
        for node in ast.walk(method)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    }


def methods(node: ast.ClassDef) -> dict[str, ast.FunctionDef | ast.AsyncFunctionDef]:
    return {
        one.name: one
        for one in node.body
        if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)
    }


def bases(node: ast.ClassDef) -> list[str]:
    return [ast.unparse(base).split("[")[0] for base in node.bases]


def decorator(node: ast.ClassDef, name: str) -> str | None:
    """Return the decorator's text, with its arguments."""
    texts = [ast.unparse(one) for one in node.decorator_list]
    return next((text for text in texts if text.split("(")[0].split(".")[-1] == name), None)


def metaphors(sources: Sources) -> list[str]:
    """Find words of the list above in docstrings and comments."""
    pattern = re.compile(rf"\b(?:{'|'.join(METAPHORS)})\b", re.IGNORECASE)
    found = []
    for path, source in sources.items():
        for line, text in prose(source):
            found.extend(f"{path}:{line}: {hit[0]}" for hit in pattern.finditer(text))
    return found


def private_uses(sources: Sources) -> list[str]:
    """Find private attributes of other objects that are used, imported or patched by name."""
    found = []
    for path, source in sources.items():
        own = own_attributes(source)
        for node in ast.walk(parse(source)):
            names = [] if id(node) in own else used_names(node)
            hits = [name for name in names if is_private(name)]
            found.extend(f"{path}:{node.lineno}: {name}" for name in hits)
    return found


def own_attributes(source: str) -> set[int]:
    """Collect the nodes that are an attribute of `self` or `cls` within a class."""
    return {
        id(node)
        for outer in ast.walk(parse(source))
        if isinstance(outer, ast.ClassDef)
        for node in ast.walk(outer)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id in {"self", "cls"}
    }


def used_names(node: ast.AST) -> list[str]:
    """List the names that a node takes from another object or module."""
    match node:
        case ast.Attribute(attr=name):
            return [name]
        case ast.ImportFrom(names=imported):
            return [one.name for one in imported]
        case ast.Call(func=ast.Name(id=function) | ast.Attribute(attr=function), args=arguments):
            texts = [one.value for one in arguments if isinstance(one, ast.Constant)]
            if function in PATCHING:
                return [text.split(".")[-1] for text in texts if isinstance(text, str)]
    return []


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name not in DOCUMENTED


def prose(source: str) -> Iterator[tuple[int, str]]:
    """Yield every comment and every string that stands alone, with its line; without code spans."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], without_code(token.string)
    for node in ast.walk(parse(source)):
        match node:
            case ast.Expr(value=ast.Constant(value=str(text))):
                for offset, line in enumerate(without_code(text).splitlines()):
                    yield node.lineno + offset, line


def without_code(text: str) -> str:
    return re.sub(r"`[^`]*`", lambda span: "\n" * span[0].count("\n"), text)


# --- each rule finds a planted violation ---------------------------------------------------------


def parameters(count: int) -> str:
    return ", ".join(f"part_{index}" for index in range(count))


def test_a_module_that_no_page_names_is_found() -> None:
    sources = {
        "__init__.py": "",
        "types.py": "",
        "node/__init__.py": '"""The daemon: `listed`.\n\n    indented   a module\n"""',
        "node/listed.py": "",
        "node/indented.py": "",
        "node/mapped.py": "",
        "node/forgotten.py": "",
    }
    map_page = "forgotten in prose\n| `types.py` | values |\n```\nnode/mapped.py\n```\n"
    assert unnamed_modules(sources, map_page) == ["node/forgotten.py"]


def test_a_repeated_class_name_is_found() -> None:
    sources = {"a.py": "class Site: ...\nclass Peer: ...", "b.py": "class Site: ..."}
    assert repeated_class_names(sources) == ["Site"]


def test_a_long_function_is_found() -> None:
    fits = "def fits():\n" + "    pass\n" * (FUNCTION_LINES_MAX - 1)
    long = "class A:\n    async def long(self):\n" + "        pass\n" * FUNCTION_LINES_MAX
    assert long_functions({"a.py": fits + long}) == ["a.py: long has 71 lines"]


@pytest.mark.parametrize(
    ("source", "found"),
    [
        (f"class A:\n    def __init__(self, {parameters(8)}): ...", False),
        (f"class A:\n    def __init__(self, {parameters(9)}): ...", True),
        (f"class A:\n    def __init__(self, *, {parameters(9)}): ...", True),
        ("@dataclass\nclass A:\n" + "".join(f"    a{i}: int\n" for i in range(9)), True),
        ("@dataclass(frozen=True)\nclass A:\n" + "    a: int\n" * 9, False),
        ("class A(pydantic.BaseModel):\n" + "    a: int\n" * 9, False),
        ("@dataclass\nclass A:\n" + "    a: int\n" * 8 + "    state: int = 0\n", False),
    ],
)
def test_a_large_constructor_is_found(source: str, found: bool) -> None:
    assert large_constructors({"a.py": source}) == (["a.py: A takes 9"] if found else [])


def test_an_attribute_created_after_construction_is_found() -> None:
    source = """
class Base:
    inherited = 0
    def __init__(self):
        self.born, self.pair = 1, 2
        self._restore()
    def _restore(self):
        self.restored = 3
class A(Base):
    declared: int
    def run(self):
        self.born = self.inherited = self.pair = self.restored = 2
        self.late, other.fine = 3, 4
    def stop(self):
        self.declared = 4
"""
    assert late_attributes({"a.py": source}) == [
        "a.py: A.run creates self.late",
        "a.py: A.stop creates self.declared",
    ]


def test_a_metaphor_in_a_docstring_or_a_comment_is_found() -> None:
    source = '''
"""Nobody is told.

Only `nobody` in code is a name; towards and stored are other words.
"""
DOOR = "a door"  # behind the door
'''
    assert sorted(metaphors({"a.py": source})) == [
        "a.py:2: Nobody",
        "a.py:2: told",
        "a.py:6: door",
    ]


def test_a_private_attribute_of_another_object_is_found() -> None:
    source = """
from lightyear_node.node import daemon, _hidden
class Fake:
    def run(self):
        self._own = os._exit
        self.other._used = 1
def patched(self):
    self._outside_a_class
monkeypatch.setattr(daemon, "_patched", 1)
monkeypatch.setattr("lightyear_node.node._by_path", 1)
print("_a_text", daemon.__name__, daemon.public)
"""
    assert private_uses({"a.py": source}) == [
        "a.py:2: _hidden",
        "a.py:9: _patched",
        "a.py:10: _by_path",
        "a.py:8: _outside_a_class",
        "a.py:6: _used",
    ]


# --- the package and its tests keep the rules ----------------------------------------------------


def test_every_module_is_named_in_the_architecture_or_its_folder() -> None:
    assert unnamed_modules(package_sources(), (ROOT / "ARCHITECTURE.md").read_text()) == []


def test_no_class_name_stands_twice_in_the_package() -> None:
    assert repeated_class_names(package_sources()) == []


def test_no_function_is_longer_than_seventy_lines() -> None:
    assert long_functions(package_sources()) == []


def test_no_constructor_takes_more_than_eight_collaborators() -> None:
    assert large_constructors(package_sources()) == []


def test_every_attribute_is_created_by_its_constructor() -> None:
    assert late_attributes(package_sources()) == []


@pytest.mark.parametrize("sources", [package_sources, sources_of_tests])
def test_docstrings_and_comments_use_no_metaphors(sources: Callable[[], Sources]) -> None:
    assert metaphors(sources()) == []


def test_tests_touch_no_private_attributes() -> None:
    uses = private_uses(sources_of_tests())
    assert [use for use in uses if use.split(":")[0] not in PRIVATE_USES_ALLOWED] == []


@pytest.mark.parametrize("name", PRIVATE_USES_ALLOWED)
def test_every_exception_for_private_attributes_is_needed(name: str) -> None:
    assert private_uses({name: sources_of_tests()[name]}) != []
