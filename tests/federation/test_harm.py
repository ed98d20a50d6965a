"""Real nodes leave out an accepted model that would harm the merge."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

from lightyear_node.config.federation import RuleConfig
from lightyear_node.lab.federation import Federation, SiteHome
from lightyear_node.lab.malfunctions import MalfunctionConfig
from lightyear_node.storage.hash_chain import Record
from lightyear_node.types import Harm
from tests.support.site_queries import (
    DEADLINE_S,
    PATIENT,
    A,
    B,
    C,
    LayOut,
    all_finished,
    check_as_simulated,
    check_histories,
    metrics_of,
    run_in_lockstep,
)

ROUNDS = 3
RULE = RuleConfig(guard=False, harm_max=0.1)
"""Agreement ignores the final layer, so all sites accept a model with an inverted one."""


def test_a_peer_that_harms_the_merge_is_left_out_and_reported_everywhere(
    lay_out_sites: LayOut, records: Callable[[SiteHome], list[Record]]
) -> None:
    homes = lay_out_sites(
        rounds=1,
        malfunctions={C: MalfunctionConfig(kind="head-flip")},
        barrier=PATIENT,
        rule=RULE,
    )
    with Federation(homes) as federation:
        statuses = run_in_lockstep(federation, ROUNDS)
        for home in homes[:2]:
            commits = [record for record in records(home) if record.kind == "commit"]
            harms = [Harm.from_plain(record.body["harm"]) for record in commits]
            # In the first round the limit is chance level; after that it is left out every time.
            assert [harm.dropped for harm in harms] == [(), (C,), (C,)]
            for harm in harms:
                [kept] = [one.loss for one in harm.tried if one.without == harm.dropped]
                assert kept <= harm.limit
            # Its verdict is unchanged: accepted.
            entries = federation.rounds(home.name)
            about = [v for entry in entries for v in entry["verdicts"] if v["peer"] == C]
            assert [verdict["accepted"] for verdict in about] == [True] * ROUNDS
            assert [entry["harm"] for entry in entries] == [r.body["harm"] for r in commits]
            counted = metrics_of(home)
            assert counted['lightyear_merge_dropped_total{peer="site-c"}'] == 2
            assert counted["lightyear_aggregate_reverts_total"] == 0
            status = statuses[home.name]
            assert status is not None
            assert status["harm"] == {"round": ROUNDS - 1, **commits[-1].body["harm"]}
            assert "left site-c out of the merge" in home.log.read_text()
        words = subprocess.run(
            [sys.executable, "-m", "lightyear_node", "status", "--home", str(homes[0].directory)],
            capture_output=True, text=True, timeout=60, env={**os.environ, "COLUMNS": "200"},
        )  # fmt: skip
        assert "last round: left site-c out of the merge" in words.stdout, words.stderr
        simulated = check_as_simulated(federation, RULE, ROUNDS)
        for name in (A, B):
            for one, entry in zip(simulated.sites[name], federation.rounds(name), strict=True):
                assert one.harm == Harm.from_plain(entry["harm"])
        federation.kill(A)
        federation.wait_for_exit(A)
        federation.start(A)
        again = federation.wait_until(all_finished, DEADLINE_S)[A]
        before = statuses[A]
        assert again is not None
        assert before is not None
        assert again["harm"] == before["harm"]
    check_histories(homes, records)
