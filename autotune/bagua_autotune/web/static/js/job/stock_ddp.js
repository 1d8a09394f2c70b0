// For those who want the result without a tuner: in stock DistributedDataParallel, or in ours.

import { byId, setText } from "../dom.js";

const THANKS_MS = 2000;

export function showStockDdp({ job, stock_ddp, trials }) {
  byId("stock-panel").hidden = !stock_ddp;
  setText(byId("stock"), stock_ddp);
  const isKnown = job.protocol === "v2" && trials.some((trial) => trial.is_best);
  const command = `bagua-autotune export ${job.id} --configuration > tuned.json`;
  const use = `All of it, without a service: ${command}, then train with BAGUA_CONFIGURATION=tuned.json`;
  setText(byId("without-service"), isKnown ? use : "");
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
