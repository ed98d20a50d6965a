"""A member whose model passes every verdict and yet would spoil the merge, in real nodes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

from asking import (
    DEADLINE_S,
    PATIENT,
    A,
    B,
    C,
    LayOut,
    all_finished,
    check_as_simulated,
    check_histories,
    check_in_step,
    metrics_of,
    repeated_when_out_of_step,
)

from lightyear_node.config.agreement import RuleTerms
from lightyear_node.config.site import Malfunction
from lightyear_node.journal import Record
from lightyear_node.lab.federation import Federation, SiteHome
from lightyear_node.records import Harm

ROUNDS = 3
RULE = RuleTerms(guard=False, harm_max=0.1)
"""Agreement does not see the head, so everybody accepts a model whose head is upside down."""


@repeated_when_out_of_step
def test_who_spoils_the_merge_is_left_out_and_everything_says_so(
    lay_out_sites: LayOut, records: Callable[[SiteHome], list[Record]]
) -> None:
    homes = lay_out_sites(
        rounds=ROUNDS,
        malfunctions={C: Malfunction(kind="head-flip")},
        barrier=PATIENT,
        rule=RULE,
    )
    with Federation(homes) as federation:
        statuses = federation.wait_until(all_finished, DEADLINE_S)
        check_in_step(federation)
        for home in homes[:2]:
            commits = [record for record in records(home) if record.kind == "commit"]
            harms = [Harm.from_plain(record.body["harm"]) for record in commits]
            # Guessing is the limit of the first round; after that it is left out every time.
            assert [harm.dropped for harm in harms] == [(), (C,), (C,)]
            for harm in harms:
                [kept] = [one.loss for one in harm.tried if one.without == harm.dropped]
                assert kept <= harm.limit
            # Its verdicts stand: it was accepted.
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
