// The tree as a list, one line per node, which opens and closes.

import {el, keyed, say, shown, theirs} from "./dom.js";
import {COLOURS, figuresOf, titleOf} from "./model.js";

const OPEN_AT_FIRST = 2;  // levels
const MOST = 400;

export class List {
  // `on`: {select(node), up(), close()}
  constructor(host, on) {
    this.host = host;
    this.on = on;
    this.turned = new Map();  // id → opened or closed by hand
    this.focus = null;
    this.lines = [];
    host.addEventListener("keydown", (event) => this.key(event));
    host.addEventListener("click", (event) => {
      const line = this.lineOf(event.target);
      if (!line) return;
      this.reach(line.id);
      if (event.target.closest(".turn")) this.turn(line, !this.isOpen(line));
      else on.select(line);
    });
  }

  draw(what) {
    this.drawn = what;
    this.lines = [];
    const add = (nodes) => {
      for (const node of nodes) {
        if (this.lines.length >= MOST) return;
        this.lines.push(node);
        if (this.isOpen(node)) add(node.children);
      }
    };
    add(what.tops);
    if (!this.lines.some((node) => node.id === this.focus)) {
      this.focus = this.lines.length ? this.lines[0].id : null;
    }
    const top = what.tops.length ? what.tops[0].level : 0;
    const colour = COLOURS[what.colour];
    keyed(this.host, this.lines, (node) => node.id, () => el("div", {role: "treeitem"},
      el("span", {class: "turn", "aria-hidden": "true"}), el("span", {class: "swatch"}),
      el("span", {class: "what"}), el("span", {class: "many"})), (line, node) => {
      this.fill(line, node, what, top, colour.of(node));
    });
  }

  fill(line, node, what, top, heat) {
    const open = this.isOpen(node);
    const siblings = node.up && node.level > top ? node.up.children : what.tops;
    line.className = "line";
    line.classList.toggle("chosen", node.id === what.selected);
    line.style.setProperty("--deep", String(Math.min(node.level - top, 12)));
    line.tabIndex = node.id === this.focus ? 0 : -1;
    line.setAttribute("aria-level", node.level - top + 1);
    line.setAttribute("aria-setsize", siblings.length);
    line.setAttribute("aria-posinset", siblings.indexOf(node) + 1);
    line.setAttribute("aria-selected", String(node.id === what.selected));
    if (node.children.length) line.setAttribute("aria-expanded", String(open));
    else line.removeAttribute("aria-expanded");
    const [turn, swatch, text, many] = line.children;
    say(turn, node.children.length ? (open ? "▾" : "▸") : "");
    swatch.className = `swatch ${heat}`;
    const title = shown(titleOf(node)).slice(0, 200);
    if (text.textContent !== title) text.replaceChildren(theirs(title));
    if (line !== document.activeElement || !many.textContent) say(many, figuresOf(node).join(" · "));
  }

  isOpen(node) {
    if (!node.children.length) return false;
    const top = this.drawn.tops.length ? this.drawn.tops[0].level : 0;
    return this.turned.get(node.id) ?? node.level - top < OPEN_AT_FIRST;
  }

  turn(node, open) {
    this.turned.set(node.id, open);
    this.draw(this.drawn);
  }

  lineOf(target) {
    const line = target.closest?.("[role=treeitem]");
    return line ? this.lines.find((node) => String(node.id) === line.dataset.key) : undefined;
  }

  reach(id, move = false) {
    this.focus = id;
    for (const line of this.host.children) {
      line.tabIndex = line.dataset.key === String(id) ? 0 : -1;
      if (move && line.tabIndex === 0) line.focus();
    }
  }

  key(event) {
    if (event.altKey || event.ctrlKey || event.metaKey) return;
    const node = this.lineOf(event.target);
    if (!node) return;
    const at = this.lines.indexOf(node);
    const go = (to) => to && this.reach(to.id, true);
    const act = {
      ArrowDown: () => go(this.lines[at + 1]),
      ArrowUp: () => go(this.lines[at - 1]),
      Home: () => go(this.lines[0]),
      End: () => go(this.lines[this.lines.length - 1]),
      ArrowRight: () => {
        if (this.isOpen(node)) go(node.children[0]);
        else if (node.children.length) this.turn(node, true);
      },
      ArrowLeft: () => {
        if (this.isOpen(node)) this.turn(node, false);
        else go(this.lines.includes(node.up) ? node.up : null);
      },
      Enter: () => this.on.select(node),
      " ": () => this.on.select(node),
      Backspace: () => this.on.up(),
      Escape: () => this.on.close(),
    }[event.key];
    if (!act) return;
    act();
    event.preventDefault();
  }
}
