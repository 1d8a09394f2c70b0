// Elements by the DOM alone: text from others is only ever text. And what the reader chose to see,
// kept in the address, so that a link shows the same.

const SVG = "http://www.w3.org/2000/svg";

export const byId = (id) => document.getElementById(id);

/** An element; properties are set as attributes, children are nodes or text. */
export function element(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

export function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

/** Set a text only where it changed, so that a screen reader is not told again. */
export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

/** Replace what a node holds by what `children` makes, where what it shows is something else by now. */
export function renew(node, shown, children) {
  const words = JSON.stringify(shown);
  if (node.dataset.shown === words) return;
  node.dataset.shown = words;
  node.replaceChildren(...children());
}

/** What the address says of one choice; empty where it says nothing. */
export function chosen(name) {
  return new URLSearchParams(location.search).get(name) ?? "";
}

/** Keep a choice; an empty one is what everybody sees at first, and is not named. */
export function choose(name, value) {
  const address = new URL(location.href);
  if (value) address.searchParams.set(name, value);
  else address.searchParams.delete(name);
  history.replaceState(null, "", address);
}
