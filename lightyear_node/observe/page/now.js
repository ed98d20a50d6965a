// The top of the page: who this is, where it is in its course, and who needs looking at.

import { h, show } from "./dom.js";
import { byUrgency } from "./standing.js";
import { PHASES, counted, listed, mebibytes } from "./words.js";

const NAMED = 5;

export function showWho(place, status, site) {
  show(
    place,
    h("h1", {}, status.name),
    h(
      "p",
      { class: "federation" },
      "in the federation ",
      h("b", {}, status.federation),
      site.about && h("span", { class: "chip bad" }, `✗ in this demo it ${site.about}`),
    ),
  );
}

export function showNow(place, status) {
  show(place, course(status), attention(status));
}

function course(status) {
  const done = status.finished ? status.rounds : Math.min(status.round, status.rounds);
  const share =
    status.progress && status.progress[1]
      ? ` (${Math.floor((100 * status.progress[0]) / status.progress[1])} %)`
      : "";
  const doing = PHASES[status.phase] ?? status.phase;
  return h(
    "div",
    { class: "course" },
    h("p", { class: "count" }, h("b", {}, done), ` of ${status.rounds} rounds done`),
    h("progress", { max: status.rounds, value: done, "aria-label": "rounds done" }),
    h("p", { class: "phase" }, `${status.name} `, h("b", {}, doing), share),
    h("p", { class: "about" }, status.waiting),
  );
}

function attention(status) {
  const lines = [...ownTrouble(status), ...others(status)];
  if (lines.length === 0) lines.push(allWell(status));
  return h("div", { class: "attention" }, h("ul", { class: "plain" }, lines));
}

function ownTrouble(status) {
  const lines = status.problems.map((problem) =>
    line("bad", "✗", "This node is not ready: ", problem),
  );
  if (status.paused) lines.push(line("warn", "‖", "Paused: ", "our operator has paused this node"));
  const judged = status.peers.filter(
    (peer) => peer.verdict === "accepted" || peer.verdict === "rejected",
  );
  const rejected = judged.filter((peer) => peer.verdict === "rejected");
  if (rejected.length >= 2 && rejected.length > judged.length / 2)
    lines.push(
      line(
        "bad",
        "!",
        "Most sites were rejected: ",
        "perhaps it is our own data or training that has changed",
      ),
    );
  if (status.harm?.kept_local)
    lines.push(
      line(
        "warn",
        "!",
        "Our own model was kept: ",
        "merged with the others it did worse on our data",
      ),
    );
  return lines;
}

function others(status) {
  const noted = byUrgency(status).filter(({ standing }) => standing.complaint);
  const lines = noted
    .slice(0, NAMED)
    .map(({ peer, standing }) =>
      line(
        standing.level,
        standing.level === "bad" ? "✗" : "!",
        `${peer.name} `,
        standing.complaint,
        peer.verdict_round !== null && whyButton(peer),
      ),
    );
  if (noted.length > NAMED) {
    const names = noted.slice(NAMED).map(({ peer }) => peer.name);
    lines.push(line("warn", "!", "Also: ", listed(names, 6)));
  }
  return lines;
}

function whyButton(peer) {
  return h(
    "button",
    {
      type: "button",
      class: "link",
      "data-explain": peer.name,
      "data-round": peer.verdict_round,
      "aria-label": `Why? ${peer.name}`,
    },
    "Why?",
  );
}

function allWell(status) {
  const accepted = status.peers.filter((peer) => peer.verdict === "accepted").length;
  if (status.peers.length === 0)
    return line("none", "·", "Alone: ", "there is no other site in peers.yaml");
  if (status.peers.every((peer) => !peer.verdict))
    return line("none", "·", "No verdict yet: ", "the first round has not been completed");
  return line(
    "ok",
    "✓",
    "All is well: ",
    `${accepted} of ${counted(status.peers.length, "site", "sites")} accepted in the last round`,
  );
}

function line(tone, mark, lead, text, ...more) {
  return h(
    "li",
    { class: `note ${tone}` },
    h("span", { class: "mark", "aria-hidden": "true" }, mark),
    h("span", {}, h("b", {}, lead), text, " ", more),
  );
}

export function showFoot(place, status) {
  const { wire, raw, wire_sent: sent } = status.bytes;
  show(
    place,
    `Received ${mebibytes(wire)} for ${mebibytes(raw)} of weights, sent ${mebibytes(sent)}. `,
    `Our certificate ends on ${status.certificate_expires.slice(0, 10)}. `,
    "This page only shows: it changes nothing, and asks nobody but this node.",
  );
}
