// A card for each of the other sites.

import { h, show, svg } from "./dom.js";
import { byUrgency } from "./assessment.js";
import { PHASES, capitalised, number } from "./format.js";

export function showPeers(place, status, rounds) {
  if (status.peers.length === 0) {
    show(place, h("p", { class: "empty" }, "There is no other site in peers.yaml yet."));
    return;
  }
  const newest = new Map((rounds.at(-1)?.verdicts ?? []).map((verdict) => [verdict.peer, verdict]));
  show(
    place,
    h(
      "ul",
      { class: "plain cards" },
      byUrgency(status).map(({ peer, assessment }) =>
        card(peer, assessment, status.threshold, newest.get(peer.name)),
      ),
    ),
  );
}

function card(peer, assessment, threshold, judged) {
  const { fate, marks, level, dropped } = assessment;
  const about = dropped
    ? "it was accepted, but dropped from the merge: the merged model did worse on our data with it"
    : (peer.reason_about ?? "none of its updates has been judged yet");
  return h(
    "li",
    { class: `card ${level}`, "data-key": peer.name },
    h(
      "div",
      { class: "title" },
      h("h3", {}, peer.name),
      h("span", { class: `fate ${peer.verdict ?? "none"}` }, `${fate.mark} ${fate.word}`),
    ),
    gauge(peer.agreement, threshold),
    h("p", { class: "reason" }, capitalised(about), "."),
    (judged?.failed ?? []).map((failed) =>
      h(
        "p",
        { class: "failed" },
        `✗ ${failed.name} ${number(failed.value)}, ${failed.at_most ? "at most" : "at least"} ` +
          number(failed.limit),
      ),
    ),
    marks.length > 0 &&
      h(
        "ul",
        { class: "plain marks" },
        marks.map(({ tone, text }) => h("li", { class: `chip ${tone}` }, text)),
      ),
    h(
      "div",
      { class: "base" },
      h("span", { class: "where" }, stateText(peer)),
      peer.verdict_round !== null &&
        h(
          "button",
          {
            type: "button",
            class: "link",
            "data-explain": peer.name,
            "data-round": peer.verdict_round,
            "aria-label": `Why was ${peer.name} ${fate.word}?`,
          },
          "Why?",
        ),
    ),
  );
}

function stateText(peer) {
  const state = peer.state === "one-way" ? "reaches us only" : peer.state;
  if (peer.state === "removed") return "";
  if (peer.round === null) return state;
  const doing = peer.phase === "finished" ? "finished" : `${peer.phase} in round ${peer.round}`;
  return PHASES[peer.phase] ? `${state}, ${doing}` : state;
}

const WIDTH = 240;

// The agreement on a scale from 0 to 1, with the accepted range.
export function gauge(score, threshold) {
  const at = (value) => 4 + Math.min(1, Math.max(0, value)) * (WIDTH - 8);
  const known = typeof score === "number";
  const label =
    (known ? `Agreement ${number(score)}` : "Agreement not measured") +
    (threshold === null ? "" : `; at least ${number(threshold)} is needed`);
  const passes = known && (threshold === null || score >= threshold);
  return svg(
    "svg",
    {
      class: `gauge ${!known ? "none" : passes ? "ok" : "bad"}`,
      role: "img",
      viewBox: `0 0 ${WIDTH} 42`,
      "aria-label": label,
    },
    svg("rect", { class: "track", x: 4, y: 20, width: WIDTH - 8, height: 6, rx: 3 }),
    threshold !== null &&
      svg("rect", {
        class: "zone",
        x: at(threshold),
        y: 20,
        width: WIDTH - 4 - at(threshold),
        height: 6,
        rx: 3,
      }),
    threshold !== null && svg("path", { class: "limit", d: `M${at(threshold)} 16V30` }),
    threshold !== null &&
      svg("text", { x: at(threshold), y: 40, "text-anchor": "middle" }, `τ ${number(threshold)}`),
    known && svg("path", { class: "hand", d: `M${at(score)} 24l-5.5 -9h11z` }),
    svg(
      "text",
      {
        class: "value",
        x: known ? Math.min(at(score), WIDTH - 15) : 4,
        y: 11,
        "text-anchor": known ? (score < 0.08 ? "start" : "middle") : "start",
      },
      known ? number(score) : "agreement not measured",
    ),
  );
}
