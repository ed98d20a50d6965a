// Both charts: the agreement of the other sites, and our own model before and after the merge.

import { chart, rounded } from "./chart.js";
import { h, show } from "./dom.js";
import { counted, number } from "./format.js";

const WINDOW = 200; // newest rounds; the list has older ones
const TONES = 7;
const LABELLED = 8;
const NARROW = 420;
const ALL_SITES = "";

export function showAgreement(place, select, status, rounds) {
  const names = status.peers.map((peer) => peer.name);
  show(
    select,
    [ALL_SITES, ...names].map((name) => h("option", { value: name }, name || "none")),
  );
  const shown = rounds.slice(-WINDOW);
  if (shown.length === 0 || names.length === 0) return empty(place);
  const rejected = new Set(
    status.peers.filter((peer) => peer.verdict === "rejected").map((peer) => peer.name),
  );
  const chosen = names.includes(select.value) ? select.value : ALL_SITES;
  const few = names.length <= LABELLED;
  const lane = { name: "none", points: [] };
  const series = names.map((name, index) => {
    const points = pointsOf(name, shown, lane);
    const loud = chosen ? name === chosen : few || rejected.has(name);
    const tone = !loud ? "quiet" : rejected.has(name) ? "bad" : `tone-${index % TONES}`;
    return { name, points, tone, loud };
  });
  const labelled = series.filter((one) => one.loud).slice(0, LABELLED);
  for (const one of labelled) one.label = cut(one.name);
  const scores = series
    .flatMap((one) => one.points.map((point) => point.y))
    .filter((y) => typeof y === "number");
  // The first round has no threshold.
  const limit = shown
    .filter((round) => round.threshold > 0)
    .map((round) => ({ x: round.round, y: round.threshold }));
  const width = widthOf(place);
  const limitName = limit.length ? `τ ${number(limit.at(-1).y)}` : "";
  show(
    place,
    chart({
      width,
      series: series.sort((a, b) => a.loud - b.loud),
      limit,
      lane,
      limitName: limitName + (width > NARROW ? ", the minimum" : ""),
      range: rounded([Math.min(0, ...scores), Math.max(1, ...scores)]),
      format: (value) => number(value),
      label: summary(series, shown),
    }),
  );
}

function pointsOf(name, rounds, lane) {
  return rounds.map((round) => {
    const verdict = round.verdicts.find((one) => one.peer === name);
    const cross = verdict?.fate === "rejected";
    const title =
      `round ${round.round}, ${name}: ${verdict?.fate ?? "unknown"}` +
      (typeof verdict?.score === "number" ? `, agreement ${number(verdict.score)}` : "");
    if (verdict && typeof verdict.score !== "number" && verdict.fate !== "accepted")
      lane.points.push({ x: round.round, cross, title });
    return { x: round.round, y: verdict?.score ?? null, cross, title };
  });
}

function summary(series, rounds) {
  const lines = series.map(({ name, points }) => {
    const last = points.findLast((point) => typeof point.y === "number");
    const crosses = points.filter((point) => point.cross).length;
    return (
      `${name}: ${last ? number(last.y) : "not measured"}` +
      (crosses ? `, rejected in ${counted(crosses, "round", "rounds")}` : "")
    );
  });
  return `Agreement over ${counted(rounds.length, "round", "rounds")}. ${lines.join("; ")}.`;
}

export function showMetric(place, select, rounds) {
  const shown = rounds.slice(-WINDOW);
  const names = [
    ...new Set(
      shown.flatMap((round) => [...Object.keys(round.before), ...Object.keys(round.after)]),
    ),
  ];
  names.sort((a, b) => (a === "loss") - (b === "loss") || a.localeCompare(b));
  show(
    select,
    names.map((name) => h("option", { value: name }, name)),
  );
  if (names.length === 0) return empty(place);
  const name = names.includes(select.value) ? select.value : names[0];
  const line = (stage, label, tone) => ({
    name: stage,
    tone,
    label,
    points: shown.map((round) => ({
      x: round.round,
      y: round[stage]?.[name] ?? null,
      title: `round ${round.round}, ${label}: ${name} ${number(round[stage]?.[name], 3)}`,
    })),
  });
  const series = [line("before", "trained", "trained"), line("after", "federated", "federated")];
  const compared = shown.some((round) => round.served);
  if (compared) series.push(line("alone", "alone", "alone"));
  const values = series
    .flatMap((one) => one.points.map((point) => point.y))
    .filter((y) => typeof y === "number" && y !== Number.MAX_VALUE);
  if (values.length === 0) return empty(place);
  const last = shown.at(-1);
  show(
    place,
    chart({
      width: widthOf(place),
      series,
      range: rangeOf(values),
      format: (value) => number(value),
      label:
        `${name} over ${counted(shown.length, "round", "rounds")}; in the last one ` +
        `${number(last.before[name], 3)} trained and ${number(last.after[name], 3)} federated` +
        (compared ? `, ${number(last.alone[name], 3)} alone.` : "."),
    }),
  );
}

function rangeOf(values) {
  const [least, most] = [Math.min(...values), Math.max(...values)];
  if (most > least) return rounded([least, most]);
  const room = Math.abs(most) / 10 || 1;
  return rounded([least - room, most + room]);
}

function empty(place) {
  show(place, h("p", { class: "empty" }, "No data before the first round is complete."));
}

function widthOf(place) {
  return Math.max(240, Math.floor(place.clientWidth));
}

// Cuts the middle: names of sites often have a common prefix.
function cut(name) {
  return name.length > 16 ? `${name.slice(0, 6)}…${name.slice(-9)}` : name;
}
