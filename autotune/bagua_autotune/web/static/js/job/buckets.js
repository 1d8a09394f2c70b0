// Buckets of the best configuration beside those of the default, to the scale of their bytes.

import { byId, element, setText } from "../dom.js";
import { bytes, count, grouped } from "../format.js";

const BLOCK_PX = 4;
const NAMES = { default: "Default", incumbent: "Best" };
const STEPS = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10, Home: -Infinity, End: Infinity };

export function showBuckets({ layouts, bytes: total, tensors }) {
  const words = JSON.stringify(layouts);
  byId("buckets-panel").hidden = layouts.length === 0;
  if (byId("buckets").dataset.shown === words) return;
  byId("buckets").dataset.shown = words;
  byId("buckets").replaceChildren(
    ...layouts.map((layout) => row(layout)),
    element("div", { class: "bucket-scale muted", "aria-hidden": "true" },
      element("span", {}, "0 B"),
      element("span", {}, count(tensors, "tensor")),
      element("span", {}, bytes(total))),
  );
}

function row({ role, words, buckets }) {
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
