// Asks /api/v2, and only for what changed; with the token, where the service wants one: typed by the
// user, or part of the address that a training printed; kept for this tab only.

import { byId, element } from "./dom.js";

const KEY = "bagua-autotune-token";

takeFromAddress();
addEventListener("hashchange", () => takeFromAddress() && location.reload());

export function authorization() {
  const token = sessionStorage.getItem(KEY);
  return token ? { Authorization: `Bearer ${encoded(token)}` } : {};
}

/** Ask for a token in place of the content; calls `onGiven` once there is one. */
export function askForToken(onGiven) {
  const gate = byId("gate");
  if (gate.firstChild) return;
  const wasWrong = sessionStorage.getItem(KEY) !== null;
  forget();
  const input = element("input", {
    type: "password", id: "token", autocomplete: "off", spellcheck: "false", required: "",
    "aria-describedby": "token-help",
  });
  const form = element(
    "form", { class: "token" },
    element("h1", {}, "This service needs a token"),
    wasWrong ? element("p", { class: "bad-text", role: "alert" }, "That token was refused.") : null,
    element("label", { for: "token" }, "Token"),
    input,
    element("p", { class: "muted", id: "token-help" },
      "The value of BAGUA_AUTOTUNE_TOKEN where the service runs; a training that runs its own " +
      "service prints an address with it. It is kept in this tab only, until the tab is closed."),
    element("button", { type: "submit", class: "primary" }, "Show the jobs"),
  );
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    sessionStorage.setItem(KEY, input.value.trim());
    gate.replaceChildren();
    onGiven();
  });
  gate.replaceChildren(form);
  byId("content").hidden = true;
  input.focus();
}

/** Show the button that forgets the token while one is known. */
export function offerToForget() {
  const button = byId("forget-token");
  button.hidden = sessionStorage.getItem(KEY) === null;
  button.onclick = () => {
    forget();
    location.reload();
  };
}

// Behind the "#" no server sees it; there it stays in no history either.
function takeFromAddress() {
  const token = new URLSearchParams(location.hash.slice(1)).get("token");
  if (!token) return false;
  sessionStorage.setItem(KEY, token);
  history.replaceState(null, "", location.pathname + location.search);
  return true;
}

function forget() {
  sessionStorage.removeItem(KEY);
  byId("forget-token").hidden = true;
}

// A header holds bytes, which fetch takes as latin-1; the service expects UTF-8.
function encoded(token) {
  return String.fromCharCode(...new TextEncoder().encode(token));
}

const ROOT = new URL("../../api/v2/", import.meta.url);
const PATIENCE_MS = 30_000;
const known = new Map(); // path -> { etag, data }
let ahead = null; // milliseconds that the service's clock is ahead of the browser's

/** The service refused; `status` says how, the message why. */
export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** The JSON at a path below /api/v2; the same object as before while nothing changed. */
export async function getJson(path) {
  const before = known.get(path);
  const response = await request(path, before ? { "If-None-Match": before.etag } : {});
  if (response.status === 304) return before.data;
  const data = await response.json();
  const etag = response.headers.get("ETag");
  if (etag) known.set(path, { etag, data });
  return data;
}

/** Save a file of the API under the name that the service gives it. */
export async function download(path) {
  const response = await request(path);
  const named = /filename="?([^";]+)"?/.exec(response.headers.get("Content-Disposition") ?? "");
  const link = document.createElement("a");
  link.href = URL.createObjectURL(await response.blob());
  link.download = named ? named[1] : path.split("/").pop();
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), PATIENCE_MS);
}

/** How long ago the service did something, by its own clock. */
export function secondsSince(date) {
  return Math.max(0, (Date.now() + (ahead ?? 0) - Date.parse(date)) / 1000);
}

async function request(path, headers = {}) {
  const response = await fetch(new URL(path, ROOT), {
    headers: { ...authorization(), ...headers },
    cache: "no-store", // so that a 304 comes through to here
    signal: AbortSignal.timeout(PATIENCE_MS),
  });
  ahead ??= clockOf(response);
  if (response.ok || response.status === 304) return response;
  const problem = await response.json().catch(() => ({}));
  throw new Refused(response.status, problem.detail ?? `The service answered ${response.status}.`);
}

// The header tells whole seconds, on the average half a one too few.
function clockOf(response) {
  const told = Date.parse(response.headers.get("Date") ?? "");
  return Number.isNaN(told) ? null : told + 500 - Date.now();
}
