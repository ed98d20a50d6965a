// The top of the page: the site, its progress, and which sites need attention.

import { h, show } from "./dom.js";
import { byUrgency } from "./assessment.js";
import { PHASES, counted, listed, mebibytes } from "./format.js";

const NAMED = 5;

export function showSite(place, status, site) {
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
  show(place, progress(status), attention(status));
}

function progress(status) {
  const done = status.finished ? status.rounds : Math.min(status.round, status.rounds);
  const share =
    status.progress && status.progress[1]
      ? ` (${Math.floor((100 * status.progress[0]) / status.progress[1])} %)`
      : "";
  const doing = PHASES[status.phase] ?? status.phase;
  return h(
    "div",
    { class: "rounds-done" },
    h("p", { class: "count" }, h("b", {}, done), ` of ${status.rounds} rounds done`),
    h("progress", { max: status.rounds, value: done, "aria-label": "rounds done" }),
    h("p", { class: "phase" }, `${status.name} `, h("b", {}, doing), share),
    h("p", { class: "about" }, status.waiting),
  );
}

function attention(status) {
  const lines = [...ownProblems(status), ...others(status)];
  if (lines.length === 0) lines.push(allWell(status));
  return h("div", { class: "attention" }, h("ul", { class: "plain" }, lines));
}

function ownProblems(status) {
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
        "perhaps our own data or training has changed",
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
  if (status.worth?.served === "alone" && status.worth.gain < 0)
    lines.push(
      line(
        "warn",
        "!",
        "The model trained alone is served: ",
        "the federated one did worse on our data",
      ),
    );
  return lines;
}

function others(status) {
  const urgent = byUrgency(status).filter(({ assessment }) => assessment.problem);
  const lines = urgent
    .slice(0, NAMED)
    .map(({ peer, assessment }) =>
      line(
        assessment.level,
        assessment.level === "bad" ? "✗" : "!",
        `${peer.name} `,
        assessment.problem,
        peer.verdict_round !== null && whyButton(peer),
      ),
    );
  if (urgent.length > NAMED) {
    const names = urgent.slice(NAMED).map(({ peer }) => peer.name);
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
    return line("none", "·", "No verdict yet: ", "the first round is not complete");
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
    `Our certificate expires on ${status.certificate_expires.slice(0, 10)}. `,
    "This page is read-only and sends requests to this node only.",
  );
}
