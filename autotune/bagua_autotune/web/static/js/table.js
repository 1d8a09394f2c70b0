// A table that is sorted by click or key, and updated in place: focus and selection stay.

import { choose, chosen, element } from "./dom.js";

/**
 * Columns: { key, title, text(row), value(row)?, node(row)?, kind?, first? }.
 * `text` is what is shown and decides whether a cell is made again; `value` is sorted by;
 * `node` makes the cell where text is not enough; `kind` is a CSS class, "number" aligns right;
 * `first` is the direction of the first click; `more` is a part of the title for wide screens.
 * `group(row)` is 0 for most rows; those of a higher group stand below in both directions. A column
 * may have groups of its own. `parameter` names the place in the address where the sort is kept.
 */
export class SortedTable {
  constructor(parent, { caption, columns, identity, sort, rowClass, group, parameter }) {
    this.columns = columns;
    this.identity = identity;
    this.rowClass = rowClass ?? (() => "");
    this.group = group ?? (() => 0);
    this.parameter = parameter;
    this.usualSort = sort;
    this.sort = this.#sortInAddress() ?? sort;
    this.rows = [];
    this.shown = new Map(); // identity -> { row element, texts }
    this.heads = columns.map((column) => this.#head(column));
    this.body = element("tbody");
    parent.replaceChildren(
      element(
        "table", {},
        element("caption", { class: "unseen" }, caption),
        element("thead", {}, element("tr", {}, ...this.heads)),
        this.body,
      ),
    );
    this.#markSort();
  }

  update(rows) {
    this.rows = rows;
    const focused = document.activeElement;
    const seen = new Set();
    let place = this.body.firstChild;
    for (const row of this.#sorted(rows)) {
      const id = this.identity(row);
      seen.add(id);
      const { line } = this.#line(id, row);
      if (line === place) place = place.nextSibling;
      else this.body.insertBefore(line, place);
    }
    for (const [id, { line }] of this.shown) {
      if (seen.has(id)) continue;
      line.remove();
      this.shown.delete(id);
    }
    if (focused !== document.activeElement && this.body.contains(focused)) focused.focus();
  }

  #head(column) {
    const more = column.more ? element("span", { class: "spare" }, column.more) : null;
    const button = element("button", { type: "button" }, element("span", {}, column.title, more));
    button.addEventListener("click", () => this.#sortBy(column));
    return element("th", { scope: "col", class: column.kind }, button);
  }

  #sortBy(column) {
    const first = column.first ?? "ascending";
    const other = first === "ascending" ? "descending" : "ascending";
    const isSame = this.sort.key === column.key;
    this.sort = { key: column.key, direction: isSame && this.sort.direction === first ? other : first };
    if (this.parameter) choose(this.parameter, inAddress(this.sort) === inAddress(this.usualSort) ? "" : inAddress(this.sort));
    this.#markSort();
    this.update(this.rows);
  }

  #sortInAddress() {
    const text = this.parameter ? chosen(this.parameter) : "";
    const key = text.replace(/^-/, "");
    if (!this.columns.some((column) => column.key === key)) return null;
    return { key, direction: text === key ? "ascending" : "descending" };
  }

  #markSort() {
    this.columns.forEach((column, index) => {
      if (column.key === this.sort.key) this.heads[index].setAttribute("aria-sort", this.sort.direction);
      else this.heads[index].removeAttribute("aria-sort");
    });
  }

  /** Within a group unknown values come last in both directions; equal ones stay as they came. */
  #sorted(rows) {
    const column = this.columns.find(({ key }) => key === this.sort.key);
    const value = column.value ?? column.text;
    const group = column.group ?? this.group;
    const sign = this.sort.direction === "ascending" ? 1 : -1;
    return rows
      .map((row) => ({ row, found: value(row) ?? null, group: group(row) }))
      .sort((a, b) => {
        if (a.group !== b.group) return a.group - b.group;
        if (a.found === null || b.found === null) return (a.found === null) - (b.found === null);
        if (typeof a.found === "string") return sign * a.found.localeCompare(b.found, "en", { numeric: true });
        return sign * (a.found - b.found);
      })
      .map(({ row }) => row);
  }

  #line(id, row) {
    let found = this.shown.get(id);
    if (!found) {
      const cells = this.columns.map(({ kind }) => element("td", { class: kind }));
      found = { line: element("tr", {}, ...cells), texts: [] };
      this.shown.set(id, found);
    }
    found.line.className = this.rowClass(row);
    this.columns.forEach((column, index) => {
      const text = column.text(row);
      if (found.texts[index] === text) return;
      found.texts[index] = text;
      found.line.children[index].replaceChildren(column.node ? column.node(row) : text);
    });
    return found;
  }
}

/** Such as "name", or "-speedup" where it is descending. */
function inAddress({ key, direction }) {
  return direction === "ascending" ? key : `-${key}`;
}
