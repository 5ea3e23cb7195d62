// The tree as an icicle: a row per level, boxes as wide as they have tokens. For screen readers
// each box is an item of a tree; Tab always reaches exactly one.

import {el, keyed, say, shown, theirs} from "./dom.js";
import {COLOURS, figuresOf, icicle, isSpace, sizeOf, titleOf} from "./model.js";

const ROW_PX = 34;
const ROWS = 14;
const LEAST_PX = 4;
const TEXT_PX = 46;

export class Picture {
  // `on`: {open(node), select(node), up(), close(), over(node or null)}
  constructor(host, on) {
    this.host = host;
    this.on = on;
    this.boxes = [];
    this.focus = null;  // the id that Tab reaches
    host.addEventListener("keydown", (event) => this.key(event));
    host.addEventListener("click", (event) => {
      const box = this.boxOf(event.target);
      if (!box) return;
      this.reach(box.node.id);
      on.open(box.node);
    });
    host.addEventListener("pointerover", (event) => on.over(this.boxOf(event.target)?.node || null));
    host.addEventListener("pointerleave", () => on.over(null));
    host.addEventListener("focusin", (event) => {
      const box = this.boxOf(event.target);
      if (!box) return;
      this.reach(box.node.id);
      on.over(box.node);
    });
    new ResizeObserver(() => this.drawn && host.clientWidth !== this.wide && this.draw(this.drawn))
      .observe(host);
  }

  // `what`: {tree, tops, selected: id, colour}
  draw(what) {
    this.drawn = what;
    this.wide = this.host.clientWidth;
    if (!this.wide) return;
    const {boxes, rows} = icicle(what.tops, LEAST_PX / this.wide, ROWS);
    const colour = COLOURS[what.colour];
    this.boxes = boxes;
    if (!boxes.some((one) => one.node.id === this.focus)) {
      this.focus = boxes.some((one) => one.node.id === what.selected) ? what.selected
        : boxes.length ? boxes[0].node.id : null;
    }
    this.host.style.height = `${Math.max(rows, 1) * ROW_PX}px`;
    keyed(this.host, boxes, (one) => one.node.id, () => el("div", {role: "treeitem"},
      el("span", {class: "what"}), el("span", {class: "many"})), (node, one) => {
      this.fill(node, one, what, colour.of(one.node));
    });
  }

  fill(node, {node: of, left, width, row, siblings, place}, what, heat) {
    const px = width * this.wide;
    node.className = ["box", heat, of.hidden ? "several" : "", of.id === what.selected ? "chosen" : "",
      of.pins ? "pinned" : "", of.cut ? "cut" : "",
      px < TEXT_PX ? "narrow" : ""].filter(Boolean).join(" ");
    node.style.left = `${100 * left}%`;
    node.style.width = `${100 * width}%`;
    node.style.top = `${row * ROW_PX}px`;
    node.tabIndex = of.id === this.focus ? 0 : -1;
    node.setAttribute("aria-level", row + 1);
    node.setAttribute("aria-setsize", siblings);
    node.setAttribute("aria-posinset", place);
    node.setAttribute("aria-selected", String(of.id === what.selected));
    if (node !== document.activeElement) {
      node.setAttribute("aria-label", `${shown(titleOf(of))}: ${figuresOf(of).join(", ")}`);
    }
    const title = px < TEXT_PX ? "" : shown(titleOf(of)).slice(0, 200);
    if (node.firstChild.textContent !== title) node.firstChild.replaceChildren(theirs(title));
    say(node.lastChild, px < 2.4 * TEXT_PX ? "" : sizeOf(of));
    node.firstChild.classList.toggle("space", isSpace(of));
  }

  boxOf(target) {
    const node = target.closest?.("[role=treeitem]");
    return node ? this.boxes.find((one) => String(one.node.id) === node.dataset.key) : undefined;
  }

  nodeOf(id) {
    return [...this.host.children].find((one) => one.dataset.key === String(id));
  }

  // Make this the one that Tab reaches; with `move`, focus it.
  reach(id, move = false) {
    const before = this.nodeOf(this.focus), after = this.nodeOf(id);
    if (!after) return;
    if (before) before.tabIndex = -1;
    after.tabIndex = 0;
    this.focus = id;
    if (move) {
      after.focus({preventScroll: true});
      after.scrollIntoView({block: "nearest"});
    }
  }

  key(event) {
    if (event.altKey || event.ctrlKey || event.metaKey) return;
    const box = this.boxOf(event.target);
    if (!box) return;
    const act = {
      Enter: () => this.on.open(box.node),
      " ": () => this.on.select(box.node),
      Backspace: () => this.on.up(),
      Escape: () => this.on.close(),
    }[event.key];
    const to = act ? undefined : this.step(event.key, box);
    if (act) act();
    else if (to) this.reach(to.node.id, true);
    else if (!event.key.startsWith("Arrow")) return;
    event.preventDefault();
  }

  step(key, box) {
    const row = this.boxes.filter((one) => one.row === box.row);
    const at = row.indexOf(box);
    return {
      ArrowRight: () => row[at + 1],
      ArrowLeft: () => row[at - 1],
      ArrowUp: () => this.boxes.find((one) => one.node === box.node.up),
      ArrowDown: () => this.boxes.find((one) => one.node.up === box.node),
      Home: () => this.boxes[0],
      End: () => this.boxes[this.boxes.length - 1],
    }[key]?.();
  }
}
