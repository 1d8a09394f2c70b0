// A text of others that may be long: its first two lines, and all of it when asked for.

import { element } from "../dom.js";

const TWO_LINES = 120;

export function atLength(text) {
  if (text.length <= TWO_LINES && !text.includes("\n")) return element("span", {}, text);
  return element("details", { class: "at-length" }, element("summary", {}, element("span", {}, text)));
}
