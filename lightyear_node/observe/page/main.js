// Polls the node and draws all panels from one state; the elements themselves hold no state.

import { get, isOffline } from "./api.js";
import { h, show } from "./dom.js";
import { openExplanation, openRound } from "./drawer.js";
import { showAgreement, showMetric } from "./history.js";
import { showMatrix, showSwitch } from "./matrix.js";
import { showFoot, showNow, showSite } from "./now.js";
import { showPeers } from "./peers.js";
import { announcement, showEvents, showRounds } from "./rounds.js";
import { ago, clock } from "./format.js";

const PAUSE_MS = 2000;
const HIDDEN_PAUSE_MS = 15000;
const PAGE_SIZE = 200; // most rounds in one response
const KEPT_MAX = 2000;
const LISTED = 12;

const $ = (id) => document.getElementById(id);
let sites = [];
let site = null;
let statuses = new Map();
let state = emptyState();
let timer = 0;

function emptyState() {
  return {
    run: null,
    status: null,
    rounds: [],
    first: null,
    events: [],
    listed: LISTED,
    answeredAt: null,
    offline: null,
    busy: false,
  };
}

async function refresh() {
  clearTimeout(timer);
  const current = state;
  if (current.busy) return; // a poll is running
  current.busy = true;
  try {
    if (site === null) await findSites();
    await poll(current);
    current.answeredAt = Date.now();
    current.offline = null;
  } catch (problem) {
    current.offline = { problem, since: current.answeredAt ?? current.offline?.since ?? Date.now() };
  }
  current.busy = false;
  if (current === state) {
    draw();
    clearTimeout(timer);
    timer = setTimeout(refresh, document.hidden ? HIDDEN_PAUSE_MS : PAUSE_MS);
  }
}

async function findSites() {
  ({ sites } = await get("api/v1", "sites"));
  const selected = new URLSearchParams(location.search).get("site");
  site = sites.find((one) => one.name === selected) ?? sites[0];
}

async function poll(known) {
  const status = await get(site.api, "status");
  if (status.run !== known.run)
    // the node was restarted and counts from the beginning
    Object.assign(known, { run: status.run, rounds: [], first: null, events: [] });
  const since = known.rounds.length ? `since=${known.rounds.at(-1).round + 1}&` : "";
  const lastEvent = known.events.at(-1)?.seq ?? 0;
  const [{ rounds, first }, { events }] = await Promise.all([
    get(site.api, `rounds?${since}limit=${PAGE_SIZE}`),
    get(site.api, `events?since=${lastEvent}`),
  ]);
  if (known.rounds.length && rounds.length) $("news").textContent = announcement(rounds.at(-1));
  known.status = status;
  known.first = first;
  known.rounds = known.rounds.concat(rounds).slice(-KEPT_MAX);
  known.events = known.events.concat(events).slice(-200);
  statuses.set(site.name, status);
  if (sites.length > 1) await pollOthers();
}

async function pollOthers() {
  const others = sites.filter((one) => one !== site);
  const answers = await Promise.allSettled(others.map((one) => get(one.api, "status")));
  answers.forEach((answer, at) => {
    if (answer.status === "fulfilled") statuses.set(others[at].name, answer.value);
  });
}

function draw() {
  drawOffline();
  if (site) showSwitch($("switch"), sites, site);
  const { status, rounds, events } = state;
  if (!status) return;
  document.title = `${status.name}: round ${status.round}, ${status.phase}`;
  showSite($("who"), status, site);
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

function drawOffline() {
  const { offline, status } = state;
  const place = $("offline");
  document.body.classList.toggle("stale", offline !== null);
  if (offline === null) {
    if (!place.hidden) $("news").textContent = "The node answers again.";
    place.hidden = true;
    return;
  }
  place.hidden = false;
  show(
    place,
    h("b", {}, `✗ No answer from ${site?.name ?? "the node"} since ${clock(offline.since)}`),
    h("span", { "aria-hidden": "true" }, ` (${ago(Date.now() - offline.since)})`),
    status ? ". The data below are from that time." : ".",
    offline.problem.hint || (isOffline(offline.problem) && offline.problem.status)
      ? ` ${offline.problem.message}.`
      : "",
    " Retrying automatically.",
  );
}

async function showOlder() {
  const known = state;
  known.listed += 50;
  let since = known.rounds[0].round; // the site may have skipped many rounds
  while (known.rounds.length < known.listed && since > known.first) {
    since = Math.max(known.first, since - PAGE_SIZE);
    const { rounds } = await get(site.api, `rounds?since=${since}&limit=${PAGE_SIZE}`);
    const oldest = known.rounds[0].round;
    known.rounds = rounds.filter((round) => round.round < oldest).concat(known.rounds);
  }
  if (known === state) draw();
}

function choose(name) {
  site = sites.find((one) => one.name === name) ?? site;
  history.replaceState(null, "", `?site=${encodeURIComponent(site.name)}`);
  state = emptyState();
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
new ResizeObserver(() => draw()).observe($("main"));
refresh();
