"""Exports come from other sites: whatever stands in one, reading it ends in words."""

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
    lines_of,
    opened,
    read_export,
    write_csv,
    write_jsonl,
)
from lightyear_node.audit.rounds import timestamp
from lightyear_node.audit.verify import verify
from lightyear_node.errors import ConfigError
from lightyear_node.journal import FIRST_HASH, Row, canonical, reading
from lightyear_node.records import PeerName
from tests.unit.annals import IDENTITIES, three_sites

A, B = PeerName("site-a"), PeerName("site-b")
KEYS = [IDENTITIES[A].certificate.signing_key]

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)
WORDS = ("update", "peer", "generation", "round", "digest", "verdicts", "accepted", "heads")
BODIES = st.dictionaries(
    st.sampled_from((*WORDS, "seq", "hash", "site", "federation", "signing_key", "site-b")),
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


def chained(said: list[tuple[str, dict[str, Any]]]) -> str:
    """An export whose chain holds, whatever its records say."""
    before, lines = FIRST_HASH, []
    for seq, (kind, body) in enumerate(said, 1):
        row = Row(seq, 5, seq, 0, kind, canonical(body), "")
        hash = str(row.hash_after(before))
        values = ("site-b", None, seq, timestamp(5), 5, seq, 0, kind, body, before, hash, None)
        lines.append(json.dumps(dict(zip(COLUMNS, values, strict=True))))
        before = hash
    return "\n".join(lines) + "\n"


@quick
@given(said=st.lists(st.tuples(KINDS, BODIES), min_size=1, max_size=5))
def test_whatever_a_sound_chain_says_is_compared_or_refused(
    journals: dict[PeerName, Path], tmp_path: Path, said: list[tuple[str, dict[str, Any]]]
) -> None:
    path = tmp_path / "theirs"
    path.write_text(chained(said))
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
def test_any_text_is_an_export_or_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "any"
    path.write_text(text, encoding="utf-8", errors="surrogatepass")
    with pytest.raises(ConfigError):
        read_export(path)


@quick
@given(at=st.integers(0, 10**6), char=st.characters(exclude_categories=("Cs",)), csv=st.booleans())
def test_any_character_of_an_export_counts_or_says_nothing(
    journals: dict[PeerName, Path], tmp_path: Path, at: int, char: str, csv: bool
) -> None:
    """Refused, found, or the records are the same: the reader's columns are not part of them."""
    path = tmp_path / "altered"
    with opened(journals[A]) as source, path.open("w", newline="", encoding="utf-8") as out:
        (write_csv if csv else write_jsonl)(lines_of(source, None, None), out)
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
