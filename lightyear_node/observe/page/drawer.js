// The side drawer: the explanation of a verdict, or all verdicts of a round.

import { get } from "./api.js";
import { h, show, svg } from "./dom.js";
import { change } from "./rounds.js";
import { FATES, capitalised, moment, number } from "./format.js";

const NAMES = {
  distance: "Distance of its weights from ours",
  agreement: "Agreement with our model",
  regret: "Extra loss on our data",
};
const drawer = document.getElementById("drawer");
const title = document.getElementById("drawer-title");
const body = document.getElementById("drawer-body");
let requests = 0;
let opener = null;

document.getElementById("close").addEventListener("click", () => drawer.close());
drawer.addEventListener("click", (event) => {
  if (event.target === drawer) drawer.close();
});

// The browser returns the focus, except to an element that was drawn again meanwhile.
drawer.addEventListener("close", () => {
  if (opener && document.activeElement === document.body)
    document.querySelector(`:not(#drawer *)[aria-label="${CSS.escape(opener)}"]`)?.focus();
});

export function openExplanation(api, round, peer) {
  const path = `rounds/${round}/peers/${encodeURIComponent(peer)}`;
  open(`${peer} in round ${round}`, api, path, (found) => {
    title.textContent = heading(found);
    return explanation(found);
  });
}

export function openRound(api, round) {
  open(`Round ${round}`, api, `rounds/${round}`, verdicts);
}

async function open(heading, api, path, draw) {
  const ours = ++requests;
  title.textContent = heading;
  show(body, h("p", { class: "empty" }, "Loading …"));
  if (!drawer.open) {
    opener = document.activeElement.getAttribute("aria-label");
    drawer.showModal();
  }
  title.focus();
  drawer.scrollTop = 0;
  let drawn;
  try {
    drawn = draw(await get(api, path));
  } catch (problem) {
    drawn = h(
      "p",
      { class: "note bad" },
      `This cannot be shown: ${problem.message}`,
      problem.hint ? ` (${problem.hint})` : "",
    );
  }
  if (ours === requests) body.replaceChildren(...[drawn].flat());
}

function heading({ peer, fate, round }) {
  const words = {
    accepted: `Why was ${peer} accepted?`,
    rejected: `Why was ${peer} rejected?`,
    missing: `Why was ${peer} missing?`,
  };
  return words[fate] ?? `${peer} in round ${round}`;
}

function explanation(found) {
  const { mark, word } = FATES[found.fate];
  return [
    h(
      "p",
      { class: "lead" },
      h("span", { class: `fate ${found.fate}` }, `${mark} ${word}`),
      ` in round ${found.round}, ${moment(found.time)}`,
    ),
    h("p", { class: "sentence" }, capitalised(found.about), "."),
    found.advice !== "nothing" && h("p", {}, h("b", {}, "What to do: "), found.advice, "."),
    h("h3", {}, "Measurements"),
    found.guard.length
      ? h("ul", { class: "plain" }, found.guard.map(measured))
      : h("p", { class: "about" }, "None: there was no update to judge."),
    h("h3", {}, "Result"),
    facts([
      ["Its weight in our new model", `${(100 * found.weight).toFixed(1)} %`],
      ["The round was closed", `${found.why}: ${found.cause_about}`],
      ["The merge", found.merge.join("; ")],
      ["Our model, before → after", change(found.before, found.after)],
    ]),
    h("h3", {}, "In the journal"),
    facts([
      ["Its update", code(found.digest ?? "none")],
      found.update_round !== null && ["From its round", found.update_round],
      ["Our model after the merge", code(found.model ?? "not merged yet")],
      [
        "Records",
        Object.entries(found.records)
          .map(([kind, seq]) => `${kind} ${seq}`)
          .join(", "),
      ],
      [
        "The same in a terminal",
        code(`lightyear-node explain --round ${found.round} --peer ${found.peer}`),
      ],
    ]),
    h(
      "p",
      {},
      h(
        "button",
        { type: "button", "data-round-shown": found.round },
        `All verdicts of round ${found.round}`,
      ),
    ),
  ].filter(Boolean);
}

function measured(line) {
  const outside = `✗ ${line.at_most ? "above" : "below"} the limit`;
  const verdict =
    line.holds === null
      ? ["none", ""]
      : line.holds
        ? ["ok", "✓ within the limit"]
        : ["bad", outside];
  return h(
    "li",
    { class: `measured ${verdict[0]}` },
    h(
      "div",
      { class: "title" },
      h("b", {}, NAMES[line.name] ?? line.name),
      h("span", { class: "verdict" }, verdict[1]),
    ),
    bar(line),
    h(
      "p",
      {},
      h("b", {}, number(line.value, 3)),
      line.limit !== null &&
        ` measured; ${line.at_most ? "at most" : "at least"} ${number(line.limit, 3)} is ` +
          (line.at_most ? "allowed" : "needed"),
    ),
    h("p", { class: "about" }, capitalised(line.meaning), "."),
  );
}

// The value as a bar, and the limit as a line across it.
function bar({ name, value, limit }) {
  if (limit === null) return null;
  const most = name === "agreement" ? 1 : Math.min(Math.max(value, limit) * 1.15, limit * 6) || 1;
  const at = (amount) => (Math.min(1, Math.max(0, amount / most)) * 300).toFixed(1);
  return svg(
    "svg",
    { class: "bar", viewBox: "0 0 300 16", preserveAspectRatio: "none", "aria-hidden": "true" },
    svg("rect", { class: "track", y: 4, width: 300, height: 8 }),
    svg("rect", { class: "value", y: 4, width: at(value), height: 8 }),
    svg("rect", { class: "limit", x: Math.max(0, at(limit) - 1), width: 2.5, height: 16 }),
  );
}

function verdicts(found) {
  return [
    h("p", { class: "lead" }, `${capitalised(found.state)}, ${moment(found.time)}`),
    facts([
      found.why && ["Closed", found.why],
      ["The merge", found.merge.join("; ")],
      ["Our model, before → after", change(found.before, found.after)],
      ["Our update", code(found.update?.digest ?? "not sealed yet")],
      ["Our model after the merge", code(found.model ?? "not merged yet")],
    ]),
    h("h3", {}, "Verdicts"),
    found.verdicts.length === 0
      ? h("p", { class: "empty" }, "None in this round.")
      : h(
          "ul",
          { class: "plain verdicts" },
          found.verdicts.map((verdict) => verdictItem(found.round, verdict)),
        ),
  ];
}

function verdictItem(round, verdict) {
  const { mark, word } = FATES[verdict.fate];
  return h(
    "li",
    {},
    h(
      "div",
      { class: "title" },
      h("b", {}, verdict.peer),
      h("span", { class: `fate ${verdict.fate}` }, `${mark} ${word}`),
    ),
    h("p", {}, capitalised(verdict.about), "."),
    h(
      "p",
      { class: "about" },
      `agreement ${number(verdict.score, 3)}, weight ${(100 * verdict.weight).toFixed(1)} %`,
    ),
    h("p", {}, code(verdict.digest ?? "no update")),
    h(
      "button",
      {
        type: "button",
        class: "link",
        "data-explain": verdict.peer,
        "data-round": round,
        "aria-label": `Why was ${verdict.peer} ${word}?`,
      },
      "Why?",
    ),
  );
}

function facts(pairs) {
  return h(
    "dl",
    {},
    pairs.filter(Boolean).map(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]),
  );
}

function code(text) {
  return h("code", {}, text);
}
