// A chart of lines over rounds: labels at the line ends, a dashed limit, marks for verdicts.

import { svg } from "./dom.js";

const HEIGHT = 230;
const TOP = 12;
const BOTTOM = 24;
const LEFT = 38;
const LANE = 18;
const LABEL_GAP = 14;
const DOTS_MAX = 40;

// series: {name, tone, label, points: [{x, y, cross, title}]}; limit: [{x, y}];
// lane: {name, points: [{x, cross, title}]} for verdicts without a number.
export function chart({ width, label, series, range, format, limit = [], limitName, lane }) {
  const rounds = series
    .flatMap((one) => one.points.map((point) => point.x))
    .concat((lane?.points ?? []).map((point) => point.x));
  const [first, last] = [Math.min(...rounds), Math.max(...rounds)];
  const right = Math.min(
    width / 3,
    16 + 7 * Math.max(0, ...series.map((one) => one.label?.length ?? 0)),
  );
  const floor = HEIGHT - BOTTOM - (lane?.points.length ? LANE : 0);
  const x = (round) =>
    LEFT + (last === first ? 0.5 : (round - first) / (last - first)) * (width - LEFT - right);
  const y = (value) => floor - ((value - range[0]) / (range[1] - range[0])) * (floor - TOP);
  return svg(
    "svg",
    {
      class: "plot",
      role: "img",
      "aria-label": label,
      width,
      height: HEIGHT,
      viewBox: `0 0 ${width} ${HEIGHT}`,
    },
    grid(range, format, y, width - right),
    roundTicks(first, last, x, width - right),
    series.map((one) => line(one, x, y)),
    steps(limit, limitName, x, y),
    lane?.points.length ? laneMarks(lane, x, floor + LANE) : null,
    endLabels(series, y, width - right, floor),
  );
}

// A round number as step, for four to seven grid lines.
export function stepOf(span) {
  const rough = span / 5;
  const power = 10 ** Math.floor(Math.log10(rough));
  return [1, 2, 2.5, 5, 10].map((factor) => factor * power).find((step) => step >= rough * 0.999);
}

export function rounded([least, most]) {
  const step = stepOf(most - least);
  return [Math.floor(least / step + 1e-9) * step, Math.ceil(most / step - 1e-9) * step];
}

function grid(range, format, y, end) {
  const step = stepOf(range[1] - range[0]);
  const ticks = [];
  for (let value = range[0]; value <= range[1] + step / 1e6; value += step) ticks.push(value);
  return ticks.map((value) => [
    svg("path", { class: "grid", d: `M${LEFT} ${y(value)}H${end}` }),
    svg("text", { x: LEFT - 6, y: y(value) + 4, "text-anchor": "end" }, format(value)),
  ]);
}

function roundTicks(first, last, x, end) {
  const every = Math.max(1, Math.ceil(stepOf(Math.max(1, last - first))));
  const ticks = [];
  for (let round = Math.ceil(first / every) * every; round <= last; round += every)
    ticks.push(round);
  const texts = (ticks.length ? ticks : [first]).map((round) =>
    svg("text", { x: x(round), y: HEIGHT - 6, "text-anchor": "middle" }, round),
  );
  return [svg("text", { x: end + 13, y: HEIGHT - 6 }, "round"), texts];
}

// The limit may change between rounds.
function steps(limit, name, x, y) {
  if (limit.length === 0) return null;
  const path = limit.map((point, at) =>
    at === 0 ? `M${x(point.x) - 6} ${y(point.y)}h12` : `V${y(point.y)}H${x(point.x)}`,
  );
  const last = limit.at(-1);
  return [
    svg("path", { class: "limit", d: path.join("") }),
    svg(
      "text",
      { class: "limit-name", x: x(last.x), y: y(last.y) - 6, "text-anchor": "end" },
      name,
    ),
  ];
}

function line({ tone, points }, x, y) {
  const known = points.map((point) =>
    typeof point.y === "number" ? `${x(point.x).toFixed(1)} ${y(point.y).toFixed(1)}` : null,
  );
  let path = "";
  known.forEach((at, index) => {
    if (at) path += (index > 0 && known[index - 1] ? "L" : "M") + at;
  });
  const dots = points.length <= DOTS_MAX;
  return svg(
    "g",
    { class: `line ${tone}` },
    svg("path", { class: "stroke", d: path }),
    points
      .filter(
        (point) => typeof point.y === "number" && (point.cross || dots || points.length === 1),
      )
      .map((point) => shape(point, x(point.x), y(point.y))),
  );
}

function shape(point, x, y) {
  const title = svg("title", {}, point.title);
  if (point.cross)
    return svg("path", { class: "cross", d: `M${x - 4} ${y - 4}l8 8m0 -8l-8 8` }, title);
  return svg("circle", { class: "dot", cx: x, cy: y, r: 3 }, title);
}

function laneMarks({ name, points }, x, y) {
  return svg(
    "g",
    { class: "line bad" },
    svg("text", { x: LEFT - 6, y: y + 4, "text-anchor": "end" }, name),
    points.map((point) =>
      point.cross
        ? shape(point, x(point.x), y)
        : svg(
            "path",
            { class: "dash", d: `M${x(point.x) - 4} ${y}h8` },
            svg("title", {}, point.title),
          ),
    ),
  );
}

// At the height of the last point, moved apart if they would overlap.
function endLabels(series, y, end, floor) {
  const labels = series
    .filter((one) => one.label)
    .map((one) => {
      const last = one.points.findLast((point) => typeof point.y === "number");
      return last && { ...one, at: y(last.y), wanted: y(last.y) };
    })
    .filter(Boolean)
    .sort((a, b) => a.wanted - b.wanted);
  for (let index = 1; index < labels.length; index++)
    labels[index].at = Math.max(labels[index].at, labels[index - 1].at + LABEL_GAP);
  const over = labels.length ? Math.max(0, labels.at(-1).at - floor) : 0;
  for (let index = labels.length - 1; over > 0 && index >= 0; index--)
    labels[index].at = Math.min(labels[index].at, floor - (labels.length - 1 - index) * LABEL_GAP);
  return labels.map(({ label, at, wanted, tone }) =>
    svg(
      "g",
      { class: `line ${tone}` },
      svg("path", { class: "leader", d: `M${end + 4} ${wanted}L${end + 10} ${at}` }),
      svg("text", { class: "end", x: end + 13, y: at + 4 }, label),
    ),
  );
}
