// The token, where the service wants one: typed by the user, or part of the address that a training
// printed; kept for this tab only.

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
