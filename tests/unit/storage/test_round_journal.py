"""Records of rounds: each step is atomic and survives a restart."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

import pytest

from lightyear_node.errors import ConfigError, StoreError
from lightyear_node.protocol.durable_state import Decision, DurableState
from lightyear_node.protocol.parameters import Cause
from lightyear_node.storage.journal import Journal
from lightyear_node.storage.journal_memory import TrainingResult
from lightyear_node.storage.round_journal import RoundJournal
from lightyear_node.types import (
    Attempt,
    Digest,
    Generation,
    Harm,
    Manifest,
    Opinion,
    PairedScores,
    PeerName,
    Reason,
    Round,
    Served,
    SignedHead,
    SignedManifest,
    Update,
    Verdict,
    Worth,
)
from tests.support.journal_records import first_bad_record, read_records

FIRST = {"alpha": {"b": 4}, "beta": {"b": 3}, "blocked": []}
SECOND = {"alpha": {"b": 4}, "beta": {"b": 4}, "blocked": ["b"]}


class RoundJournalFile:
    """A round journal in a file that can be reopened."""

    def __init__(self, path: Path, rule: str = "afa", **changed: Any) -> None:
        self.path = path
        self.journal = Journal(path)
        self.round_journal = RoundJournal(self.journal, wall_ns=lambda: 0, sign=signed_head)
        given: dict[str, Any] = {"schema": Digest("s"), "initial_model": Digest("m"), **changed}
        self.round_journal.start(rule=rule, about={}, **given)

    def decide(self, round: int, state: dict[str, Any]) -> None:
        self.round_journal.decide(*decided(round), state)

    def commit(self, round: int) -> None:
        self.round_journal.commit(
            Round(round), Digest("m"), DurableState(Generation(0), Round(round + 1)), {}
        )

    def seal(self, digest: str) -> None:
        update = Update(PeerName("a"), Generation(0), Round(0), Digest(digest))
        manifest = Manifest("ward", update, 1, Digest("s"), 1, 1)
        work = TrainingResult(Digest(digest), Digest(digest), Digest("c"), 1, 1, {})
        memory = DurableState(Generation(0), Round(0), announced=update)
        self.round_journal.seal(update, memory, work, SignedManifest(manifest, b""))

    def reopened(self, rule: str = "afa", **changed: Any) -> RoundJournalFile:
        self.journal.close()
        return RoundJournalFile(self.path, rule, **changed)


def signed_head(seq: int, hash: Digest) -> SignedHead:
    return SignedHead(seq, hash, seq.to_bytes(4, "big"))


def decided(round: int) -> tuple[Decision, DurableState]:
    verdict = Verdict(PeerName("b"), False, Reason.OUTLIER, digest=Digest("d"))
    decision = Decision(Round(round), Cause.ALL, "all 1 peer delivered", (), (verdict,))
    return decision, DurableState(Generation(0), Round(round), decision=decision)


@pytest.fixture
def stored(tmp_path: Path) -> RoundJournalFile:
    return RoundJournalFile(tmp_path / "journal.db")


def test_the_rules_state_survives_with_its_decision(stored: RoundJournalFile) -> None:
    assert stored.round_journal.rule_state == {}
    stored.decide(0, FIRST)
    again = stored.reopened()
    assert again.round_journal.rule_state == FIRST
    assert again.round_journal.memory.decision == decided(0)[0]
    again.decide(1, SECOND)
    assert stored.reopened().round_journal.rule_state == SECOND
    history = [
        record.body["rule_state"] for record in read_records(again.reopened().journal, "decision")
    ]
    assert history == [FIRST, SECOND]


@pytest.mark.parametrize(
    "failing",
    [
        "BEFORE INSERT ON memory WHEN NEW.key = 'rule_state'",
        "BEFORE INSERT ON memory WHEN NEW.key = 'barrier'",
        "BEFORE INSERT ON records WHEN NEW.kind = 'decision'",
    ],
)
def test_a_decision_and_its_state_are_one_transaction(
    stored: RoundJournalFile, failing: str
) -> None:
    stored.decide(0, FIRST)
    db = sqlite3.connect(stored.path, isolation_level=None)
    db.execute(f"CREATE TRIGGER full {failing} BEGIN SELECT RAISE(ABORT, 'full'); END")
    with pytest.raises(StoreError, match="full"):
        stored.decide(1, SECOND)
    db.execute("DROP TRIGGER full")
    db.close()
    again = stored.reopened()
    assert again.round_journal.rule_state == FIRST
    assert again.round_journal.memory.decision == decided(0)[0]
    assert [record.round for record in read_records(again.journal, "decision")] == [0]
    assert first_bad_record(again.journal) is None


def test_another_rule_starts_without_the_old_rules_state(stored: RoundJournalFile) -> None:
    stored.decide(0, FIRST)
    other = stored.reopened(rule="patient")
    assert other.round_journal.rule_state == {}
    # The old state does not return either: it lacks the rounds since then.
    assert other.reopened().round_journal.rule_state == {}
    rules = [record.body["rule"] for record in read_records(other.reopened().journal, "start")]
    assert rules[:3] == ["afa", "patient", "afa"]


def test_another_dtype_needs_another_state_directory(tmp_path: Path) -> None:
    """The last update was signed with the old type, so peers would refuse it."""
    old = RoundJournalFile(tmp_path / "journal.db")
    with pytest.raises(ConfigError, match=r"exchange\.dtype is bfloat16.*float32") as caught:
        old.reopened(dtype="bfloat16")
    assert "state_dir" in str(caught.value.hint)
    with pytest.raises(ConfigError, match="tensors have changed") as caught:
        RoundJournalFile(tmp_path / "journal.db", schema=Digest("t"))
    assert "exchange" in str(caught.value.hint)
    short = RoundJournalFile(tmp_path / "short.db", dtype="float16").reopened(dtype="float16")
    with pytest.raises(ConfigError, match=r"exchange\.dtype is float32.*float16"):
        short.reopened()


def test_changed_settings_are_recorded_and_change_no_memory(stored: RoundJournalFile) -> None:
    stored.decide(3, FIRST)
    kept = stored.journal.memory()
    stored.round_journal.settings({"removed": ["b"]}, certificate="SHA256:x", agreement=Digest("d"))
    again = stored.reopened()
    [record] = read_records(again.journal, "settings")
    assert record.round == 3
    assert record.body == {"removed": ["b"], "certificate": "SHA256:x", "agreement": "d"}
    assert first_bad_record(again.journal) is None
    assert again.journal.memory() == kept


def test_every_completed_round_is_signed(stored: RoundJournalFile) -> None:
    assert stored.round_journal.head is None
    stored.decide(0, FIRST)
    assert stored.round_journal.head is None
    stored.commit(0)
    head = stored.round_journal.head
    assert head == signed_head(3, Digest(stored.journal.head))
    stored.decide(1, FIRST)
    again = stored.reopened()
    assert again.round_journal.head == head
    again.commit(1)
    assert again.round_journal.head == signed_head(6, Digest(again.journal.head))


def test_peers_heads_are_written_with_the_next_record(stored: RoundJournalFile) -> None:
    first, second = (SignedHead(seq, Digest("ab"), b"s") for seq in (4, 9))
    b, c = PeerName("b"), PeerName("c")
    length = stored.round_journal.length
    stored.round_journal.witness(b, first)
    assert stored.round_journal.length == length
    stored = stored.reopened()  # which records a start, but in another life
    assert stored.round_journal.witnessed == {}
    stored.round_journal.witness(b, first)
    stored.round_journal.witness(c, first)
    stored.round_journal.witness(b, second)
    stored.commit(0)
    [commit] = read_records(stored.journal, "commit")
    assert {peer: head["seq"] for peer, head in commit.body["heads"].items()} == {"b": 9, "c": 4}
    stored = stored.reopened()
    assert stored.round_journal.witnessed == {b: second, c: first}
    stored.round_journal.witness(c, None)
    stored.commit(1)
    assert stored.reopened().round_journal.witnessed == {b: second}


def test_our_opinion_of_a_peer_has_no_score_and_survives(stored: RoundJournalFile) -> None:
    b = PeerName("b")
    assert stored.round_journal.opinion_of(b) is None
    stored.decide(3, FIRST)
    stored = stored.reopened()
    assert stored.round_journal.opinion_of(b) == Opinion(Round(3), Digest("d"), False, "outlier")
    assert stored.round_journal.opinion_of(PeerName("c")) is None
    # A round without a delivery does not change the opinion.
    missing = Verdict(b, False, Reason.TIMEOUT)
    decision = Decision(Round(4), Cause.GRACE, "grace is over", (), (missing,))
    stored.round_journal.decide(decision, DurableState(Generation(0), Round(4)), {})
    assert stored.round_journal.opinion_of(b) == Opinion(Round(3), Digest("d"), False, "outlier")


def test_a_peers_opinion_is_recorded_once(stored: RoundJournalFile) -> None:
    b = PeerName("b")
    stored.seal("ours")
    no = Opinion(Round(0), Digest("ours"), False, "too_far")
    assert stored.round_journal.record_opinion(b, no)
    assert not stored.round_journal.record_opinion(b, no)
    assert not stored.round_journal.record_opinion(b, Opinion(Round(1), Digest("ours"), True, "ok"))
    assert not stored.round_journal.record_opinion(
        b, Opinion(Round(0), Digest("unknown"), True, "ok")
    )
    stored = stored.reopened()
    assert not stored.round_journal.record_opinion(b, no)
    stored.seal("next")
    assert stored.round_journal.record_opinion(b, Opinion(Round(1), Digest("next"), True, "ok"))
    assert not stored.round_journal.record_opinion(b, no)
    recorded = [record.body for record in read_records(stored.journal, "told")]
    assert [(one["peer"], one["opinion"]["reason"]) for one in recorded] == [
        ("b", "too_far"),
        ("b", "ok"),
    ]


def test_the_comparison_with_the_shadow_survives(stored: RoundJournalFile) -> None:
    """The next round continues it; without a shadow the record has the form of before."""
    scores = PairedScores(40, 0.1, 0.2, 0.8)
    worth = Worth("decisions", (scores,), Served.FEDERATED, {"accuracy": 0.7})
    for round, found in enumerate((worth, None)):
        stored.decide(round, {})
        memory = DurableState(Generation(0), Round(round + 1))
        stored.round_journal.commit(Round(round), Digest("m"), memory, {}, worth=found)
        stored = stored.reopened()
        assert stored.round_journal.worth == found
    compared, plain = (record.body for record in read_records(stored.journal, "commit"))
    assert (compared["worth"]["gain"], compared["worth"]["served"]) == (0.1, "federated")
    assert plain == {"model": "m", "metrics": {}, "heads": {}}
    assert stored.round_journal.rounds()[0]["worth"] == compared["worth"]


def test_the_merge_check_is_part_of_the_rounds_record(stored: RoundJournalFile) -> None:
    """Without a merge check the record has the form of earlier versions."""
    harm = Harm(0.5, 0.4, (Attempt((), 0.9),), (PeerName("b"),), kept_local=True)
    for round, found in enumerate((harm, None)):
        stored.decide(round, {})
        memory = DurableState(Generation(0), Round(round + 1))
        stored.round_journal.commit(Round(round), Digest("m"), memory, {"accuracy": 0.5}, found)
    again = stored.reopened()
    measured, plain = (record.body for record in read_records(again.journal, "commit"))
    assert measured["harm"] == {
        "limit": 0.5,
        "loss_before": 0.4,
        "tried": [{"without": [], "loss": 0.9, "gain": None, "error": None}],
        "dropped": ["b"],
        "kept_local": True,
    }
    assert Harm.from_plain(measured["harm"]) == harm
    assert plain == {"model": "m", "metrics": {"accuracy": 0.5}, "heads": {}}
    first, second = again.round_journal.rounds()
    assert first["harm"] == measured["harm"]
    assert "harm" not in second
