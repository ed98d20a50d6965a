"""`rounds`, `explain` and `audit` on the journals of three sites after some rounds."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from lightyear_node.audit.export import read_export
from lightyear_node.audit.reasons import REASON_TEXTS
from lightyear_node.cli.rounds import record_text
from lightyear_node.errors import ConfigError, JournalCorrupt
from lightyear_node.identity.invite import Invite
from lightyear_node.protocol.durable_state import DurableState
from lightyear_node.storage.journal_reader import reading
from lightyear_node.tools.peers_file import add_peers
from lightyear_node.types import Generation, PeerName, Reason, Round, Update
from tests.support.cli_runner import data_of, error_of, output_of, run_cli
from tests.support.journals import (
    FEDERATION,
    IDENTITIES,
    JournalSite,
    alter,
    digest,
    run_rounds,
    three_sites,
)
from tests.unit.cli.test_commands import failure

A, B, C = (PeerName(f"site-{letter}") for letter in "abc")
JOURNAL = "state/journal.db"


# Rounds and verdicts.


def test_rounds_are_listed_in_every_format(home: Path) -> None:
    listed = data_of("rounds", "list")
    assert [entry["round"] for entry in listed] == [0, 1, 2]
    assert {entry["state"] for entry in listed} == {"completed"}
    assert [(one["accepted"], one["rejected"], one["missing"]) for one in listed] == [(1, 1, 0)] * 3
    assert listed[2]["model"] == digest("merged", A, 2)
    lines = output_of("rounds", "list", "--format", "jsonl").splitlines()
    assert [json.loads(line) for line in lines] == listed
    table = output_of("rounds", "list").splitlines()
    assert len(table) == 4
    assert "loss 1.5 → 1.25" in table[1]


def test_a_round_is_shown_with_every_verdict(home: Path) -> None:
    shown = data_of("rounds", "show", "1")
    assert shown["update"]["digest"] == digest(A, 1)
    verdicts = {verdict["peer"]: verdict for verdict in shown["verdicts"]}
    assert (verdicts[B]["fate"], verdicts[C]["fate"]) == ("accepted", "rejected")
    assert shown["heads"][B]["seq"] > 0
    text = output_of("rounds", "show", "1")
    assert "merged into our model: site-b" in text
    assert "too_far" in text
    assert json.loads(output_of("rounds", "show", "1", "--format", "jsonl")) == shown


def test_explain_shows_each_measurement_and_its_limit(home: Path) -> None:
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
    text = output_of("explain", "--round", "1", "--peer", C)
    assert REASON_TEXTS[Reason.TOO_FAR].about in text
    assert REASON_TEXTS[Reason.TOO_FAR].advice in text
    assert "1.9, at most 0.5 ✗" in text
    accepted = data_of("explain", "--round", "2", "--peer", B)
    assert (accepted["generation"], accepted["update_round"]) == (0, 2)
    assert accepted["weight"] == pytest.approx(1 / 3)


def test_explain_reports_the_merge_check(home: Path) -> None:
    """The merged model was worse: one peer is dropped, then our own model is kept."""
    site = JournalSite.__new__(JournalSite)
    site.home, site.identity, site.name = home, IDENTITIES[A], A
    site.path = home / "state/journal.db"
    site.open()
    tried = [
        {"without": [], "loss": 3.0},  # without decisions
        {"without": [B], "loss": 2.0, "gain": -0.11, "error": 0.042},
    ]
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
        memory = DurableState(Generation(0), Round(round + 1)).to_plain()
        site.journal.append(
            *("commit", body),
            wall_ns=1,
            lamport=900 + round,
            round=round,
            remember={"barrier": memory, "models": [body["model"]]},
        )
    site.close()
    text = output_of("explain", "--round", "3", "--peer", B)
    assert "dropped again, because the merged model did worse: site-b" in text
    assert "3 with all, 2 without site-b (decisions -11 ± 4.2 points)" in text
    assert "so site-b was accepted on its own, but is not part of the result" in text
    assert "our own model was kept" in output_of("rounds", "show", "4")
    assert data_of("explain", "--round", "3", "--peer", B)["harm"]["limit"] == 1.6


def test_every_reason_has_a_description_and_advice() -> None:
    assert set(REASON_TEXTS) == set(Reason)
    assert all(words.about and words.advice for words in REASON_TEXTS.values())


def test_unknown_rounds_peers_and_folders_are_refused(home: Path, tmp_path: Path) -> None:
    problem = error_of("rounds", "show", "9")
    assert "no round 9" in str(problem)
    assert "rounds 0 to 2" in str(problem.hint)
    problem = error_of("explain", "--round", "1", "--peer", "site-d")
    assert "no peer `site-d`" in str(problem)
    assert "did you mean site-" in str(problem.hint)
    assert "it had: site-b, site-c" in str(
        error_of("explain", "--round", "1", "--peer", "zzz").hint
    )
    for command in (["rounds", "list"], ["audit", "verify"], ["audit", "head"]):
        problem = error_of(*command, "--home", str(tmp_path))
        assert isinstance(problem, ConfigError)
        assert "does not exist" in str(problem)
        assert "--home" in str(problem.hint)
        (tmp_path / "empty/state").mkdir(parents=True, exist_ok=True)
        assert "not a state directory" in str(error_of(*command, "--home", str(tmp_path / "empty")))
    words = failure(78, "explain", "--round", "1", "--peer", "sitec", cwd=home)
    assert "did you mean site-c?" in words


def test_records_after_an_altered_one_are_not_shown(home: Path) -> None:
    alter(home / JOURNAL, "UPDATE records SET body = '{\"verdicts\": 5}' WHERE seq = 6")
    ended = run_cli("rounds", "list")
    assert ended.exit_code == 0
    assert "record 6 does not fit" in ended.output
    assert [line.split()[0] for line in ended.stdout.splitlines()[1:3]] == ["0", "1"]
    assert "collecting" in ended.output


def test_a_damaged_journal_is_reported(home: Path) -> None:
    path = home / "state/journal.db"
    path.write_bytes(b"this is no journal" * 1000)
    for command in (["rounds", "list"], ["audit", "verify"], ["audit", "export"]):
        problem = error_of(*command)
        assert isinstance(problem, JournalCorrupt)
        assert problem.exit_code == 4


# Verification.


def test_an_intact_journal_verifies(home: Path) -> None:
    data = data_of("audit", "verify")
    assert data["ok"]
    assert (data["site"], data["records"], data["rounds"], data["signed"]) == (A, 10, 3, 3)
    assert data["finding"] is None
    assert "records 1 to 10 of site-a hold" in output_of("audit", "verify")
    head = data_of("audit", "head")
    assert data["head"] == {"seq": head["seq"], "hash": head["hash"]}
    assert output_of("audit", "head").split() == [str(head["seq"]), head["hash"], head["signature"]]
    assert not list(home.glob("state/journal.db-*")), "reading leaves nothing behind"


def test_a_bad_record_is_reported_with_advice(home: Path) -> None:
    alter(home / JOURNAL, "UPDATE records SET lamport = lamport + 1 WHERE seq = 6")
    text = output_of("audit", "verify", code=3)
    assert "bad: record 6 is not what was written" in text
    assert "round 1" in text
    assert "what to do: " in text
    assert "records 1 to 5 hold" in text
    data = data_of("audit", "verify", code=3)
    assert (data["ok"], data["finding"]["seq"], data["finding"]["round"]) == (False, 6, 1)


def test_a_journal_can_be_verified_while_the_node_runs(
    sites: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(sites / A)
    running = three_sites(sites / "running")[A]
    run_rounds([running], [3])
    assert data_of("audit", "verify", "--home", str(running.home))["rounds"] == 4
    assert len(data_of("rounds", "list", "--home", str(running.home))) == 4


def test_a_missing_or_invalid_certificate_is_refused(home: Path) -> None:
    (home / "keys/tls.crt").write_text("no certificate")
    assert "is no certificate" in str(error_of("audit", "verify"))
    (home / "keys/tls.crt").unlink()
    assert "cannot be read" in str(error_of("audit", "verify"))


# Export.


@pytest.mark.parametrize("kind", ["jsonl", "csv"])
def test_an_export_can_be_verified_elsewhere(home: Path, sites: Path, kind: str) -> None:
    output_of("audit", "export", "--format", kind, "-o", "out")
    certificate = str(home / "keys/tls.crt")
    data = data_of("audit", "verify", "--export", "out", "--certificate", certificate)
    assert (data["ok"], data["records"], data["signed"]) == (True, 10, 3)
    peers = sites / "peers.yaml"
    known = [Invite(name, None, IDENTITIES[name].certificate) for name in (A, B, C)]
    add_peers(peers, known, FEDERATION, None)
    assert data_of("audit", "verify", "--export", "out", "--peers", str(peers))["signed"] == 3
    other = str(sites / B / "keys/tls.crt")
    output_of("audit", "verify", "--export", "out", "--certificate", other, code=3)
    assert "signatures not checked" in output_of("audit", "verify", "--export", "out")
    # Standard output has the same text.
    assert output_of("audit", "export", "--format", kind) == (home / "out").read_text()


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
    output_of(*words)
    source = read_export(home / "out")
    numbers = [row.seq for row in source.rows()]
    assert (numbers[0], numbers[-1]) == seqs
    data = data_of("audit", "verify", "--export", "out", "--certificate", "keys/tls.crt")
    assert (data["ok"], data["signed"]) == (True, data["rounds"])


def test_an_export_equals_the_journal(home: Path) -> None:
    output_of("audit", "export", "-o", "out.jsonl")
    output_of("audit", "export", "--format", "csv", "-o", "out.csv")
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
def test_an_altered_export_is_detected(home: Path, kind: str) -> None:
    output_of("audit", "export", "--format", kind, "-o", "out")
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
def test_a_file_that_is_no_export_is_refused(home: Path, content: str) -> None:
    (home / "out").write_text(content)
    problem = error_of("audit", "verify", "--export", "out")
    assert isinstance(problem, ConfigError)
    assert "not an export" in str(problem)
    assert "does not exist" in str(error_of("audit", "verify", "--export", "nowhere"))


def test_an_export_without_records_or_folder_fails(home: Path) -> None:
    assert "no records of these rounds" in str(error_of("audit", "export", "--from-round", "9"))
    problem = error_of("audit", "export", "-o", "nowhere/out")
    assert problem.exit_code == 4


def test_other_records_of_a_round_are_shown_in_one_line() -> None:
    heard = {"manifest": {"update": {"peer": "site-b", "round": 3}}, "signature": "ab" * 64}
    witness = {"kind": "witness", "seq": 7, "body": {"updates": [heard]}}
    assert record_text(witness) == "we have heard of site-b's update of round 3"
    assert record_text({**witness, "body": {}}) == "we have heard of nothing new"
    pause = {"kind": "operator", "seq": 8, "body": {"command": "pause", "by": "root"}}
    assert record_text(pause) == "command pause, by root"
