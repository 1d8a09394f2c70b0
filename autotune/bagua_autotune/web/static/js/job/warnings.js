// Is anything wrong: what a reader should look at, in one sentence each.

import { secondsSince } from "../api.js";
import { byId, element, setText } from "../dom.js";
import { duration, percent } from "../format.js";
import { atLength } from "./at_length.js";

const SILENT_SECONDS = 60;
const KINDS = { silence, slowRank, failures };

const shown = new Map(); // kind -> its notice

export function showWarnings(overview) {
  const appeared = [];
  for (const [kind, find] of Object.entries(KINDS)) {
    const found = find(overview);
    const before = shown.get(kind);
    if (found === null) {
      before?.remove();
      shown.delete(kind);
    } else if (before?.dataset.said !== said(found)) {
      const notice = element("div", { class: "notice", "data-said": said(found) }, found.text, found.more ?? null);
      if (before) before.replaceWith(notice);
      else {
        byId("warnings").append(notice);
        appeared.push(found.text);
      }
      shown.set(kind, notice);
    }
  }
  // A screen reader is told of what is new, not of each change of a number.
  if (appeared.length || shown.size === 0) setText(byId("announced"), appeared.join(" "));
}

const said = ({ text, more }) => `${text}${more?.textContent ?? ""}`;

function silence({ job: { state, last_contact_at: last } }) {
  const silent = secondsSince(last);
  if (silent < SILENT_SECONDS || state === "finished" || state === "ended") return null;
  if (state === "lost") return { text: "The training is lost: nothing is heard of it. Where its tuning stands is kept, and it goes on when the training does." };
  return { text: `The job has not been heard of for ${duration(Math.floor(silent / 10) * 10)}, in the middle of its tuning.` };
}

function slowRank({ job: { figures } }) {
  const { slow_rank: rank, rank_spread_ratio: spread, slowest_share: share } = figures;
  if (rank === null) return null;
  return {
    text: `Rank ${rank} is slow: it computes ${percent(spread)} of a step longer than the median rank, ` +
      `and is the slowest in ${percent(share)} of the steps.`,
  };
}

function failures({ trials }) {
  const failed = trials.filter(({ state }) => state === "failed");
  if (failed.length === 0) return null;
  const last = failed.at(-1);
  const many = failed.length === 1 ? "One trial failed" : `${failed.length} trials failed`;
  return { text: `${many}; trial ${last.index}: `, more: atLength(last.failure ?? "no reason was given") };
}
