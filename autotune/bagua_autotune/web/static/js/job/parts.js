// What the service answers by itself, later than the rest: buckets of the best configuration beside
// those of the default, to the scale of their bytes; and how much of the gain each knob explains, as
// bars; the text beside a bar says all that it shows.

import { getJson } from "../api.js";
import { byId, element, renew, setText } from "../dom.js";
import { bytes, count, grouped, knobName, knobValue } from "../words.js";

const RETRY_MS = 10_000;

export class Part {
  /** `data` stands in until there is an answer; `note` is the element that tells of a failure. */
  constructor(path, data, note, onChange) {
    this.path = path;
    this.data = data;
    this.note = note;
    this.onChange = onChange;
    this.reason = null; // what the data follow from
    this.isAsked = false;
    this.notBefore = 0;
  }

  /** Without a change of the reason it is not asked for again, unless the answer was not whole. */
  async follow(reason, isWhole = () => true) {
    if (this.isAsked || this.reason === reason || Date.now() < this.notBefore) return;
    this.isAsked = true;
    try {
      this.data = await getJson(this.path);
      if (isWhole(this.data)) this.reason = reason;
      setText(byId(this.note), "");
      this.onChange();
    } catch (error) {
      console.info("no answer:", error);
      this.notBefore = Date.now() + RETRY_MS;
      setText(byId(this.note), "The service did not answer this part. It will be asked again.");
    }
    this.isAsked = false;
  }
}

const BLOCK_PX = 4;
const NAMES = { default: "Default", incumbent: "Best" };
const STEPS = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10, Home: -Infinity, End: Infinity };

export function showBuckets({ layouts, bytes: total, tensors }) {
  byId("buckets-panel").hidden = layouts.length === 0;
  renew(byId("buckets"), layouts, () => [
    ...layouts.map(layoutRow),
    element("div", { class: "bucket-scale muted", "aria-hidden": "true" },
      element("span", {}, "0 B"),
      element("span", {}, count(tensors, "tensor")),
      element("span", {}, bytes(total))),
  ]);
}

function layoutRow({ role, words, buckets }) {
  const each = Math.ceil((buckets.length * BLOCK_PX) / byId("buckets").clientWidth);
  const blocks = merged(buckets, each);
  const atRest = summary(buckets) + (each > 1 ? `; ${each} are drawn as one` : "");
  const status = element("p", { class: "bucket-status", "aria-live": "polite" }, atRest);
  const bar = element(
    "div",
    { class: `bucket-bar ${role}`, tabindex: "0", role: "img",
      "aria-label": `${NAMES[role]}: ${atRest}. Arrow keys read them.` },
    ...blocks.map((block) => {
      const node = element("div", { class: "bucket" }, element("span", { "aria-hidden": "true" }, bytes(block.bytes)));
      node.style.flexGrow = String(block.bytes);
      return node;
    }),
  );
  bar.classList.toggle("dense", blocks.length > 60);
  readable(bar, blocks, status, atRest);
  return element("div", { class: "bucket-row" },
    element("p", { class: "bucket-name" }, element("b", {}, NAMES[role]), ` ${words}`), status, bar);
}

/** Neighbours in one block where there are more buckets than can be seen apart. */
function merged(buckets, each) {
  const blocks = [];
  for (let start = 0; start < buckets.length; start += each) {
    const part = buckets.slice(start, start + each);
    const size = part.reduce((sum, bucket) => sum + bucket.bytes, 0);
    const held = part.reduce((sum, bucket) => sum + bucket.tensors, 0);
    const [first, last] = [part[0].first, part.at(-1).last];
    const which = part.length === 1 ? `Bucket ${start + 1}` : `Buckets ${start + 1} to ${start + part.length}`;
    const names = held === 1 ? first : `${first} to ${last}`;
    blocks.push({ bytes: size, text: `${which} of ${grouped(buckets.length)}: ${bytes(size)}, ${count(held, "tensor")}, ${names}` });
  }
  return blocks;
}

function summary(buckets) {
  if (buckets.length === 1) return `1 bucket of ${bytes(buckets[0].bytes)}`;
  const sizes = buckets.map((bucket) => bucket.bytes);
  return `${grouped(buckets.length)} buckets of ${bytes(Math.min(...sizes))} to ${bytes(Math.max(...sizes))}`;
}

function readable(bar, blocks, status, atRest) {
  let chosen = null;
  const choose = (index) => {
    if (chosen !== null) bar.children[chosen].classList.remove("chosen");
    chosen = index;
    if (index !== null) bar.children[index].classList.add("chosen");
    setText(status, index === null ? atRest : blocks[index].text);
  };
  bar.addEventListener("keydown", (event) => {
    const step = STEPS[event.key];
    if (event.key === "Escape") choose(null);
    if (step === undefined) return;
    event.preventDefault();
    const from = chosen ?? (step < 0 ? blocks.length : -1);
    choose(Math.max(0, Math.min(blocks.length - 1, from + step)));
  });
  bar.addEventListener("pointerover", ({ target }) => {
    const index = [...bar.children].indexOf(target.closest(".bucket"));
    if (index >= 0) choose(index);
  });
  bar.addEventListener("pointerleave", () => choose(null));
  bar.addEventListener("blur", () => choose(null));
}

const EXPLANATION =
  "How much of the gain each knob explains, by the search's model of the step time. Thin lines: 95 % interval. " +
  "A knob that is not listed has the default's value.";

export function showImportance({ trials, default_configuration: standard }, { shares, unknown }) {
  byId("importance-panel").hidden = shares.length === 0 && !unknown;
  const best = trials.find((trial) => trial.is_best)?.configuration ?? standard;
  setText(byId("importance-note"), unknown || (shares.length === 1 ? "Only this knob differs from the default." : EXPLANATION));
  const least = Math.min(0, ...shares.map(({ low }) => low));
  const most = Math.max(1, ...shares.map(({ high }) => high));
  const place = (share) => `${(100 * (share - least)) / (most - least)}%`;
  renew(byId("importance"), [shares, best], () =>
    shares.map((share) => shareRow(share, `${knobValue(share.knob, standard[share.knob])} → ${knobValue(share.knob, best[share.knob])}`, place)));
}

function shareRow({ knob, share, low, high }, change, place) {
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
