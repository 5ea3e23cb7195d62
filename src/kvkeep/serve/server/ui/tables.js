// Tables that keep their rows from one response to the next, and become cards on a phone.

import {bar} from "./bars.js";
import {now} from "./clock.js";
import {byId, el, hide, keyed, say, shown, theirs} from "./dom.js";
import {flow, speed} from "./live.js";
import {ago, amount, bytes, running, share, tenantName, tokens, whole} from "./words.js";

// `columns`: [{head, text(item) or make() and update(node, item), number}]
class Table {
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

const name = (of, hint) => ({
  make: () => [theirs("", {class: "strong"}), el("small", {class: "quiet"})],
  update: (cell, item) => {
    say(cell.firstChild, shown(of(item)));
    say(cell.lastChild, hint ? shown(hint(item)) : "");
  },
});
const rate = (had, all) => (all ? share(had / all) : "–");
// The reused share of prompts, as a bar and a number.
const reuse = (head) => ({
  head,
  make: () => el("span", {class: "meter"}, bar([]), el("span", {})),
  update: (cell, item) => {
    const drawn = bar([{amount: item.reused_tokens, kind: "pool"}], item.prompt_tokens || 1);
    cell.firstChild.firstChild.replaceWith(drawn);
    say(cell.firstChild.lastChild, rate(item.reused_tokens, item.prompt_tokens));
  },
});

const BREAKER = {
  __proto__: null,
  closed: ["good", "works"],
  trying: ["fair", "being tried again"],
  open: ["bad", "not asked: it failed"],
};
const health = (tier) =>
  BREAKER[tier.breaker] || (tier.breaker ? ["fair", shown(tier.breaker)] : ["good", "works"]);
let moved = new Map();

const tiers = new Table(byId("tiers-table"), "Tiers", [
  {head: "tier", ...name((tier) => tier.name, (tier) => tier.place)},
  {
    head: "health",
    make: () => el("span", {class: "health"}, el("span", {class: "dot", "aria-hidden": "true"}),
      el("span", {})),
    update: (cell, tier) => {
      const [kind, text] = health(tier);
      cell.firstChild.dataset.kind = kind;
      say(cell.firstChild.lastChild, text);
    },
  },
  {
    head: "filled",
    make: () => el("span", {class: "meter"}, bar([]), el("span", {})),
    update: (cell, tier) => {
      const used = tier.used_bytes || 0;
      const drawn = bar([{amount: used, kind: "pool"}], tier.capacity || used || 1);
      cell.firstChild.firstChild.replaceWith(drawn);
      say(cell.firstChild.lastChild, tier.used_bytes === null ? "unknown" : tier.capacity
        ? `${bytes(tier.used_bytes)} of ${bytes(tier.capacity)}` : bytes(tier.used_bytes));
    },
  },
  {head: "blocks", number: true, text: (tier) => (tier.blocks === null ? "–" : amount(tier.blocks))},
  {head: "hits", number: true, text: (tier) => rate(tier.hits, tier.hits + tier.misses)},
  {head: "reads", number: true, text: (tier) => flow(moved.get(tier.name)?.reads || 0)},
  {head: "read speed", number: true, text: (tier) => flow(tier.read_bytes_per_s || 0)},
  {head: "writes", number: true, text: (tier) => flow(moved.get(tier.name)?.writes || 0)},
  {head: "queue", number: true, text: (tier) => (tier.queued_bytes ? bytes(tier.queued_bytes) : "–")},
  {
    head: "lost", number: true,
    text: (tier) => [[tier.drops, "dropped"], [tier.errors, "failed"], [tier.damaged, "damaged"]]
      .filter(([number]) => number).map(([number, word]) => `${amount(number)} ${word}`)
      .join(", ") || "–",
  },
]);
const sessions = new Table(byId("sessions-table"), "Sessions", [
  {head: "session", ...name((one) => one.session, (one) => one.cache_salt || "")},
  {head: "turns", number: true, text: (one) => whole(one.turns)},
  {head: "tokens", number: true, text: (one) => amount(one.prompt_tokens)},
  reuse("reused"),
  {head: "last", number: true, text: (one) => ago(Math.max(0, now() - one.last_at))},
]);
const returns = new Table(byId("returns-table"), "Expected returns", [
  {head: "conversation", ...name((one) => one.session || `ended by ${one.stop || "unknown"}`,
    (one) => one.cache_salt || "")},
  {head: "expected in", number: true, text: (one) => running(one.expected_s)},
  {head: "chance", number: true, text: (one) => rate(one.chance, 1)},
  {head: "last", number: true, text: (one) => ago(one.paused_s)},
  {head: "turns", number: true, text: (one) => whole(one.turns)},
  {head: "tokens", number: true, text: (one) => amount(one.tokens)},
  {head: "kept", text: (one) => (one.cached ? "yes" : "evicted")},
]);
const tenants = new Table(byId("tenants-table"), "Tenants", [
  {head: "tenant", ...name((one) => tenantName(one.cache_salt))},
  {head: "requests", number: true, text: (one) => amount(one.requests)},
  {head: "tokens", number: true, text: (one) => amount(one.prompt_tokens)},
  reuse("reused"),
  {head: "pages", number: true, text: (one) => amount(one.pages)},
]);

// How much of what is stored was loaded lately, because that is faster than computing it.
const loaded = ({loaded_tokens: some, computed_stored_tokens: computed}) =>
  (some + computed ? ` Lately ${rate(some, some + computed)} of the stored tokens were loaded`
    + `${computed ? "; the others are faster to compute" : ""}.` : "");

export const drawTables = (live) => {
  moved = speed(live);
  say(byId("tiers-said"), live.tiers.length
    ? `Where KV goes that the pool has no room for.${loaded(live.loads)}`
    : "This server keeps KV in its pool alone: it was started without a store.");
  tiers.draw(live.tiers, (one) => one.name);
  say(byId("sessions-said"), live.sessions.length
    ? "The latest conversations that were named in requests." : "No request has named a session yet.");
  sessions.draw(live.sessions, (one) => `${one.cache_salt} ${one.session}`);
  byId("returns").hidden = !live.returns;
  if (live.returns) {
    say(byId("returns-said"), live.returns.length
      ? "Conversations that wait for their next request, learned from how earlier ones went on."
      : "No conversation waits.");
    returns.draw(live.returns.map((one, at) => ({...one, at})), (one) => one.at);
  }
  say(byId("tenants-said"), live.tenants.length
    ? "Prompts of one cache_salt share nothing with those of others; "
      + `${tokens(live.totals.prompt_tokens)} in all.`
    : "Nobody has asked anything yet.");
  tenants.draw(live.tenants, (one) => `t${one.cache_salt}`);
};
