// Asks the node again and again and shows what it says.  Each panel is drawn from this one state;
// nothing is kept in the elements themselves.

import { ask, isGone } from "./api.js";
import { h, show } from "./dom.js";
import { openExplanation, openRound } from "./drawer.js";
import { showAgreement, showMetric } from "./history.js";
import { showMatrix, showSwitch } from "./matrix.js";
import { showFoot, showNow, showWho } from "./now.js";
import { showPeers } from "./peers.js";
import { newsOf, showEvents, showRounds } from "./rounds.js";
import { ago, clock } from "./words.js";

const PAUSE_MS = 2000;
const HIDDEN_PAUSE_MS = 15000;
const AT_ONCE = 200; // as many rounds as one answer may have
const KEPT_MAX = 2000;
const LISTED = 12;

const $ = (id) => document.getElementById(id);
let sites = [];
let site = null;
let statuses = new Map();
let state = nothingYet();
let timer = 0;

function nothingYet() {
  return {
    run: null,
    status: null,
    rounds: [],
    first: null,
    events: [],
    listed: LISTED,
    answeredAt: null,
    gone: null,
    busy: false,
  };
}

async function refresh() {
  clearTimeout(timer);
  const asked = state;
  if (asked.busy) return; // whoever asks already will go on
  asked.busy = true;
  try {
    if (site === null) await meet();
    await follow(asked);
    asked.answeredAt = Date.now();
    asked.gone = null;
  } catch (problem) {
    asked.gone = { problem, since: asked.answeredAt ?? asked.gone?.since ?? Date.now() };
  }
  asked.busy = false;
  if (asked === state) {
    draw();
    clearTimeout(timer);
    timer = setTimeout(refresh, document.hidden ? HIDDEN_PAUSE_MS : PAUSE_MS);
  }
}

async function meet() {
  ({ sites } = await ask("api/v1", "sites"));
  const wanted = new URLSearchParams(location.search).get("site");
  site = sites.find((one) => one.name === wanted) ?? sites[0];
}

async function follow(known) {
  const status = await ask(site.api, "status");
  if (status.run !== known.run)
    // it was started again: what it counts begins anew
    Object.assign(known, { run: status.run, rounds: [], first: null, events: [] });
  const since = known.rounds.length ? `since=${known.rounds.at(-1).round + 1}&` : "";
  const lastEvent = known.events.at(-1)?.seq ?? 0;
  const [{ rounds, first }, { events }] = await Promise.all([
    ask(site.api, `rounds?${since}limit=${AT_ONCE}`),
    ask(site.api, `events?since=${lastEvent}`),
  ]);
  if (known.rounds.length && rounds.length) $("news").textContent = newsOf(rounds.at(-1));
  known.status = status;
  known.first = first;
  known.rounds = known.rounds.concat(rounds).slice(-KEPT_MAX);
  known.events = known.events.concat(events).slice(-200);
  statuses.set(site.name, status);
  if (sites.length > 1) await askEverybody();
}

async function askEverybody() {
  const others = sites.filter((one) => one !== site);
  const answers = await Promise.allSettled(others.map((one) => ask(one.api, "status")));
  answers.forEach((answer, at) => {
    if (answer.status === "fulfilled") statuses.set(others[at].name, answer.value);
  });
}

function draw() {
  drawGone();
  if (site) showSwitch($("switch"), sites, site);
  const { status, rounds, events } = state;
  if (!status) return;
  document.title = `${status.name}: round ${status.round}, ${status.phase}`;
  showWho($("who"), status, site);
  showNow($("now"), status);
  showPeers($("peers"), status, rounds);
  showAgreement($("agreement"), $("highlight"), status, rounds);
  showMetric($("metric"), $("measure"), rounds);
  showRounds($("rounds"), rounds, state.listed);
  $("older").hidden =
    rounds.length <= state.listed && (rounds.length === 0 || rounds[0].round <= state.first);
  showEvents($("events"), events);
  showFoot($("foot"), status);
  $("matrix-panel").hidden = sites.length < 2;
  if (sites.length > 1) showMatrix($("matrix"), sites, statuses);
}

function drawGone() {
  const { gone, status } = state;
  const place = $("gone");
  document.body.classList.toggle("stale", gone !== null);
  if (gone === null) {
    if (!place.hidden) $("news").textContent = "The node answers again.";
    place.hidden = true;
    return;
  }
  place.hidden = false;
  show(
    place,
    h("b", {}, `✗ No answer from ${site?.name ?? "the node"} since ${clock(gone.since)}`),
    h("span", { "aria-hidden": "true" }, ` (${ago(Date.now() - gone.since)})`),
    status ? ". What is shown below is from then." : ".",
    gone.problem.hint || (isGone(gone.problem) && gone.problem.status)
      ? ` ${gone.problem.message}.`
      : "",
    " Trying again by itself.",
  );
}

async function showOlder() {
  const known = state;
  known.listed += 50;
  let since = known.rounds[0].round; // the site may have left out many before it
  while (known.rounds.length < known.listed && since > known.first) {
    since = Math.max(known.first, since - AT_ONCE);
    const { rounds } = await ask(site.api, `rounds?since=${since}&limit=${AT_ONCE}`);
    const oldest = known.rounds[0].round;
    known.rounds = rounds.filter((round) => round.round < oldest).concat(known.rounds);
  }
  if (known === state) draw();
}

function choose(name) {
  site = sites.find((one) => one.name === name) ?? site;
  history.replaceState(null, "", `?site=${encodeURIComponent(site.name)}`);
  state = nothingYet();
  showSwitch($("switch"), sites, site);
  refresh();
}

document.addEventListener("click", (event) => {
  const button = event.target.closest("button");
  if (!button) return;
  const { explain, round, roundShown, site: chosen } = button.dataset;
  if (explain !== undefined) openExplanation(site.api, Number(round), explain);
  else if (roundShown !== undefined) openRound(site.api, Number(roundShown));
  else if (chosen !== undefined) choose(chosen);
});
$("older").addEventListener("click", () => showOlder().catch(refresh));
for (const id of ["highlight", "measure"]) $(id).addEventListener("change", draw);
document.addEventListener("visibilitychange", () => {
  if (!document.hidden) refresh();
});
new ResizeObserver(() => draw()).observe($("old"));
refresh();
