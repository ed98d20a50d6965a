"""The round barrier: when to train, which updates to fetch, when to close a round, what to merge.

The laws:

1. Durable, then visible.  An update is announced only after it was recorded (P1), merged only after
   the decision was recorded (P2), and the next training starts only after the merge was recorded
   (P3).  After a crash a site announces the same update and carries out the same decision again.
2. The round of an update, its tag, is chosen when training ends: max(our round, the supported
   round, our last tag + 1).  So no training is wasted.
3. The supported round is the highest round that faulty_max + 1 distinct peers have reached.  At
   least one of them is honest, so faulty peers cannot move us past every honest site.
4. A peer has delivered when we hold an update of it with tag >= our round.  A newer update is as
   good as one of our round, so a peer that is ahead does not hold us back.
5. A round closes when min_peers have delivered and no other peer is worth waiting for (ALL) or the
   grace period is over (GRACE), or when the supported round is beyond it (OVERTAKEN).  Time alone
   never closes a round.  Peers that make progress are waited for beyond the grace period, up to a
   deadline.
6. An update of a peer is merged at most once.
7. Every table has one slot per peer or per pair of peers.  Memory does not grow with round numbers.
8. A site whose durable state is lost or outdated announces nothing until faulty_max + 1 peers have
   answered; then it signs under a new generation.  Peers count its updates but do not merge them
   for a few rounds (probation).
9. Two different updates that a peer signed for the same generation and round are evidence, from
   any source.  The evidence is recorded (P4), and the peer is excluded until an operator
   unquarantines it.
10. We vouch for at most one update per peer and round, and record it (P5) before we report it.  In
    echo mode an update is merged only if so many sites vouch for it that no other update of that
    peer and round can get as many.

This is not consensus: each site merges its own choice of updates, and no two sites need the same
model.  It is loose lock-step with rounds as Lamport time.

    OBSERVING ─▶ TRAINING ─▶ SEALING ─▶ COLLECTING ─▶ JUDGING ─▶ MERGING ─▶ TRAINING … FINISHED
       P0                           P1                        P2         P3   (or PAUSED)

This package decides and does not act.  Events go in, commands come out, time is an argument, and
equal inputs give equal outputs.  It must not use sockets, files, tensors or clocks.  `tests/sim`
runs whole federations of these objects.

`parameters`      configuration of the barrier, and the phases of a round
`durable_state`   what must survive a crash
`events`          events and commands
`peer_table`      what a site knows about its peers
`echo_votes`      which site vouches for which update
`record_quota`    how many journal records each peer may cause
`grace_period`    how long to wait for late peers
`round_closing`   when a round may close
`recovery`        our generation, after a lost or outdated durable state
`state_machine`   `Barrier`, the state machine of one site
`manifests`       which signed manifests are accepted, and those in use
`signing`         the signed byte layouts
"""
