// The details of one node.

import {ask} from "./api.js";
import {byId, el, hide, say, shown, theirs} from "./dom.js";
import {isSpace} from "./model.js";
import {many, tokens, whole} from "./words.js";

const MANY = "Several branches, too small to draw. Open their parent to see more of them.";
const NO_SALT = "Prompts without a cache_salt.";
const NO_TEXT = "The server was started with --no-text.";

export class Details {
  // `closed()` is called when the panel closes.
  constructor(closed) {
    this.closed = closed;
    this.id = null;
    this.panel = byId("details");
    byId("details-close").addEventListener("click", () => this.close());
    this.panel.addEventListener("keydown", (event) => {
      if (event.key === "Escape") this.close();
    });
  }

  // Open for a node: first with what the picture has, with the rest when the response arrives.
  open(node) {
    this.id = node.id;
    this.build();
    hide(this.panel, false);
    this.fill(node);
    this.load(node);
    if (matchMedia("(max-width: 60rem)").matches) {
      this.panel.scrollIntoView({block: "nearest"});
    }
  }

  close() {
    if (this.id === null) return;
    this.id = null;
    hide(this.panel, true);
    this.closed();
  }

  async load(node) {
    if (node.hidden || isSpace(node)) return;
    try {
      const known = await ask(`kv/map/${node.id}`);
      if (this.id === node.id) this.fill({...node, ...known});
    } catch (error) {
      if (this.id === node.id) {
        say(this.said, error.status === 404 ? "This node is no longer cached." : shown(error.message));
      }
    }
  }

  // The node is no longer drawn.
  gone() {
    if (!this.said.textContent) say(this.said, "This node is no longer cached, or too small to draw.");
  }

  build() {
    const code = (name, kind = "") => el("p", {class: `code ${kind}`, dir: "ltr", tabindex: 0,
      role: "group", "aria-label": name});
    this.text = code("Beginning of the text");
    this.facts = el("dl", {class: "facts"});
    this.pages = el("details", {hidden: true}, el("summary", {}), code("Page ids", "numbers"));
    this.said = el("p", {class: "result", role: "status"});
    byId("details-body").replaceChildren(this.text, this.facts, this.pages, this.said);
  }

  fill(node) {
    this.node = node;
    const text = node.hidden ? MANY : shown(node.text ?? "") || (isSpace(node) ? NO_SALT : NO_TEXT);
    if (this.text.textContent !== text) this.text.replaceChildren(theirs(text));
    const rows = [
      ["tokens", whole(node.tokens)],
      ["with all below", `${tokens(node.subtree_tokens)} in ${many(node.subtree_nodes ?? 1, "node")}`],
      ["before it", node.path_tokens === undefined ? null : tokens(node.path_tokens)],
      ["pages", node.pages === undefined ? null : pagesOf(node)],
      ["resumes at", node.checkpoints?.length ? node.checkpoints.map(whole).join(", ") : null],
      ["references", node.references === undefined ? null : whole(node.references)],
      ["pins", node.pins === undefined ? null : whole(node.pins)],
      ["hits", node.hits === undefined || node.hits === null ? null : whole(node.hits)],
      ["policy state", node.policy === undefined ? null : shown(node.policy) || "–"],
      ["children", node.hidden || node.path_tokens === undefined ? null : whole(childrenOf(node))],
    ].filter(([, value]) => value !== null);
    rows.forEach(([name, value], at) => {
      if (!this.facts.children[at]) this.facts.append(el("div", {}, el("dt"), el("dd")));
      say(this.facts.children[at].firstChild, name);
      say(this.facts.children[at].lastChild, value);
    });
    while (this.facts.children.length > rows.length) this.facts.lastChild.remove();
    this.list(node.page_ids, node.pages - (node.group_pages ?? 0));
  }

  list(ids, all) {
    hide(this.pages, !ids?.length);
    if (!ids?.length) return;
    say(this.pages.firstChild, ids.length < all ? `First ${whole(ids.length)} page ids` : "Page ids");
    say(this.pages.lastChild, ids.join(" "));
  }
}

const pagesOf = (node) => (node.group_pages
  ? `${whole(node.pages)}, ${whole(node.group_pages)} of them states and windows`
  : whole(node.pages));
const childrenOf = (node) =>
  (Array.isArray(node.children) ? node.children.length : Number(node.children) || 0);
