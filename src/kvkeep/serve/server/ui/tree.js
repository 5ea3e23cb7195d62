// The explorer of the prefix tree: the part in view, the selected node.

import {Refused, ask} from "./api.js";
import {keyItem} from "./bars.js";
import {Details} from "./details.js";
import {byId, el, hide, say, shown, theirs} from "./dom.js";
import {List} from "./list.js";
import {COLOURS, grow, titleOf} from "./model.js";
import {Picture} from "./picture.js";
import {Poll} from "./poll.js";
import {amount, many, tokens} from "./words.js";

const NODES = 400;
const EVERY_MS = 4000;
const NOTHING = "Nothing is kept yet. A prompt appears here once its first page is full.";

export class Explorer {
  // `known`: a promise of the server's first response.
  constructor(known) {
    this.path = [];  // nodes from the top down to the one in view
    this.tree = null;
    this.selected = null;
    this.details = new Details({closed: () => this.choose(null)});
    const both = {
      up: () => this.go(this.path.slice(0, -1)),
      close: () => this.details.close(),
      select: (node) => this.choose(node),
    };
    this.picture = new Picture(byId("picture"), {...both, open: (node) => this.open(node),
      over: (node) => this.over(node)});
    this.list = new List(byId("list"), both);
    this.controls();
    this.poll = new Poll({every: EVERY_MS, element: byId("kept"), ready: known, load: () => this.load(),
      show: (answer) => this.show(answer), failed: (error) => this.failed(error)});
  }

  controls() {
    byId("colour").addEventListener("change", () => {
      if (!this.byTier || !this.tree || this.tree.tiers.length) this.draw();
      // A new selection is requested even while the page is paused.
      else this.load().then((found) => this.show(found), (error) => this.failed(error));
    });
    const look = (picture) => {
      byId("as-picture").setAttribute("aria-pressed", String(picture));
      byId("as-list").setAttribute("aria-pressed", String(!picture));
      hide(byId("picture"), !picture);
      hide(byId("list"), picture);
      this.draw();
    };
    byId("as-picture").addEventListener("click", () => look(true));
    byId("as-list").addEventListener("click", () => look(false));
  }

  get root() {
    return this.path.length ? this.path[this.path.length - 1].id : null;
  }

  get byTier() {
    return byId("colour").value === "tier";
  }

  // --- the server's data ------------------------------------------------------------------

  async load() {
    const root = this.root;
    return {root, answer: await ask("kv/map", {query: {root, nodes: NODES, tiers: this.byTier}})};
  }

  show({root, answer}) {
    if (root !== this.root) return;  // the view has changed meanwhile
    if (this.byTier && !answer.tiers.length) return;  // and the colour was changed meanwhile
    this.tree = grow(answer);
    this.top = null;
    const empty = !this.tree.tops.length;
    hide(byId("kept-empty"), !empty);
    if (empty) say(byId("kept-empty"), NOTHING);
    say(byId("kept-sum"), `${many(answer.total_nodes, "node")}, ${amount(answer.total_pages)} pages of `
      + `${answer.page_size} tokens. Prompts that begin alike share what is above; the wider, the `
      + "more tokens.");
    this.draw();
    if (this.selected !== null && this.details.id === this.selected) {
      const node = this.tree.nodes.get(this.selected);
      if (node) this.details.load(node);
      else if (!this.details.node.hidden) this.details.gone();
    }
  }

  failed(error) {
    if (error instanceof Refused && error.status === 404 && this.path.length) {
      this.path = [];  // the node in view is gone
      this.details.close();
      this.poll.now();
      return;
    }
    hide(byId("kept-empty"), Boolean(this.tree) && !(error instanceof Refused));
    say(byId("kept-empty"), error.status === 401 ? "" : shown(error.message));
  }

  // --- navigation -------------------------------------------------------------------------

  // View the last of `path` and what is below it; known data is drawn at once.
  go(path) {
    const own = path.length ? this.tree?.nodes.get(path[path.length - 1].id) : null;
    this.path = path;
    this.top = own || null;
    if (own || !path.length) this.draw();
    this.poll.now();
  }

  open(node) {
    this.choose(node);
    if (node.hidden) {
      if (node.up && node.up.id !== this.root) this.go(this.pathTo(node.up));
    } else if (node.id === this.root) {
      this.go(this.path.slice(0, -1));
    } else if (node.children.length || node.subtree_nodes > 1) {
      this.go(this.pathTo(node));
    }
  }

  pathTo(node) {
    const chain = [];
    for (let one = node; one; one = one.up) chain.unshift(one);
    const at = this.path.findIndex((one) => one.id === chain[0].id);
    return [...(at < 0 ? this.path : this.path.slice(0, at)), ...chain];
  }

  choose(node) {
    this.selected = node ? node.id : null;
    this.draw();
    if (node) this.details.open(node);
    else this.back();
  }

  // Closing the details returns the focus.
  back() {
    if (!byId("picture").hidden) this.picture.reach(this.picture.focus, true);
    else this.list.reach(this.list.focus, true);
  }

  // --- drawing ------------------------------------------------------------------------------

  draw() {
    if (!this.tree) return;
    const what = {tree: this.tree, tops: this.top ? [this.top] : this.tree.tops,
      selected: this.selected, colour: byId("colour").value};
    if (byId("picture").hidden) this.list.draw(what);
    else this.picture.draw(what);
    this.crumbs();
    const legend = COLOURS[what.colour].legend(this.tree.tiers);
    byId("legend").replaceChildren(...legend.map(([kind, text]) => keyItem(kind, shown(text))));
  }

  crumbs() {
    const list = byId("crumbs");
    const state = this.path.map((one) => one.id).join(" ");
    if (list.dataset.state === state) return;
    list.dataset.state = state;
    const item = (text, path, last) => el("li", {}, el("button", {type: "button", class: "link",
      "aria-current": last ? "location" : null, on: {click: () => this.go(path)}}, text));
    list.replaceChildren(item("Everything", [], !this.path.length), ...this.path.map((one, at) =>
      item(theirs(short(titleOf(one))), this.path.slice(0, at + 1), at === this.path.length - 1)));
  }

  over(node) {
    say(byId("kept-keys"), node
      ? `${shown(titleOf(node)).slice(0, 90)} · ${tokens(node.tokens)} here, `
        + `${tokens(node.subtree_tokens)} with all below`
      : "Arrows move, Enter opens, Backspace goes up, Escape closes.");
  }
}

const short = (title) => {
  const text = shown(title);
  return text.length > 28 ? `${text.slice(0, 27)}…` : text;
};
