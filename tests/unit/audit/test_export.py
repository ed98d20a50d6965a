"""Exports may come from other sites: any content is read or refused with a clear error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lightyear_node.audit.compare import compare
from lightyear_node.audit.export import (
    COLUMNS,
    export_lines,
    open_records,
    read_export,
    write_csv,
    write_jsonl,
)
from lightyear_node.audit.rounds import timestamp
from lightyear_node.audit.verify import verify
from lightyear_node.errors import ConfigError
from lightyear_node.storage.hash_chain import FIRST_HASH, StoredRecord, canonical
from lightyear_node.storage.journal_reader import reading
from lightyear_node.types import PeerName
from tests.support.journals import IDENTITIES, three_sites

A, B = PeerName("site-a"), PeerName("site-b")
KEYS = [IDENTITIES[A].certificate.signing_key]

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)
KEYS_IN_BODIES = (
    "update",
    "peer",
    "generation",
    "round",
    "digest",
    "verdicts",
    "accepted",
    "heads",
)
BODIES = st.dictionaries(
    st.sampled_from(
        (*KEYS_IN_BODIES, "seq", "hash", "site", "federation", "signing_key", "site-b")
    ),
    JSON | st.sampled_from(["site-b", "ab" * 32, "\x1b[31m", "\ud800"]),
)
KINDS = st.sampled_from(["start", "seal", "decision", "commit", "witness", "told", "x"])
quick = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@pytest.fixture(scope="module")
def journals(tmp_path_factory: pytest.TempPathFactory) -> dict[PeerName, Path]:
    sites = three_sites(tmp_path_factory.mktemp("sites"), 2)
    for site in sites.values():
        site.close()
    return {name: site.path for name, site in sites.items()}


def chained(records: list[tuple[str, dict[str, Any]]]) -> str:
    """Return an export with a valid chain and these records."""
    before, lines = FIRST_HASH, []
    for seq, (kind, body) in enumerate(records, 1):
        row = StoredRecord(seq, 5, seq, 0, kind, canonical(body), "")
        hash = str(row.hash_after(before))
        values = ("site-b", None, seq, timestamp(5), 5, seq, 0, kind, body, before, hash, None)
        lines.append(json.dumps(dict(zip(COLUMNS, values, strict=True))))
        before = hash
    return "\n".join(lines) + "\n"


@quick
@given(records=st.lists(st.tuples(KINDS, BODIES), min_size=1, max_size=5))
def test_any_records_in_a_valid_chain_are_compared_or_refused(
    journals: dict[PeerName, Path], tmp_path: Path, records: list[tuple[str, dict[str, Any]]]
) -> None:
    path = tmp_path / "theirs"
    path.write_text(chained(records))
    theirs = read_export(path)
    audit = verify(theirs, KEYS)
    assert audit.site is None or audit.site.isprintable()
    with reading(journals[A]) as ours:
        try:
            found = compare(ours, theirs, ("ours", "theirs"))
        except ConfigError:
            return
    json.dumps([one.about for one in found.differences])
    assert all(one.about.isprintable() for one in found.differences)


@quick
@given(text=st.text(max_size=200))
def test_any_other_text_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "any"
    path.write_text(text, encoding="utf-8", errors="surrogatepass")
    with pytest.raises(ConfigError):
        read_export(path)


@quick
@given(at=st.integers(0, 10**6), char=st.characters(exclude_categories=("Cs",)), csv=st.booleans())
def test_any_changed_character_is_detected_or_outside_the_records(
    journals: dict[PeerName, Path], tmp_path: Path, at: int, char: str, csv: bool
) -> None:
    """Refused, detected, or the records are equal: the reader's columns are not part of them."""
    path = tmp_path / "altered"
    with open_records(journals[A]) as source, path.open("w", newline="", encoding="utf-8") as out:
        (write_csv if csv else write_jsonl)(export_lines(source, None, None), out)
        rows = list(source.rows())
    text = path.read_bytes().decode()
    at %= len(text)
    path.write_bytes((text[:at] + char + text[at + 1 :]).encode())
    try:
        altered = read_export(path)
    except ConfigError:
        return
    if verify(altered, KEYS).finding is None:
        assert list(altered.rows()) == rows
