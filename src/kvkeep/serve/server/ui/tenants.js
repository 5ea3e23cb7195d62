// The tenants: those that computed most, the others as one row that opens, and a search.

import {Refused, ask} from "./api.js";
import {byId, el, hide, say, shown, theirs} from "./dom.js";
import {Poll, latest} from "./poll.js";
import {Table, meter} from "./table.js";
import {UNTOLD, amount, many, tenantName, tokens, whole} from "./words.js";

const EVERY_MS = 3000;
const TOP = 10;
const MORE = 100;
const MOST = 1000;
const TYPING_MS = 200;

const isRest = (one) => one.cache_salt === null;

export class Tenants {
  // `known`: a promise of the server's first answer; `live()`: its latest.
  constructor(known, live) {
    this.live = live;
    this.most = TOP;
    this.newest = latest();
    this.table = new Table(byId("tenants-table"), "Tenants", [
      {
        head: "tenant",
        make: () => [el("span", {class: "strong"}), " ", el("button", {type: "button", class: "link",
          hidden: true, on: {click: () => this.more()}})],
        update: (cell, one) => this.named(cell, one),
      },
      {head: "requests", number: true, text: (one) => amount(one.requests)},
      {head: "prompt tokens", number: true, text: (one) => amount(one.prompt_tokens)},
      {head: "computed", number: true, text: (one) => amount(one.computed_tokens)},
      meter("reused", (one) => [one.read_tokens, one.prompt_tokens]),
      {head: "in the pool", number: true, text: (one) => amount(one.pool_tokens)},
      {head: "in tiers", number: true, text: (one) => (one.tier_tokens ? amount(one.tier_tokens) : "–")},
    ]);
    const find = byId("tenants-for");
    let typing = null;
    find.addEventListener("input", () => {
      clearTimeout(typing);
      typing = setTimeout(() => this.anew(), TYPING_MS);
    });
    byId("tenants-search").addEventListener("submit", (event) => {
      event.preventDefault();
      clearTimeout(typing);
      this.anew();
    });
    byId("tenants-less").addEventListener("click", () => {
      this.most = TOP;
      this.refresh();
      byId("tenants-title").scrollIntoView({block: "nearest"});
    });
    this.poll = new Poll({every: EVERY_MS, element: byId("tenants"), ready: known,
      load: () => this.load(), show: (answer) => this.show(answer),
      failed: (error) => this.failed(error)});
  }

  get search() {
    return byId("tenants-for").value.trim();
  }

  async load() {
    const {search, most} = this;
    try {
      const answer = await ask("kv/usage", {query: {order: "computed_tokens",
        search: search || null, most: search ? MORE : most}});
      return {...answer, search, most};
    } catch (error) {
      if (!(error instanceof Refused) || error.status !== 404) throw error;
      return this.fewer();
    }
  }

  // A server without the endpoint names the largest alone.
  fewer() {
    const {tenants, page_size: size} = this.live();
    const rows = (tenants || []).map((one) => ({cache_salt: one.cache_salt, requests: one.requests,
      prompt_tokens: one.prompt_tokens, read_tokens: one.reused_tokens,
      computed_tokens: one.prompt_tokens - one.reused_tokens,
      pool_tokens: (one.pages || 0) * (size || 0), tier_tokens: 0}));
    rows.sort((a, b) => b.computed_tokens - a.computed_tokens);
    return {tenants: rows, count: rows.length, search: "", most: rows.length, few: Boolean(tenants),
      none: !tenants};
  }

  // A new search or size is asked for even while the page is paused.
  refresh() {
    return this.newest(() => this.load(), (answer) => this.show(answer))
      .catch((error) => this.failed(error));
  }

  anew() {
    this.most = TOP;
    this.refresh();
  }

  more() {
    this.most = Math.min(MOST, this.most + MORE);
    this.refresh();
  }

  named(cell, one) {
    const [text, button] = cell.children;
    const rest = isRest(one);
    const title = rest ? (one.hidden ? many(one.hidden, "other tenant") : "tenants without a row")
      : tenantName(one.cache_salt);
    if (text.textContent !== shown(title)) text.replaceChildren(rest ? title : theirs(title));
    const next = Math.min(MORE, one.hidden || 0);
    hide(button, !rest || !next || this.most >= MOST);
    if (rest) say(button, next < one.hidden ? `Show ${whole(next)} more` : "Show them");
  }

  show(answer) {
    if (answer.search !== this.search && !answer.few) return;  // typed meanwhile
    const {tenants, count, search} = answer;
    hide(byId("tenants-search"), Boolean(answer.few || answer.none) || (count <= TOP && !search));
    hide(byId("tenants-less"), Boolean(search) || this.most <= TOP);
    const rows = tenants.filter((one) => !isRest(one));
    const rest = tenants.find(isRest);
    const sum = (name) => tenants.reduce((all, one) => all + one[name], 0);
    say(byId("tenants-said"), answer.none ? UNTOLD : search
      ? (count > rows.length ? `The first ${whole(rows.length)} of ` : "")
        + `${many(count, "tenant has", "tenants have")} this in their name.`
      : !sum("requests") ? "Nobody has asked anything yet."
        : `Prompts of one cache_salt share nothing with those of others. ${
          many(count, "tenant")}${answer.few ? ", the largest," : ""} sent ${
          tokens(sum("prompt_tokens"))}; ${amount(sum("computed_tokens"))} were computed.`);
    const hidden = count - rows.length;
    const more = !search && rest && (hidden || rest.requests) ? [{...rest, hidden}] : [];
    this.table.draw([...rows, ...more], (one) => (isRest(one) ? "rest" : `t${one.cache_salt}`));
  }

  failed(error) {
    say(byId("tenants-said"), error.status === 401 ? "" : shown(error.message));
  }
}
