// Asks /api/v2, and only for what changed.

import { authorization } from "./token.js";

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
