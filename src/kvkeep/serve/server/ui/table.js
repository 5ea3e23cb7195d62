// Tables that keep their rows from one response to the next, and become cards on a phone.

import {bar} from "./bars.js";
import {el, hide, keyed, say, shown, theirs} from "./dom.js";
import {share} from "./words.js";

// `columns`: [{head, text(item) or make() and update(node, item), number}]
export class Table {
  constructor(host, name, columns) {
    this.host = host;
    this.columns = columns;
    this.body = el("tbody");
    const head = el("tr", {}, columns.map((one) =>
      el("th", {scope: "col", class: one.number ? "n" : null}, one.head)));
    this.wide = el("div", {class: "wide", role: "group", tabindex: 0, "aria-label": name, hidden: true},
      el("table", {}, el("thead", {}, head), this.body));
    host.append(this.wide);
  }

  draw(items, key) {
    hide(this.wide, !items.length);
    keyed(this.body, items, key, () => el("tr", {}, this.columns.map((one, at) =>
      el(at ? "td" : "th", {scope: at ? null : "row", class: one.number ? "n" : null,
        "data-label": one.head}, one.make ? one.make() : null))), (row, item) => {
      this.columns.forEach((one, at) => {
        const cell = row.children[at];
        if (one.update) one.update(cell, item);
        else say(cell, one.text(item));
      });
    });
  }
}

export const name = (of, hint) => ({
  make: () => [theirs("", {class: "strong"}), el("small", {class: "quiet"})],
  update: (cell, item) => {
    say(cell.firstChild, shown(of(item)));
    say(cell.lastChild, hint ? shown(hint(item)) : "");
  },
});
export const rate = (had, all) => (all ? share(had / all) : "–");
// A share as a bar and a number; `of(item)`: [part, whole].
export const meter = (head, of) => ({
  head,
  make: () => el("span", {class: "meter"}, bar([]), el("span", {})),
  update: (cell, item) => {
    const [part, all] = of(item);
    const state = `${part} ${all}`;
    if (cell.dataset.state === state) return;
    cell.dataset.state = state;
    cell.firstChild.firstChild.replaceWith(bar([{amount: part, kind: "pool"}], all || 1));
    say(cell.firstChild.lastChild, rate(part, all));
  },
});
