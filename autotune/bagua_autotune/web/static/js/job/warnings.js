// Is anything wrong: what a reader should look at, in one sentence each.

import { secondsSince } from "../api.js";
import { byId, element, setText } from "../dom.js";
import { duration, percent } from "../format.js";
import { isOfRuns, isSilent } from "../state.js";
import { atLength } from "./at_length.js";

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

function silence({ job }) {
  if (!isSilent(job)) return null;
  if (job.state === "lost" && isOfRuns(job)) return null;
  if (job.state === "lost") return { text: "The service hears nothing from this training any more. Its trials are kept, and the tuning continues when the training comes back." };
  const tens = Math.floor(secondsSince(job.last_contact_at) / 10) * 10;
  return { text: `The service has heard nothing from this training for ${duration(tens)}, although its tuning is not finished.` };
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
