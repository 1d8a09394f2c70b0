// What happened, newest first.

import { byId, element } from "../dom.js";
import { duration, grouped } from "../format.js";

const WORDS = {
  switched: "switched", disagreement: "ranks disagreed", diverged: "training diverged", infeasible: "does not fit",
  ended: "training ended", note: "note", drift: "step time changed",
};

const STRONG = new Set(["disagreement", "diverged", "drift"]);

export function showEvents(events) {
  const latest = [...events].sort((a, b) => Date.parse(b.at) - Date.parse(a.at));
  const words = JSON.stringify(latest);
  if (byId("events").dataset.shown === words) return;
  byId("events").dataset.shown = words;
  byId("events").replaceChildren(
    latest.length ? element("ol", {}, ...latest.map(line)) : element("p", { class: "muted" }, "Nothing yet."),
  );
}

function line({ kind, trial, step, message, seconds: took, at }) {
  const parts = [WORDS[kind] ?? kind];
  if (trial !== null) parts.push(kind === "switched" ? `to trial ${trial}` : `in trial ${trial}`);
  if (step !== null) parts.push(`at step ${grouped(step)}`);
  if (took) parts.push(`in ${duration(took)}`);
  const text = parts.join(" ") + (message ? `: ${message}` : "");
  return element("li", {},
    element("time", { datetime: at, class: "muted" }, new Date(at).toLocaleTimeString("en-GB")),
    element("span", { class: STRONG.has(kind) ? "strong" : "" }, text));
}
