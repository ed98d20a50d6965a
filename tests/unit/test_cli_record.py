"""`rounds`, `explain` and `audit` on the journals of three sites that have run some rounds."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path

import pytest

from lightyear_node.audit.export import read_export
from lightyear_node.audit.reasons import WORDS
from lightyear_node.barrier import Memory
from lightyear_node.cli.rounds import _in_short
from lightyear_node.errors import ConfigError, JournalCorrupt
from lightyear_node.joining import Joined
from lightyear_node.journal import reading
from lightyear_node.peers_file import add_peers
from lightyear_node.records import Generation, PeerName, Reason, Round, Update
from tests.unit.annals import (
    FEDERATION,
    IDENTITIES,
    Annalist,
    alter,
    digest,
    run_rounds,
    three_sites,
)
from tests.unit.desk import data_of, ran, refused, told
from tests.unit.test_cli import failure

A, B, C = (PeerName(f"site-{letter}") for letter in "abc")
JOURNAL = "state/journal.db"


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("written")
    for site in three_sites(folder).values():
        site.close()
    return folder


@pytest.fixture
def sites(written: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(written, tmp_path / "sites"))


@pytest.fixture
def home(sites: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """We are at site-a."""
    monkeypatch.chdir(sites / A)
    return sites / A


# What happened.


def test_rounds_are_listed_in_every_format(home: Path) -> None:
    listed = data_of("rounds", "list")
    assert [entry["round"] for entry in listed] == [0, 1, 2]
    assert {entry["state"] for entry in listed} == {"completed"}
    assert [(one["accepted"], one["rejected"], one["missing"]) for one in listed] == [(1, 1, 0)] * 3
    assert listed[2]["model"] == digest("merged", A, 2)
    lines = told("rounds", "list", "--format", "jsonl").splitlines()
    assert [json.loads(line) for line in lines] == listed
    table = told("rounds", "list").splitlines()
    assert len(table) == 4
    assert "loss 1.5 → 1.25" in table[1]


def test_a_round_is_shown_with_every_verdict(home: Path) -> None:
    shown = data_of("rounds", "show", "1")
    assert shown["update"]["digest"] == digest(A, 1)
    verdicts = {verdict["peer"]: verdict for verdict in shown["verdicts"]}
    assert (verdicts[B]["fate"], verdicts[C]["fate"]) == ("accepted", "rejected")
    assert shown["heads"][B]["seq"] > 0
    text = told("rounds", "show", "1")
    assert "merged into our model: site-b" in text
    assert "too_far" in text
    assert json.loads(told("rounds", "show", "1", "--format", "jsonl")) == shown


def test_a_verdict_is_explained_number_by_number(home: Path) -> None:
    data = data_of("explain", "--round", "1", "--peer", C)
    assert (data["reason"], data["accepted"], data["score"], data["weight"]) == (
        "too_far",
        False,
        0.81,
        0.0,
    )
    assert (data["threshold"], data["digest"]) == (0.6, digest(C, 1))
    holds = {line["name"]: line["holds"] for line in data["guard"]}
    assert holds == {"distance": False, "agreement": True, "regret": True}
    assert data["why"] == "all 2 peers delivered"
    text = told("explain", "--round", "1", "--peer", C)
    assert WORDS[Reason.TOO_FAR].about in text
    assert WORDS[Reason.TOO_FAR].advice in text
    assert "1.9, at most 0.5 ✗" in text
    accepted = data_of("explain", "--round", "2", "--peer", B)
    assert (accepted["generation"], accepted["update_round"]) == (0, 2)
    assert accepted["weight"] == pytest.approx(1 / 3)


def test_what_the_merge_did_is_told(home: Path) -> None:
    """A merged model that did worse: one peer dropped, and then ours kept."""
    site = Annalist.__new__(Annalist)
    site.home, site.identity, site.name = home, IDENTITIES[A], A
    site.path = home / "state/journal.db"
    site.open()
    tried = [{"without": [], "loss": 3.0}, {"without": [B], "loss": 2.0}]
    for round, kept in ((3, False), (4, True)):
        others = [Update(B, Generation(0), Round(round), digest(B, round))]
        site.seal(round)
        site.decide(round, others)
        harm = {
            "limit": 1.6,
            "loss_before": 1.5,
            "tried": tried,
            "dropped": [B],
            "kept_local": kept,
        }
        body = {"model": digest("m", round), "metrics": {}, "heads": {}, "harm": harm}
        memory = Memory(Generation(0), Round(round + 1)).to_plain()
        site.journal.append(
            *("commit", body),
            wall_ns=1,
            lamport=900 + round,
            round=round,
            remember={"barrier": memory, "models": [body["model"]]},
        )
    site.close()
    text = told("explain", "--round", "3", "--peer", B)
    assert "dropped again, because the merged model did worse: site-b" in text
    assert "3 with all, 2 without site-b" in text
    assert "so site-b was accepted on its own, but is not part of the result" in text
    assert "our own model was kept" in told("rounds", "show", "4")
    assert data_of("explain", "--round", "3", "--peer", B)["harm"]["limit"] == 1.6


def test_every_reason_has_words_and_advice() -> None:
    assert set(WORDS) == set(Reason)
    assert all(words.about and words.advice for words in WORDS.values())


def test_mistakes_are_named(home: Path, tmp_path: Path) -> None:
    problem = refused("rounds", "show", "9")
    assert "no round 9" in str(problem)
    assert "rounds 0 to 2" in str(problem.hint)
    problem = refused("explain", "--round", "1", "--peer", "site-d")
    assert "no peer `site-d`" in str(problem)
    assert "did you mean site-" in str(problem.hint)
    assert "it had: site-b, site-c" in str(refused("explain", "--round", "1", "--peer", "zzz").hint)
    for command in (["rounds", "list"], ["audit", "verify"], ["audit", "head"]):
        problem = refused(*command, "--home", str(tmp_path))
        assert isinstance(problem, ConfigError)
        assert "is not there" in str(problem)
        assert "--home" in str(problem.hint)
        (tmp_path / "empty/state").mkdir(parents=True, exist_ok=True)
        assert "no state directory" in str(refused(*command, "--home", str(tmp_path / "empty")))
    words = failure(78, "explain", "--round", "1", "--peer", "sitec", cwd=home)
    assert "did you mean site-c?" in words


def test_what_was_altered_is_not_told_as_history(home: Path) -> None:
    alter(home / JOURNAL, "UPDATE records SET body = '{\"verdicts\": 5}' WHERE seq = 6")
    ended = ran("rounds", "list")
    assert ended.exit_code == 0
    assert "record 6 does not fit" in ended.output
    assert [line.split()[0] for line in ended.stdout.splitlines()[1:3]] == ["0", "1"]
    assert "collecting" in ended.output


def test_a_damaged_file_is_told_as_such(home: Path) -> None:
    path = home / "state/journal.db"
    path.write_bytes(b"this is no journal" * 1000)
    for command in (["rounds", "list"], ["audit", "verify"], ["audit", "export"]):
        problem = refused(*command)
        assert isinstance(problem, JournalCorrupt)
        assert problem.exit_code == 4


# Does it hold?


def test_a_sound_record_is_told_as_such(home: Path) -> None:
    data = data_of("audit", "verify")
    assert data["ok"]
    assert (data["site"], data["records"], data["rounds"], data["signed"]) == (A, 10, 3, 3)
    assert data["finding"] is None
    assert "records 1 to 10 of site-a hold" in told("audit", "verify")
    head = data_of("audit", "head")
    assert data["head"] == {"seq": head["seq"], "hash": head["hash"]}
    assert told("audit", "head").split() == [str(head["seq"]), head["hash"], head["signature"]]
    assert not list(home.glob("state/journal.db-*")), "reading leaves nothing behind"


def test_a_bad_record_is_named_with_what_to_do(home: Path) -> None:
    alter(home / JOURNAL, "UPDATE records SET lamport = lamport + 1 WHERE seq = 6")
    text = told("audit", "verify", code=3)
    assert "bad: record 6 is not what was written" in text
    assert "round 1" in text
    assert "what to do: " in text
    assert "records 1 to 5 hold" in text
    data = data_of("audit", "verify", code=3)
    assert (data["ok"], data["finding"]["seq"], data["finding"]["round"]) == (False, 6, 1)


def test_it_is_verified_while_the_node_runs(sites: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(sites / A)
    running = three_sites(sites / "running")[A]
    run_rounds([running], [3])
    assert data_of("audit", "verify", "--home", str(running.home))["rounds"] == 4
    assert len(data_of("rounds", "list", "--home", str(running.home))) == 4


def test_a_certificate_that_is_missing_or_none(home: Path) -> None:
    (home / "keys/tls.crt").write_text("no certificate")
    assert "is no certificate" in str(refused("audit", "verify"))
    (home / "keys/tls.crt").unlink()
    assert "cannot be read" in str(refused("audit", "verify"))


# The file for others.


@pytest.mark.parametrize("kind", ["jsonl", "csv"])
def test_an_export_is_verified_alone(home: Path, sites: Path, kind: str) -> None:
    told("audit", "export", "--format", kind, "-o", "out")
    certificate = str(home / "keys/tls.crt")
    data = data_of("audit", "verify", "--export", "out", "--certificate", certificate)
    assert (data["ok"], data["records"], data["signed"]) == (True, 10, 3)
    peers = sites / "peers.yaml"
    known = [Joined(name, None, IDENTITIES[name].certificate) for name in (A, B, C)]
    add_peers(peers, known, FEDERATION, None)
    assert data_of("audit", "verify", "--export", "out", "--peers", str(peers))["signed"] == 3
    other = str(sites / B / "keys/tls.crt")
    told("audit", "verify", "--export", "out", "--certificate", other, code=3)
    assert "signatures not checked" in told("audit", "verify", "--export", "out")
    # It is the same on the screen.
    assert told("audit", "export", "--format", kind) == (home / "out").read_text()


@pytest.mark.parametrize("kind", ["jsonl", "csv"])
@pytest.mark.parametrize(
    ("first", "last", "seqs"),
    [(1, None, (5, 10)), (None, 1, (1, 7)), (1, 1, (5, 7)), (2, 9, (8, 10))],
)
def test_some_rounds_are_exported_without_a_gap(
    home: Path, kind: str, first: int | None, last: int | None, seqs: tuple[int, int]
) -> None:
    words = ["audit", "export", "--format", kind, "-o", "out"]
    words += ["--from-round", str(first)] if first is not None else []
    words += ["--to-round", str(last)] if last is not None else []
    told(*words)
    source = read_export(home / "out")
    numbers = [row.seq for row in source.rows()]
    assert (numbers[0], numbers[-1]) == seqs
    data = data_of("audit", "verify", "--export", "out", "--certificate", "keys/tls.crt")
    assert (data["ok"], data["signed"]) == (True, data["rounds"])


def test_an_export_says_what_the_journal_says(home: Path) -> None:
    told("audit", "export", "-o", "out.jsonl")
    told("audit", "export", "--format", "csv", "-o", "out.csv")
    with reading(home / "state/journal.db") as copy:
        rows = list(copy.rows())
        for name in ("out.jsonl", "out.csv"):
            source = read_export(home / name)
            assert list(source.rows()) == rows
            assert source.heads == copy.heads
    line = json.loads((home / "out.jsonl").read_text().splitlines()[3])
    assert (line["kind"], line["round"], line["site"]) == ("commit", 0, A)
    assert line["body"]["model"] == digest("merged", A, 0)
    with (home / "out.csv").open(newline="") as file:
        assert len(list(csv.DictReader(file))) == len(rows)


@pytest.mark.parametrize("kind", ["jsonl", "csv"])
def test_an_altered_export_is_found(home: Path, kind: str) -> None:
    told("audit", "export", "--format", kind, "-o", "out")
    text = (home / "out").read_text()
    (home / "out").write_text(text.replace("too_far", "loss_regret", 1))
    found = data_of("audit", "verify", "--export", "out", code=3)["finding"]
    assert (found["seq"], found["round"]) == (3, 0)
    lines = text.splitlines(keepends=True)
    del lines[4]
    (home / "out").write_text("".join(lines))
    missing = 4 if kind == "csv" else 5
    assert data_of("audit", "verify", "--export", "out", code=3)["finding"]["seq"] == missing


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{}\n",
        "rubbish",
        "{\n",
        "a,b,c\n1,2,3\n",
        '{"seq": 1}\n',
        "\x00\xff",
        "[1]\n",
        "{" * 9999,
    ],
)
def test_what_is_no_export_is_refused(home: Path, content: str) -> None:
    (home / "out").write_text(content)
    problem = refused("audit", "verify", "--export", "out")
    assert isinstance(problem, ConfigError)
    assert "no export" in str(problem)
    assert "is not there" in str(refused("audit", "verify", "--export", "nowhere"))


def test_there_is_nothing_to_export(home: Path) -> None:
    assert "no records of these rounds" in str(refused("audit", "export", "--from-round", "9"))
    problem = refused("audit", "export", "-o", "nowhere/out")
    assert problem.exit_code == 4


def test_records_beside_the_round_are_told_in_a_line() -> None:
    heard = {"manifest": {"update": {"peer": "site-b", "round": 3}}, "signature": "ab" * 64}
    witness = {"kind": "witness", "seq": 7, "body": {"updates": [heard]}}
    assert _in_short(witness) == "we have heard of site-b's update of round 3"
    assert _in_short({**witness, "body": {}}) == "we have heard of nothing new"
    pause = {"kind": "operator", "seq": 8, "body": {"command": "pause", "by": "root"}}
    assert _in_short(pause) == "command pause, by root"
