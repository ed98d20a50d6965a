"""The report folder: complete, safe in a browser, and deterministic."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from lightyear_node.errors import ConfigError
from lightyear_node.lab.experiment_report import write_report
from tests.support.invented_results import job, verdict, write

HOSTILE = "<script>alert('1')</script>\"&"
VERDICTS = {"honest": {"ok": 3}, "malfunctioning": {"too_far": 2}}


class Outline(HTMLParser):
    """Collects what a page would load; checks that its tags are closed in order."""

    VOID = frozenset({"meta", "img", "source", "br"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.links: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [v or "" for k, v in attrs if k in ("src", "href", "srcset")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def experiment(folder: Path, label: str = "krum") -> Path:
    lines = [
        job("local", [0.4] * 8),
        job("krum", [0.6] * 8, label=label),
        *(
            job("krum", [0.5] * 8, label=label, malfunction="sfa", bad=bad, verdicts=VERDICTS)
            for bad in (1, 7)
        ),
        {**job("afa", [0.1] * 8, label=label), "failed": f"it broke {label}"},
    ]
    write(folder, [{**line, "suite": f"suite {label}"} for line in lines])
    write(folder, [verdict("none", 0.9, 0.2), verdict("sfa", 0.4, 2.0)], "acceptance.jsonl")
    manifest = {
        "suite": {"text": f"name: x\nabout: {label}\n", "sha256": "ab" * 32},
        "seeds": [0],
        "versions": {label: label},
    }
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


@pytest.fixture(scope="module")
def reported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = experiment(tmp_path_factory.mktemp("experiment"))
    assert write_report(folder) == folder / "report.html"
    return folder


def content(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def test_all_files_are_written(reported: Path) -> None:
    found = set(content(reported))
    figures = {"box", "curves-femnist-main", "acceptance-femnist-main", "agreement"}
    figures.add("communication")
    assert found == {
        *("results.jsonl", "acceptance.jsonl", "manifest.json", "report.html"),
        *("table.md", "table.csv", "table.tex"),
        *(f"figures/{name}.{kind}" for name in figures for kind in ("png", "svg")),
    }
    text = (reported / "report.html").read_text()
    for part in (
        *("50.0 / 71.4", "not comparable one to one", "it broke krum", "femnist, main: verdicts"),
        *("minus local-only training", "prefers-color-scheme: dark", "name: x\nabout: krum"),
    ):
        assert part in text
    assert "4 finished runs on femnist; 1 seed; 1 failed" in text


def test_the_page_has_no_script_and_no_request(reported: Path) -> None:
    text = (reported / "report.html").read_text()
    outline = Outline(text)
    assert outline.open == []
    assert outline.links
    assert all(link.startswith("data:image/svg+xml;base64,") for link in outline.links)
    assert not {"script", "link", "iframe", "object"} & set(outline.tags)
    assert not re.search(r"https?:|url\(|@import", text)
    assert "default-src 'none'" in text


def test_texts_from_files_are_escaped(reported: Path, tmp_path: Path) -> None:
    plain = Outline((reported / "report.html").read_text())
    text = write_report(experiment(tmp_path, HOSTILE)).read_text()
    assert "<script" not in text
    assert "&lt;script&gt;" in text
    assert Outline(text).tags == plain.tags


def test_a_second_report_has_the_same_bytes(reported: Path) -> None:
    before = content(reported)
    write_report(reported)
    assert content(reported) == before


def test_the_results_file_alone_is_enough(tmp_path: Path) -> None:
    write(tmp_path, [job("krum", [0.5, None], update_bytes=None)])
    text = write_report(tmp_path).read_text()
    assert "50.0 †1" in text
    assert "<img" not in text


def test_an_experiment_whose_jobs_all_failed_still_has_a_page(tmp_path: Path) -> None:
    write(tmp_path, [{**job("krum", [0.5]), "failed": "no memory"}])
    text = write_report(tmp_path).read_text()
    assert "no memory" in text
    assert "0 finished runs" in text


@pytest.mark.parametrize(("planned", "shown"), [(7, True), (4, False), ("many", False)])
def test_an_unfinished_suite_says_how_many_runs_are_missing(
    planned: object, shown: bool, tmp_path: Path
) -> None:
    folder = experiment(tmp_path)  # four runs, and one that failed
    (folder / "manifest.json").write_text(json.dumps({"jobs": planned}))
    write_report(folder)
    for name in ("table.md", "table.tex", "report.html"):
        text = (folder / name).read_text()
        assert ("Incomplete: 4 of 7 runs have a result." in text) == shown
        assert ("Incomplete" in text) == shown


def test_a_damaged_manifest_is_refused(tmp_path: Path) -> None:
    write(tmp_path, [job("krum", [0.5])])
    (tmp_path / "manifest.json").write_text("{")
    with pytest.raises(ConfigError, match="not a manifest"):
        write_report(tmp_path)


def test_without_matplotlib_the_error_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match="matplotlib is not installed") as caught:
        write_report(experiment(tmp_path))
    assert caught.value.hint is not None
    assert "lightyear-node[demo]" in caught.value.hint
    assert not (tmp_path / "table.md").exists()


def test_the_report_never_loads_torch(tmp_path: Path) -> None:
    write(tmp_path, [job("krum", [0.5, 0.6])])
    code = (
        "import sys, pathlib; from lightyear_node.lab.experiment_report import write_report;"
        "write_report(pathlib.Path(sys.argv[1])); print('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "False"
