// Keeps a page up to date: polls while it is seen, and says so when the service does not answer.

import { askForToken, offerToForget, Refused } from "./api.js";
import { byId, setText } from "./dom.js";
import { duration } from "./words.js";

const SLOWEST_RETRY_MS = 10_000;
const MISSING_RETRY_MS = 60_000;

/**
 * Calls `update`, which returns after how many milliseconds to call it again, for ever.
 * Returns what asks at once.
 */
export function keepLive(update) {
  let timer = null;
  let isRunning = false;
  let isAwaited = false; // asked for again meanwhile
  let failures = 0;
  let lastAnswer = null;

  async function poll() {
    clearTimeout(timer);
    if (isRunning) isAwaited = true;
    if (isRunning || document.hidden) return;
    isRunning = true;
    isAwaited = false;
    let wait = null;
    try {
      wait = await update();
      failures = 0;
      lastAnswer = Date.now();
      succeed();
    } catch (error) {
      wait = explain(error);
    }
    isRunning = false;
    if (document.hidden) pause();
    else if (wait !== null) timer = setTimeout(poll, isAwaited ? 0 : wait);
  }

  function succeed() {
    present("content");
    byId("trouble").hidden = true;
    connection("live", "Live");
    offerToForget();
  }

  function explain(error) {
    if (error instanceof Refused && error.status === 401) {
      byId("trouble").hidden = true;
      connection("paused", "Token needed");
      askForToken(poll);
      return null;
    }
    if (error instanceof Refused && error.status === 404 && byId("missing")) {
      byId("trouble").hidden = true;
      present("missing");
      connection("paused", "Nothing to show");
      return MISSING_RETRY_MS;
    }
    failures += 1;
    const isRefusal = error instanceof Refused && error.status < 500;
    if (!isRefusal) console.info("no answer:", error);
    const since = lastAnswer ? ` for ${duration((Date.now() - lastAnswer) / 1000)}` : "";
    const shown = byId("content").hidden ? "" : " This page shows its last answer.";
    setText(
      byId("trouble"),
      isRefusal ? error.message : `The service has not answered${since}; trying again.${shown}`,
    );
    byId("trouble").hidden = false;
    connection("lost", isRefusal ? "Nothing to show" : "No answer");
    return Math.min(SLOWEST_RETRY_MS, 1000 * 2 ** Math.min(failures - 1, 4));
  }

  function pause() {
    clearTimeout(timer);
    connection("paused", "Paused");
  }

  document.addEventListener("visibilitychange", () => (document.hidden ? pause() : poll()));
  poll();
  return poll;
}

/** Show either what there is, or that there is nothing. */
function present(what) {
  for (const id of ["content", "missing"]) if (byId(id)) byId(id).hidden = id !== what;
}

function connection(state, words) {
  const node = byId("connection");
  node.dataset.state = state;
  setText(node, words);
}
