// What the job is: topology, model, what may be tuned, software.

import { byId, element } from "../dom.js";
import { bytes, count, duration, grouped, moment, UNKNOWN } from "../format.js";
import { knobName, knobValue } from "../knobs.js";
import { isOfRuns } from "../state.js";

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
