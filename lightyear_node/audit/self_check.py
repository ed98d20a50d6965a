"""Verifies the node's own journal, at its start and while it runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lightyear_node.audit.export import RecordSource, open_records
from lightyear_node.audit.verify import FirstProblem, verify
from lightyear_node.errors import ConfigError, LightyearError, Shortage


@dataclass(frozen=True, slots=True)
class SelfCheck:
    damage: str | None = None
    """The first record that was altered: such a journal must not be continued."""
    doubt: str | None = None
    """Set if the journal is intact, but partly signed with a key that is not ours."""


def check_journal(state_dir: Path, keys: Sequence[bytes], *, closed: bool = False) -> SelfCheck:
    """Verify the live records and signatures and, if `closed`, the hashes of closed segments.

    `keys` are the site's own.  A site with new keys continues its old journal, so the keys named in
    the journal itself tell damage from doubt.  The records in closed segments are verified by
    `audit verify` only.  Raises `Shortage` if the journal cannot be opened at the moment.
    """
    try:
        with open_records(state_dir, thoroughly=True, live_only=not closed) as source:
            altered = source.altered if closed else ()
        if altered:
            return SelfCheck(f"our journal: the closed segment {altered[0]} was changed")
        with open_records(state_dir, thoroughly=True, live_only=True) as source:
            finding = verify(source, keys).finding
            if finding is None:
                return SelfCheck()
            damage = verify(source, [*keys, *_named_keys(source)]).finding
    except Shortage:
        raise
    except ConfigError:
        return SelfCheck(f"our journal is no longer in {state_dir}")
    except LightyearError as problem:
        return SelfCheck(f"{problem}; {problem.hint}")
    return SelfCheck(_text(damage)) if damage is not None else SelfCheck(doubt=_text(finding))


def _named_keys(source: RecordSource) -> list[bytes]:
    named = {row.plain_body().get("signing_key") for row in source.rows() if row.kind == "start"}
    keys = []
    for key in named:
        try:
            keys.append(bytes.fromhex(str(key)))
        except (TypeError, ValueError):
            continue
    return keys


def _text(finding: FirstProblem) -> str:
    return f"our journal: {finding.about}; {finding.advice}"
