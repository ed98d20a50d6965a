"""Bit flips on disk in received updates: detected, reported, not counted against peers."""

from __future__ import annotations

import contextlib
from pathlib import Path

from lightyear_node.lab.federation import Federation, SiteHome
from tests.support.site_queries import DEADLINE_S, A, B, C, LayOut, durable_values, metrics_of


def flip(path: Path) -> None:
    with contextlib.suppress(FileNotFoundError), path.open("r+b") as file:
        file.seek(-1, 2)
        [byte] = file.read(1)
        file.seek(-1, 2)
        file.write(bytes([byte ^ 1]))


def damaged(home: SiteHome) -> float:
    found = metrics_of(home)
    return sum(v for name, v in found.items() if name.startswith("lightyear_damaged_files_total{"))


def blamed(home: SiteHome) -> list[str]:
    """Return the failures counted against peers' data."""
    words = ("checksum", "malformed", "too_large")
    return [
        name
        for name, value in metrics_of(home).items()
        if value and "peer=" in name and any(f'reason="{word}"' in name for word in words)
    ]


def test_bit_flips_on_disk_do_not_count_against_peers(lay_out_sites: LayOut) -> None:
    homes = lay_out_sites(3, rounds=100_000)
    home = homes[0]
    others = [one for one in homes if one.name != A]
    with Federation(homes) as federation:
        federation.wait_until(lambda s: s[A] is not None and s[A]["round"] >= 1, DEADLINE_S)
        seen: set[str] = set()

        def noticed(_: object) -> bool:
            for digest in {
                d for one in others for d in durable_values(one).get("offered", [])
            } - seen:
                path = home.state_dir / "updates" / digest
                if path.exists():
                    seen.add(digest)
                    flip(path)
            return damaged(home) >= 2

        federation.wait_until(noticed, DEADLINE_S)
        reached = federation.status()[A]["round"] + 2  # type: ignore[index]
        federation.wait_until(lambda s: s[A] is not None and s[A]["round"] >= reached, DEADLINE_S)
        assert blamed(home) == []
        verdicts = [v for entry in federation.rounds(A) for v in entry["verdicts"]]
        assert {v["peer"] for v in verdicts if v["accepted"]} == {B, C}
        rejected = {v["reason"] for v in verdicts if not v["accepted"]}
        assert not rejected & {"checksum", "malformed", "unscored"}
    assert "Traceback" not in home.log.read_text()
