// For a whole federation on one machine: the choice of a site, and the matrix of verdicts.

import { h, show } from "./dom.js";
import { FATES, number } from "./format.js";

export function showSwitch(place, sites, chosen) {
  place.hidden = sites.length < 2;
  show(
    place,
    sites.map((site) =>
      h(
        "button",
        {
          type: "button",
          "data-site": site.name,
          "aria-pressed": String(site.name === chosen.name),
          title: site.about ?? "",
        },
        site.name,
        site.about && h("span", { class: "bad" }, " ✗"),
      ),
    ),
  );
}

export function showMatrix(place, sites, statuses) {
  const names = sites.map((site) => site.name);
  show(
    place,
    h(
      "table",
      { class: "matrix" },
      h(
        "thead",
        {},
        h(
          "tr",
          {},
          h("td", {}),
          names.map((name) => h("th", { scope: "col" }, name)),
        ),
      ),
      h(
        "tbody",
        {},
        sites.map((site) =>
          h(
            "tr",
            { "data-key": site.name },
            h(
              "th",
              { scope: "row" },
              h("button", { type: "button", class: "link", "data-site": site.name }, site.name),
              site.about && h("span", { class: "chip bad" }, `✗ ${site.about}`),
            ),
            names.map((name) => cell(site.name, name, statuses.get(site.name))),
          ),
        ),
      ),
    ),
  );
}

function cell(judge, name, status) {
  if (judge === name) return h("td", { class: "self" }, h("span", { "aria-label": "itself" }, "·"));
  const peer = status?.peers.find((one) => one.name === name);
  const fate = FATES[peer?.verdict];
  if (!fate) return h("td", {}, h("span", { class: "unseen" }, "no verdict yet"));
  const score = peer.verdict !== "missing" && typeof peer.agreement === "number";
  return h(
    "td",
    { class: peer.verdict, title: peer.reason_about ?? "" },
    h("span", { class: "mark" }, fate.mark),
    h("span", { class: "unseen" }, ` ${fate.word} `),
    score && h("small", {}, number(peer.agreement)),
  );
}
