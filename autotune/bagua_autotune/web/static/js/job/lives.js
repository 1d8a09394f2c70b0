// A training that was started again: each of its lives, and where the newest is.

import { byId, element } from "../dom.js";
import { count, grouped, moment, times } from "../format.js";
import { SortedTable } from "../table.js";

const ENDS = {
  running: "running", finished: "finished", killed: "killed", resized: "resized", lost: "lost",
};

export function livesTable() {
  let here = null;
  const link = (life) =>
    life.job === here ? element("b", {}, String(life.number)) : element("a", { href: encodeURIComponent(life.job) }, String(life.number));
  const table = new SortedTable(byId("lives"), {
    caption: "Lives of this training",
    identity: (life) => life.job,
    parameter: "lives",
    sort: { key: "number", direction: "descending" },
    columns: [
      { key: "number", title: "Life", kind: "number", text: (life) => String(life.number), value: (life) => life.number, node: link },
      { key: "ranks", title: "Ranks", text: (life) => `${grouped(life.world_size)} on ${count(life.ranks_per_node.length, "node")}`, value: (life) => life.world_size },
      { key: "began", title: "Began", text: (life) => moment(life.created_at), value: (life) => Date.parse(life.created_at) },
      { key: "last", title: "Last contact", text: (life) => moment(life.last_contact_at), value: (life) => Date.parse(life.last_contact_at) },
      { key: "end", title: "End", text: (life) => ENDS[life.end] ?? life.end },
      { key: "trials", title: "Trials", kind: "number", text: (life) => grouped(life.trials_measured), value: (life) => life.trials_measured },
      { key: "speedup", title: "Speed-up", kind: "number", text: (life) => times(life.speedup), value: (life) => life.speedup },
      { key: "found", title: "Found", text: (life) => life.found },
    ],
  });
  return ({ job, lives }) => {
    here = job.id;
    byId("lives-panel").hidden = lives.length === 0;
    table.update(lives);
    const newest = lives.at(-1);
    const isOld = newest !== undefined && newest.job !== job.id;
    byId("newer-life").hidden = !isOld;
    if (!isOld || byId("newer-life").dataset.job === newest.job) return;
    byId("newer-life").dataset.job = newest.job;
    byId("newer-life").replaceChildren(
      "This training was started again. ",
      element("a", { href: encodeURIComponent(newest.job) }, `Life ${newest.number}, the newest`),
    );
  };
}
