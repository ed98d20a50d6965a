// Assesses each of the other sites: marks, a level of urgency, and the main problem.

import { FATES, NOT_JUDGED, times } from "./format.js";

const LASTING = 2; // a single rejection is normal

export function assess(peer, status) {
  const dropped = (status.harm?.dropped ?? []).includes(peer.name);
  const removed = peer.state === "removed";
  const blocked = (status.blocked ?? []).includes(peer.name);
  const quarantined = (status.quarantined ?? []).includes(peer.name);
  const lasting = peer.rejected_in_a_row >= LASTING;
  const fate = FATES[peer.verdict] ?? NOT_JUDGED;
  const marks = [];
  const mark = (tone, text) => marks.push({ tone, text });
  if (quarantined) mark("bad", "in quarantine");
  if (blocked) mark("warn", "blocked here");
  if (removed) mark("warn", "no longer in peers.yaml");
  if (peer.phase === "paused") mark("warn", "paused by its operator");
  if (lasting) mark("bad", `rejected ${times(peer.rejected_in_a_row)} in a row`);
  if (dropped) mark("warn", "left out of the merge");
  if (peer.left_out) mark("warn", `rounds closed without it: ${peer.left_out}`);
  if (peer.differs) mark("warn", "other settings than ours");
  if (peer.opinion && peer.opinion !== "accepts ours") mark("warn", "refuses our update");
  return {
    fate,
    marks,
    level: level(peer, { removed, blocked, quarantined, lasting, dropped }),
    problem: problemOf(peer, { removed, blocked, quarantined, dropped }),
    dropped,
  };
}

function level(peer, { removed, blocked, quarantined, lasting, dropped }) {
  if (removed) return "none";
  if (quarantined || lasting) return "bad";
  const silent = ["unreachable", "one-way", "refused"].includes(peer.state);
  if (blocked || silent || dropped || ["rejected", "missing"].includes(peer.verdict)) return "warn";
  return peer.verdict === "accepted" ? "ok" : "none";
}

// The main problem in one sentence, or null.
function problemOf(peer, { removed, blocked, quarantined, dropped }) {
  if (removed) return null;
  if (quarantined) return "has signed two different updates for one round and is in quarantine";
  if (blocked) return "is blocked here";
  if (peer.verdict === "rejected")
    return `was rejected ${
      peer.rejected_in_a_row > 1 ? `${times(peer.rejected_in_a_row)} in a row` : "in the last round"
    }: ${peer.reason_about}`;
  if (peer.state === "unreachable") return `cannot be reached: ${peer.about || "no answer"}`;
  if (peer.state === "refused") return `cannot be used: ${peer.about}`;
  if (peer.state === "one-way") return peer.about;
  if (peer.verdict === "missing") return `was missing in the last round: ${peer.reason_about}`;
  if (dropped) return "was left out of the merge, which did worse on our data with it";
  return null;
}

const ORDER = { bad: 0, warn: 1, none: 2, ok: 3 };

export function byUrgency(status) {
  return status.peers
    .map((peer) => ({ peer, assessment: assess(peer, status) }))
    .sort(
      (a, b) =>
        ORDER[a.assessment.level] - ORDER[b.assessment.level] || a.peer.name.localeCompare(b.peer.name),
    );
}
