// How much of the gain each knob explains, as bars; the text beside a bar says all that it shows.

import { byId, element, setText } from "../dom.js";
import { knobName, knobValue } from "../knobs.js";

const EXPLANATION =
  "How much of the gain each knob explains, by the search's model of the step time. Thin lines: 95 % interval. " +
  "A knob that is not listed has the default's value.";

export function showImportance({ trials, default_configuration: standard }, { shares, unknown }) {
  byId("importance-panel").hidden = shares.length === 0 && !unknown;
  const best = trials.find((trial) => trial.is_best)?.configuration ?? standard;
  setText(byId("importance-note"), unknown || (shares.length === 1 ? "Only this knob differs from the default." : EXPLANATION));
  const words = JSON.stringify([shares, best]);
  if (byId("importance").dataset.shown === words) return;
  byId("importance").dataset.shown = words;
  const least = Math.min(0, ...shares.map(({ low }) => low));
  const most = Math.max(1, ...shares.map(({ high }) => high));
  const place = (share) => `${(100 * (share - least)) / (most - least)}%`;
  byId("importance").replaceChildren(
    ...shares.map((share) => row(share, `${knobValue(share.knob, standard[share.knob])} → ${knobValue(share.knob, best[share.knob])}`, place)),
  );
}

function row({ knob, share, low, high }, change, place) {
  const interval = low < high ? ` (${rounded(low)} to ${percentOf(high)})` : "";
  return element("li", {},
    element("p", {}, element("b", {}, knobName(knob)), " ", element("span", { class: "muted" }, change)),
    element("div", { class: "share", "aria-hidden": "true" },
      at("zero", place(0)),
      at("fill", place(Math.min(0, share)), place(Math.max(0, share))),
      low < high ? at("range", place(low), place(high)) : null),
    element("p", { class: "share-words" }, percentOf(share), element("span", { class: "muted" }, interval)));
}

function at(name, from, to = null) {
  const node = element("span", { class: name });
  node.style.insetInlineStart = from;
  if (to) node.style.insetInlineEnd = `calc(100% - ${to})`;
  return node;
}

// The shares of a fit are not known to tenths of a per cent.
const rounded = (ratio) => String(Math.round(100 * ratio) + 0).replace("-", "\u2212");
const percentOf = (ratio) => `${rounded(ratio)} %`;
