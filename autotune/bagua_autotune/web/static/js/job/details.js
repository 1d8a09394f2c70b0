// What the job is (topology, model, what may be tuned, software), what happened to it, newest first,
// and its result for those who want it without a tuner.

import { byId, element, renew, setText } from "../dom.js";
import { bytes, count, duration, grouped, isOfRuns, knobName, knobValue, moment, UNKNOWN } from "../words.js";

const PROTOCOLS = { v1: "v1 (Bagua 0.9)", runs: "whole runs, timed by their steps", scores: "whole runs, by a number that they print" };

export function showDetails({ job, ranks_per_node: nodes, software, fingerprint, limits, knobs, default_configuration: standard }, buckets) {
  const rows = [
    ["Id", job.id],
    ["Ranks", topology(job.world_size, nodes)],
    ...(isOfRuns(job) ? [] : [["Gradients", buckets ? `${count(buckets.tensors, "tensor")}, ${bytes(buckets.bytes)}` : UNKNOWN]]),
    ...Object.entries(knobs).map(([name, knob]) => [capitalised(knobName(name)), `${domain(name, knob)}; default ${knobValue(name, standard[name])}`]),
    ["Limits", limitsOf(job, limits)],
    ...(isOfRuns(job) ? [] : [["Steps expected", grouped(limits.remaining_steps)]]),
    ...(Object.keys(software).length ? [["Software", Object.entries(software).map((named) => named.join(" ")).join(", ")]] : []),
    ["Protocol", PROTOCOLS[job.protocol] ?? job.protocol],
    ["Registered", moment(job.created_at)],
    ["Last contact", moment(job.last_contact_at)],
    ...(job.ended_at ? [[job.is_lost ? "Lost" : "Ended", moment(job.ended_at)]] : []),
    ["Fingerprint", fingerprint],
  ];
  byId("details").replaceChildren(
    ...rows.map(([name, text]) => element("div", {}, element("dt", {}, name), element("dd", {}, text))),
  );
}

function limitsOf(job, limits) {
  const most = `at most ${count(limits.max_samples, "trial")}`;
  const time = limits.max_seconds ? `, ${duration(limits.max_seconds)} in all` : "";
  if (isOfRuns(job)) return most + time;
  return `${most} in a search, each measured for at most ${duration(limits.trial_seconds)} after its switch and first steps${time}, and ${count(limits.max_rounds, "search", "searches")}`;
}

function topology(size, nodes) {
  if (nodes.length === 1) return `${grouped(size)} on 1 node`;
  const isEven = nodes.every((ranks) => ranks === nodes[0]);
  return `${grouped(size)} on ${grouped(nodes.length)} nodes${isEven ? `, ${nodes[0]} each` : ""}`;
}

function domain(name, knob) {
  if (knob.type === "log_integer") return `${knobValue(name, knob.low)} to ${knobValue(name, knob.high)}`;
  if (knob.type === "categorical") return knob.values.map((choice) => knobValue(name, choice)).join(", ");
  return "any list of buckets";
}

const capitalised = (name) => name[0].toUpperCase() + name.slice(1);

const WORDS = {
  switched: "switched", disagreement: "ranks disagreed", diverged: "training diverged", infeasible: "does not fit",
  ended: "training ended", note: "note", drift: "step time changed",
};

const STRONG = new Set(["disagreement", "diverged", "drift"]);

export function showEvents(events) {
  const latest = [...events].sort((a, b) => Date.parse(b.at) - Date.parse(a.at));
  renew(byId("events"), latest, () =>
    [latest.length ? element("ol", {}, ...latest.map(line)) : element("p", { class: "muted" }, "Nothing yet.")]);
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

const THANKS_MS = 2000;

export function showStockDdp({ job, stock_ddp, trials }) {
  byId("stock-panel").hidden = !stock_ddp;
  setText(byId("stock"), stock_ddp);
  const isKnown = job.protocol === "v2" && trials.some((trial) => trial.is_best);
  const command = `bagua-autotune export ${job.id} --configuration > tuned.json`;
  const use = `All of it, without a service: ${command}, then train with BAGUA_CONFIGURATION=tuned.json`;
  setText(byId("without-service"), isKnown ? use : "");
}

byId("copy").addEventListener("click", async () => {
  const isCopied = await copy(byId("stock").textContent);
  setText(byId("copy"), isCopied ? "Copied" : "Press Ctrl+C");
  setTimeout(() => setText(byId("copy"), "Copy"), THANKS_MS);
});

async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    // Only https and localhost have a clipboard: select it instead, and try the old way.
    getSelection().selectAllChildren(byId("stock"));
    return document.execCommand("copy");
  }
}
