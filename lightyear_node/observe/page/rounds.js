// The list of completed rounds, and the newest log lines.

import { h, show } from "./dom.js";
import { FATES, counted, listed, moment, number } from "./format.js";

export function showRounds(place, rounds, shown) {
  if (rounds.length === 0) {
    show(place, h("p", { class: "empty" }, "No round has been completed yet."));
    return;
  }
  const newest = rounds.slice(-shown).reverse();
  show(
    place,
    h(
      "table",
      { class: "rounds" },
      h(
        "thead",
        {},
        h(
          "tr",
          {},
          ["Round", "Time", "Sites", "Not used"].map((name) => h("th", { scope: "col" }, name)),
        ),
      ),
      h("tbody", {}, newest.map(row)),
    ),
  );
}

function row(round) {
  const unused = round.verdicts
    .filter((verdict) => verdict.fate !== "accepted")
    .map((verdict) => verdict.peer)
    .concat(round.dropped);
  return h(
    "tr",
    { "data-key": round.round },
    h(
      "td",
      {},
      h(
        "button",
        {
          type: "button",
          class: "link",
          "data-round-shown": round.round,
          "aria-label": `Verdicts of round ${round.round}`,
        },
        round.round,
      ),
    ),
    h("td", {}, moment(round.time)),
    h(
      "td",
      { class: "counts" },
      Object.entries(FATES)
        .filter(([fate]) => round[fate] > 0)
        .map(([fate, { mark, word }]) =>
          h(
            "span",
            { class: `fate ${fate}` },
            `${mark} ${round[fate]}`,
            h("span", { class: "unseen" }, ` ${word} `),
          ),
        ),
    ),
    h("td", { class: "names" }, round.kept_local ? "no model was merged" : listed(unused) || "–"),
  );
}

export function announcement(round) {
  const rejected = round.verdicts
    .filter((verdict) => verdict.fate === "rejected")
    .map((verdict) => verdict.peer);
  const words = [`${counted(round.accepted, "site", "sites")} accepted`];
  if (rejected.length) words.push(`rejected: ${listed(rejected)}`);
  if (round.missing) words.push(`${round.missing} missing`);
  return `Round ${round.round} is completed: ${words.join(", ")}.`;
}

const LEVELS = { warning: "! warning", error: "✗ error", critical: "✗ error" };
const EVENTS_SHOWN = 60;

export function showEvents(place, events) {
  if (events.length === 0) {
    show(place, h("p", { class: "empty" }, "Nothing yet."));
    return;
  }
  show(
    place,
    h(
      "ol",
      { class: "plain" },
      events
        .slice(-EVENTS_SHOWN)
        .reverse()
        .map((event) =>
          h(
            "li",
            { class: `event ${event.level}`, "data-key": event.seq },
            h("time", { datetime: event.time }, moment(event.time)),
            h(
              "span",
              {},
              LEVELS[event.level] && h("b", {}, `${LEVELS[event.level]}: `),
              event.message,
            ),
          ),
        ),
    ),
  );
}

export function change(before, after) {
  const names = [...new Set([...Object.keys(before), ...Object.keys(after)])];
  return names
    .map((name) => `${name} ${number(before[name], 3)} → ${number(after[name], 3)}`)
    .join(", ");
}
