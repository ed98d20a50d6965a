"""What `import lightyear_node` offers: twelve names, each loaded on first use; and the verbs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import lightyear_node
from tests.support.paths import ROOT

NEED_TORCH = {"Candidate", "Judgement", "ntk_agreement"}
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))]


def test_the_public_names_are_exactly_these() -> None:
    assert set(lightyear_node.__all__) == {
        "Candidate", "Judgement", "LightyearError", "Reason", "Task", "Verdict", "__version__",
        "load_task", "ntk_agreement", "partition", "read_results", "simulate",
    }  # fmt: skip
    assert set(lightyear_node.__all__) <= set(dir(lightyear_node))


@pytest.mark.parametrize("name", lightyear_node.__all__)
def test_every_public_name_can_be_imported(name: str) -> None:
    if name in NEED_TORCH:
        pytest.importorskip("torch")
    value = getattr(lightyear_node, name)
    assert getattr(value, "__name__", name) == name


def test_the_training_verbs_are_exactly_these() -> None:
    training = pytest.importorskip("lightyear_node.training")
    assert set(training.__all__) == {
        "init",
        "patch",
        "progress",
        "receive",
        "running",
        "send",
        "state",
    }
    page = (ROOT / "docs/training-scripts.md").read_text()
    assert all(f"`ly.{name}" in page for name in training.__all__)


def test_another_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'learn'"):
        lightyear_node.learn  # noqa: B018


def test_only_names_that_need_torch_load_it() -> None:
    names = sorted(set(lightyear_node.__all__) - NEED_TORCH)
    program = (
        f"from lightyear_node import {', '.join(names)}; import sys; print('torch' in sys.modules)"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert ended.stdout == "False\n"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_pages_import_public_names_only(page: Path) -> None:
    text = page.read_text()
    modules = re.findall(r"^\s*(?:from|import) (lightyear_node\.[\w.]+)", text, re.MULTILINE)
    assert set(modules) <= {"lightyear_node.training"}
    for names in re.findall(r"^\s*from lightyear_node import (.*)$", text, re.MULTILINE):
        assert set(re.findall(r"\w+", names)) <= set(lightyear_node.__all__)
