// The tables of the answer that is polled each second: where reuse came from, losses, tiers, tenants.

import {bar} from "./bars.js";
import {byId, el, hide, say, shown} from "./dom.js";
import {health} from "./health.js";
import {flow, speed} from "./live.js";
import {Table, meter, name, rate} from "./table.js";
import {amount, bytes, seconds, share, sourceName, tenantName} from "./words.js";

let moved = new Map(), losses = [];

const reused = new Table(byId("saved-table"), "Time saved", [
  {head: "reused from", ...name((one) => one.name)},
  {head: "tokens", number: true, text: (one) => amount(one.tokens)},
  meter("share", (one) => [one.tokens, one.all]),
  {head: "time saved", number: true, text: (one) => seconds(one.saved_s)},
]);
const drawReused = (list) => {
  const sum = (field) => list.reduce((all, one) => all + one[field], 0);
  const all = sum("tokens");
  const rows = list.map((one) => ({...one, name: one.source === "pool" ? "the pool"
    : sourceName(one.source), all}));
  say(byId("saved-said"), "Tokens of prompts since the start that were not computed. Each counts the "
    + "average time of a computed token at that moment.");
  reused.draw(all ? [...rows, {source: "", name: "in all", tokens: all, all, saved_s: sum("saved_s")}]
    : [], (one) => `s${one.source}`);
};

const WHAT = {
  __proto__: null,
  failed: "requests failed", timeout: "requests timed out", refused: "requests refused",
  errors: "calls failed", late: "reads came late", damaged: "records damaged",
  dropped: "blocks not written",
};
const whatOf = (one) => (one.what === "evicted"
  ? `${one.place === "pool" ? "pages" : "blocks"} evicted` : WHAT[one.what] || shown(one.what));
const KINDS = ["error", "eviction", "refusal"];
const lost = new Table(byId("losses-table"), "Evictions and errors", [
  {head: "what", ...name(whatOf)},
  {head: "where", text: (one) => (one.place === "requests" ? "server"
    : one.place === "pool" ? "pool" : shown(one.place))},
  {head: "last minute", number: true, text: (one) => amount(one.minute)},
  {head: "ten minutes", number: true, text: (one) => amount(one.ten_minutes)},
  {head: "since the start", number: true, text: (one) => amount(one.total)},
]);
const drawLost = (list) => {
  say(byId("losses-said"), list.length ? "Errors come first, then evictions and refused requests."
    : "Nothing was evicted, and nothing failed.");
  lost.draw([...list].sort((a, b) => KINDS.indexOf(a.kind) - KINDS.indexOf(b.kind)
    || b.minute - a.minute || b.total - a.total), (one) => `${one.what} ${one.place}`);
};

const tiers = new Table(byId("tiers-table"), "Tiers", [
  {head: "tier", ...name((tier) => tier.name, (tier) => tier.place)},
  {
    head: "health",
    make: () => el("span", {class: "health"}, el("span", {class: "dot", "aria-hidden": "true"}),
      el("span", {})),
    update: (cell, tier) => {
      const [kind, text] = health(tier, losses);
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
        ? `${share(tier.used_bytes / tier.capacity)} of ${bytes(tier.capacity)}`
        : bytes(tier.used_bytes));
    },
  },
  {head: "blocks", number: true, text: (tier) => (tier.blocks === null ? "–" : amount(tier.blocks))},
  {head: "hits", number: true, text: (tier) => rate(tier.hits, tier.hits + tier.misses)},
  {head: "reads", number: true, text: (tier) => flow(moved.get(tier.name)?.reads || 0)},
  {head: "read speed", number: true, text: (tier) => flow(tier.read_bytes_per_s || 0)},
  {head: "writes", number: true, text: (tier) => flow(moved.get(tier.name)?.writes || 0)},
  {head: "queue", number: true, text: (tier) => (tier.queued_bytes ? bytes(tier.queued_bytes) : "–")},
  {head: "evicted", number: true, text: (tier) => (tier.evictions ? amount(tier.evictions) : "–")},
  {
    head: "lost", number: true,
    text: (tier) => [[tier.drops, "dropped"], [tier.errors, "failed"], [tier.damaged, "damaged"]]
      .filter(([number]) => number).map(([number, word]) => `${amount(number)} ${word}`)
      .join(", ") || "–",
  },
]);
const tenants = new Table(byId("tenants-table"), "Tenants", [
  {head: "tenant", ...name((one) => tenantName(one.cache_salt))},
  {head: "requests", number: true, text: (one) => amount(one.requests)},
  {head: "prompt tokens", number: true, text: (one) => amount(one.prompt_tokens)},
  {head: "computed", number: true, text: (one) => amount(one.prompt_tokens - one.reused_tokens)},
  meter("reused", (one) => [one.reused_tokens, one.prompt_tokens]),
  {head: "pages", number: true, text: (one) => (one.pages === null ? "–" : amount(one.pages))},
]);

// How much of what is stored was loaded lately, because that is faster than computing it.
const loaded = ({loaded_tokens: some, computed_stored_tokens: computed}) =>
  (some + computed ? ` Lately ${rate(some, some + computed)} of the stored tokens were loaded`
    + `${computed ? "; the others are faster to compute" : ""}.` : "");

export const drawTables = (live) => {
  moved = speed(live);
  losses = live.losses || [];
  drawReused(live.reused || []);
  drawLost(losses);
  const places = live.tiers || [];
  say(byId("tiers-said"), places.length
    ? `Where KV goes that the pool has no room for.${live.loads ? loaded(live.loads) : ""}`
    : "This server keeps KV in its pool alone: it was started without a store.");
  tiers.draw(places, (one) => one.name);
  hide(byId("tenants"), !live.tenants);
  say(byId("tenants-said"), live.tenants?.length
    ? "Prompts of one cache_salt share nothing with those of others. The largest since the start."
    : "Nobody has asked anything yet.");
  tenants.draw(live.tenants || [], (one) => one.cache_salt);
};
