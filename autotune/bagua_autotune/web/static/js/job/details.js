// What the job is: topology, model, what may be tuned, software.

import { byId, element } from "../dom.js";
import { bytes, count, duration, grouped, moment, UNKNOWN } from "../format.js";

export function showDetails({ job, ranks_per_node: nodes, software, fingerprint, limits, knobs, default_configuration: standard }, buckets) {
  const rows = [
    ["Id", job.id],
    ["Ranks", topology(job.world_size, nodes)],
    ["Gradients", buckets ? `${count(buckets.tensors, "tensor")}, ${bytes(buckets.bytes)}` : UNKNOWN],
    ...Object.entries(knobs).map(([name, knob]) => [name, `${domain(name, knob)}; default ${value(name, standard[name])}`]),
    ["Limits", `${count(limits.max_samples, "trial")}, ${duration(limits.trial_seconds)} each${limits.max_seconds ? `, ${duration(limits.max_seconds)} in all` : ""}, ${count(limits.max_rounds, "round")}; ${grouped(limits.remaining_steps)} steps expected`],
    ...(Object.keys(software).length ? [["Software", Object.entries(software).map((named) => named.join(" ")).join(", ")]] : []),
    ["Protocol", job.protocol === "v1" ? "v1 (Bagua 0.9)" : job.protocol],
    ["Registered", moment(job.created_at)],
    ["Last contact", moment(job.last_contact_at)],
    ...(job.ended_at ? [[job.is_lost ? "Lost" : "Ended", moment(job.ended_at)]] : []),
    ["Fingerprint", fingerprint],
  ];
  byId("details").replaceChildren(
    ...rows.map(([name, text]) => element("div", {}, element("dt", {}, name), element("dd", {}, text))),
  );
}

function topology(size, nodes) {
  if (nodes.length === 1) return `${grouped(size)} on 1 node`;
  const isEven = nodes.every((ranks) => ranks === nodes[0]);
  return `${grouped(size)} on ${grouped(nodes.length)} nodes${isEven ? `, ${nodes[0]} each` : ""}`;
}

function domain(name, knob) {
  if (knob.type === "log_integer") return `${value(name, knob.low)} to ${value(name, knob.high)}`;
  if (knob.type === "categorical") return knob.values.map((choice) => value(name, choice)).join(", ");
  return "a list of buckets";
}

function value(name, given) {
  if (Array.isArray(given)) return given.length ? count(given.length, "bucket") : "none";
  return name.endsWith("_bytes") && given ? bytes(given) : String(given);
}
