// What the reader chose to see, kept in the address, so that a link shows the same.

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
