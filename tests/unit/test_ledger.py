"""What a node remembers of its rounds: each step whole or not at all, and there again later."""

from __future__ import annotations

import itertools
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from lightyear_node.barrier import Cause, Decision, Memory
from lightyear_node.errors import ConfigError, StoreError
from lightyear_node.journal import Journal
from lightyear_node.ledger import Ledger, Work
from lightyear_node.records import (
    Attempt,
    Digest,
    Generation,
    Harm,
    Manifest,
    Opinion,
    PeerName,
    Reason,
    Round,
    SignedHead,
    SignedManifest,
    Update,
    Verdict,
)

FIRST = {"alpha": {"b": 4}, "beta": {"b": 3}, "blocked": []}
SECOND = {"alpha": {"b": 4}, "beta": {"b": 4}, "blocked": ["b"]}


class Book:
    """A ledger in a file, which can be closed and opened again."""

    def __init__(self, path: Path, rule: str = "afa", **terms: Any) -> None:
        self.path = path
        self.journal = Journal(path)
        stamps = itertools.count(self.journal.lamport + 1)
        self.ledger = Ledger(
            self.journal, wall_ns=lambda: 0, stamp=lambda: next(stamps), sign=signed_head
        )
        given: dict[str, Any] = {"schema": Digest("s"), "initial_model": Digest("m"), **terms}
        self.ledger.start(rule=rule, about={}, **given)

    def decide(self, round: int, state: dict[str, Any]) -> None:
        self.ledger.decide(*decided(round), state)

    def commit(self, round: int) -> None:
        self.ledger.commit(Round(round), Digest("m"), Memory(Generation(0), Round(round + 1)), {})

    def seal(self, digest: str) -> None:
        update = Update(PeerName("a"), Generation(0), Round(0), Digest(digest))
        manifest = Manifest("ward", update, 1, Digest("s"), 1, 1)
        work = Work(Digest(digest), Digest(digest), Digest("c"), 1, 1, {})
        memory = Memory(Generation(0), Round(0), announced=update)
        self.ledger.seal(update, memory, work, SignedManifest(manifest, b""))

    def reopened(self, rule: str = "afa", **terms: Any) -> Book:
        self.journal.close()
        return Book(self.path, rule, **terms)


def signed_head(seq: int, hash: Digest) -> SignedHead:
    return SignedHead(seq, hash, seq.to_bytes(4, "big"))


def decided(round: int) -> tuple[Decision, Memory]:
    verdict = Verdict(PeerName("b"), False, Reason.OUTLIER, digest=Digest("d"))
    decision = Decision(Round(round), Cause.ALL, "all 1 peer delivered", (), (verdict,))
    return decision, Memory(Generation(0), Round(round), decision=decision)


@pytest.fixture
def book(tmp_path: Path) -> Book:
    return Book(tmp_path / "journal.db")


def test_the_rules_state_comes_back_with_its_decision(book: Book) -> None:
    assert book.ledger.rule_state == {}
    book.decide(0, FIRST)
    again = book.reopened()
    assert again.ledger.rule_state == FIRST
    assert again.ledger.memory.decision == decided(0)[0]
    again.decide(1, SECOND)
    assert book.reopened().ledger.rule_state == SECOND
    history = [record.body["rule_state"] for record in again.reopened().journal.records("decision")]
    assert history == [FIRST, SECOND]


@pytest.mark.parametrize(
    "failing",
    [
        "BEFORE INSERT ON memory WHEN NEW.key = 'rule_state'",
        "BEFORE INSERT ON memory WHEN NEW.key = 'barrier'",
        "BEFORE INSERT ON records WHEN NEW.kind = 'decision'",
    ],
)
def test_a_decision_and_the_state_it_led_to_are_written_together_or_not(
    book: Book, failing: str
) -> None:
    book.decide(0, FIRST)
    db = sqlite3.connect(book.path, isolation_level=None)
    db.execute(f"CREATE TRIGGER full {failing} BEGIN SELECT RAISE(ABORT, 'full'); END")
    with pytest.raises(StoreError, match="full"):
        book.decide(1, SECOND)
    db.execute("DROP TRIGGER full")
    db.close()
    again = book.reopened()
    assert again.ledger.rule_state == FIRST
    assert again.ledger.memory.decision == decided(0)[0]
    assert [record.round for record in again.journal.records("decision")] == [0]
    assert again.journal.first_bad_record() is None


def test_another_rule_begins_without_the_state_of_the_one_before(book: Book) -> None:
    book.decide(0, FIRST)
    other = book.reopened(rule="patient")
    assert other.ledger.rule_state == {}
    # Nor does it come back: what has happened since is not in it.
    assert other.reopened().ledger.rule_state == {}
    rules = [record.body["rule"] for record in other.reopened().journal.records("start")]
    assert rules[:3] == ["afa", "patient", "afa"]


def test_what_travels_otherwise_than_before_needs_another_state(tmp_path: Path) -> None:
    """The last announced update is signed in the old type: nobody would take it any more."""
    old = Book(tmp_path / "journal.db")
    with pytest.raises(ConfigError, match=r"exchange\.dtype is bfloat16.*float32") as caught:
        old.reopened(dtype="bfloat16")
    assert "state_dir" in str(caught.value.hint)
    with pytest.raises(ConfigError, match="tensors have changed") as caught:
        Book(tmp_path / "journal.db", schema=Digest("t"))
    assert "exchange" in str(caught.value.hint)
    short = Book(tmp_path / "short.db", dtype="float16").reopened(dtype="float16")
    with pytest.raises(ConfigError, match=r"exchange\.dtype is float32.*float16"):
        short.reopened()


def test_changed_settings_are_recorded_and_change_no_memory(book: Book) -> None:
    book.decide(3, FIRST)
    kept = book.journal.memory()
    book.ledger.settings({"removed": ["b"]}, certificate="SHA256:x", agreement=Digest("d"))
    again = book.reopened()
    [record] = again.journal.records("settings")
    assert record.round == 3
    assert record.body == {"removed": ["b"], "certificate": "SHA256:x", "agreement": "d"}
    assert again.journal.first_bad_record() is None
    assert again.journal.memory() == kept


def test_every_completed_round_is_signed(book: Book) -> None:
    assert book.ledger.head is None
    book.decide(0, FIRST)
    assert book.ledger.head is None
    book.commit(0)
    head = book.ledger.head
    assert head == signed_head(3, Digest(book.journal.head))
    book.decide(1, FIRST)
    again = book.reopened()
    assert again.ledger.head == head
    again.commit(1)
    assert again.ledger.head == signed_head(6, Digest(again.journal.head))


def test_peers_heads_are_written_with_the_next_record(book: Book) -> None:
    first, second = (SignedHead(seq, Digest("ab"), b"s") for seq in (4, 9))
    b, c = PeerName("b"), PeerName("c")
    length = book.ledger.length
    book.ledger.witness(b, first)
    assert book.ledger.length == length
    book = book.reopened()  # which records a start, but in another life
    assert book.ledger.witnessed == {}
    book.ledger.witness(b, first)
    book.ledger.witness(c, first)
    book.ledger.witness(b, second)
    book.commit(0)
    [commit] = book.journal.records("commit")
    assert {peer: head["seq"] for peer, head in commit.body["heads"].items()} == {"b": 9, "c": 4}
    book = book.reopened()
    assert book.ledger.witnessed == {b: second, c: first}
    book.ledger.witness(c, None)
    book.commit(1)
    assert book.reopened().ledger.witnessed == {b: second}


def test_what_we_think_of_a_peer_has_no_score_and_survives(book: Book) -> None:
    b = PeerName("b")
    assert book.ledger.opinion_of(b) is None
    book.decide(3, FIRST)
    book = book.reopened()
    assert book.ledger.opinion_of(b) == Opinion(Round(3), Digest("d"), False, "outlier")
    assert book.ledger.opinion_of(PeerName("c")) is None
    # A round in which it delivered nothing says nothing about its last update.
    missing = Verdict(b, False, Reason.TIMEOUT)
    decision = Decision(Round(4), Cause.GRACE, "grace is over", (), (missing,))
    book.ledger.decide(decision, Memory(Generation(0), Round(4)), {})
    assert book.ledger.opinion_of(b) == Opinion(Round(3), Digest("d"), False, "outlier")


def test_what_a_peer_thinks_of_us_is_recorded_once(book: Book) -> None:
    b = PeerName("b")
    book.seal("ours")
    no = Opinion(Round(0), Digest("ours"), False, "too_far")
    assert book.ledger.told(b, no)
    assert not book.ledger.told(b, no)
    assert not book.ledger.told(b, Opinion(Round(1), Digest("ours"), True, "ok"))
    assert not book.ledger.told(b, Opinion(Round(0), Digest("of nobody"), True, "ok"))
    book = book.reopened()
    assert not book.ledger.told(b, no)
    book.seal("next")
    assert book.ledger.told(b, Opinion(Round(1), Digest("next"), True, "ok"))
    assert not book.ledger.told(b, no)
    told = [record.body for record in book.journal.records("told")]
    assert [(one["peer"], one["opinion"]["reason"]) for one in told] == [
        ("b", "too_far"),
        ("b", "ok"),
    ]


def test_what_merging_would_have_done_is_part_of_the_rounds_record(book: Book) -> None:
    """Nothing of it where nothing was measured: as records have been before."""
    harm = Harm(0.5, 0.4, (Attempt((), 0.9),), (PeerName("b"),), kept_local=True)
    for round, found in enumerate((harm, None)):
        book.decide(round, {})
        memory = Memory(Generation(0), Round(round + 1))
        book.ledger.commit(Round(round), Digest("m"), memory, {"accuracy": 0.5}, found)
    again = book.reopened()
    measured, plain = (record.body for record in again.journal.records("commit"))
    assert measured["harm"] == {
        "limit": 0.5,
        "loss_before": 0.4,
        "tried": [{"without": [], "loss": 0.9}],
        "dropped": ["b"],
        "kept_local": True,
    }
    assert Harm.from_plain(measured["harm"]) == harm
    assert plain == {"model": "m", "metrics": {"accuracy": 0.5}, "heads": {}}
    first, second = again.ledger.rounds()
    assert first["harm"] == measured["harm"]
    assert "harm" not in second
