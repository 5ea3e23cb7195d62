// The details of one node, and what can be done with it: pin, unpin, evict.

import {ask} from "./api.js";
import * as dialogs from "./dialogs.js";
import {byId, el, hide, say, shown, theirs} from "./dom.js";
import {isSpace, titleOf} from "./model.js";
import {many, tokens, whole} from "./words.js";

const TIMES = [[60, "1 minute"], [600, "10 minutes"], [3600, "1 hour"], [86400, "1 day"]];
const MANY = "Several branches, too small to draw. Open their parent to see more of them.";
const NO_SALT = "Prompts without a cache_salt.";
const NO_TEXT = "The server was started with --no-text.";
const NO_KEY = "Pinning and evicting need a server that was started with an API key.";

export class Details {
  // `on`: {closed(), changed(), zoom(id)}; `allowed()`: whether the server permits changes.
  constructor(on, allowed) {
    this.on = on;
    this.allowed = allowed;
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
    this.build(node);
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
    this.on.closed();
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
    for (const button of Object.values(this.buttons)) button.disabled = true;
  }

  build(node) {
    const code = (name, kind = "") => el("p", {class: `code ${kind}`, dir: "ltr", tabindex: 0,
      role: "group", "aria-label": name});
    this.text = code("Beginning of the text");
    this.facts = el("dl", {class: "facts"});
    this.pages = el("details", {hidden: true}, el("summary", {}), code("Page ids", "numbers"));
    this.said = el("p", {class: "result", role: "status"});
    this.why = el("p", {class: "quiet", id: "details-why"});
    const button = (text, act, kind = "") => el("button", {type: "button", class: kind,
      "aria-describedby": "details-why", on: {click: act}}, text);
    this.buttons = {
      pin: button("Pin…", () => this.pin(node.id)),
      unpin: button("Unpin", () => this.act(node.id, {action: "unpin"}, "unpinned")),
      evict: button("Evict…", () => this.evict(node.id), "grave"),
    };
    const actions = node.hidden || isSpace(node) ? [] : [
      el("div", {class: "buttons"}, ...Object.values(this.buttons)), this.why];
    byId("details-body").replaceChildren(this.text, this.facts, this.pages, ...actions, this.said);
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
    this.dress(node);
  }

  list(ids, all) {
    hide(this.pages, !ids?.length);
    if (!ids?.length) return;
    say(this.pages.firstChild, ids.length < all ? `First ${whole(ids.length)} page ids` : "Page ids");
    say(this.pages.lastChild, ids.join(" "));
  }

  dress(node) {
    const may = this.allowed();
    say(this.why, may ? "" : NO_KEY);
    hide(this.why, may);
    this.buttons.pin.disabled = !may;
    this.buttons.unpin.disabled = !may || !node.pins;
    this.buttons.evict.disabled = !may;
  }

  // --- changes --------------------------------------------------------------

  async act(id, body, done) {
    const {pages} = await ask(`kv/map/${id}`, {body});
    if (this.id === id) say(this.said, `The server ${done} ${many(pages, "page")}.`);
    this.on.changed();
    if (this.id === id && body.action !== "evict") this.load(this.node);
  }

  pin(id) {
    const choice = el("select", {id: "pin-for"},
      TIMES.map(([value, text]) => el("option", {value, selected: value === 600}, text)));
    dialogs.confirm("Pin it?", [
      `${quoted(this.node)} and what comes before it stay in the pool until nothing else is left `
        + "to evict. Other prompts have less room meanwhile.",
    ], "Pin", () => this.act(id, {action: "pin", ttl_s: Number(choice.value)}, "pinned"),
    {fields: [el("p", {}, el("label", {for: "pin-for"}, "For "), choice)]});
  }

  evict(id) {
    const {subtree_nodes: nodes = 1, subtree_tokens: amount} = this.node;
    dialogs.confirm("Evict it?", [
      `${quoted(this.node)}${nodes > 1 ? `, with ${many(nodes - 1, "node")} below it,` : ""} `
        + `leaves the pool: ${tokens(amount)}.`,
      "Prompts that begin like this are computed again, unless a tier has them. Pages in use "
        + "stay.",
    ], "Evict", () => this.act(id, {action: "evict"}, "evicted"), {grave: true});
  }
}

const pagesOf = (node) => (node.group_pages
  ? `${whole(node.pages)}, ${whole(node.group_pages)} of them states and windows`
  : whole(node.pages));
const childrenOf = (node) =>
  (Array.isArray(node.children) ? node.children.length : Number(node.children) || 0);
const quoted = (node) => {
  const title = shown(titleOf(node));
  return `“${title.length > 60 ? `${title.slice(0, 60)}…` : title}”`;
};
