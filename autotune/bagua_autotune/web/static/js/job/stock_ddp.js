// The snippet for those who would rather use stock DistributedDataParallel.

import { byId, setText } from "../dom.js";

const THANKS_MS = 2000;

export function showStockDdp(snippet) {
  setText(byId("stock"), snippet);
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
