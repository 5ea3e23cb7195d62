// The tiles of time saved, tiers, evictions and errors. Each names the table with its details, which
// is drawn from the same answer.

import {byId, el, hide, keyed, say, shown} from "./dom.js";
import {fill, health} from "./health.js";
import {draw, figure, follow} from "./live.js";
import {amount, bytes, many, seconds, tokens} from "./words.js";

const MOST_TIERS = 4;
const evictions = follow(), errors = follow();

const sum = (list, name) => list.reduce((all, one) => all + one[name], 0);

const saved = (live) => {
  const {reused} = live;
  if (!reused) {
    figure("saved-tile", "–");
    return;
  }
  const all = sum(reused, "tokens"), tiers = sum(reused.filter((one) => one.source !== "pool"), "tokens");
  figure("saved-tile", all ? seconds(sum(reused, "saved_s")) : "–", all
    ? `of prefill since the start: ${tokens(all)} were not computed`
      + (tiers ? `, ${amount(tiers)} of them from tiers` : "")
    : "nothing was reused yet");
};

const tiers = (live) => {
  const list = live.tiers || [];
  const states = list.map((tier) => ({tier, state: health(tier, live.losses)}));
  const works = states.filter(({state: [kind]}) => kind === "good").length;
  const more = list.length - MOST_TIERS;
  figure("tiers-tile", list.length ? `${works} of ${list.length}` : "–",
    !live.tiers ? undefined : !list.length ? "no store: KV is in the pool alone"
      : `${list.length === 1 ? "tier works" : "tiers work"} without trouble`
        + (more > 0 ? `; ${more} more in the table` : ""));
  // What has trouble first, so that it is not among those left out.
  const order = [...states].sort((a, b) => (a.state[0] === "good") - (b.state[0] === "good"));
  keyed(byId("tiers-tile").querySelector(".lines"), order.slice(0, MOST_TIERS),
    ({tier}) => tier.name, () => el("li", {class: "health"},
      el("span", {class: "dot", "aria-hidden": "true"}),
      el("span", {}, el("b", {}), " ", el("span", {class: "quiet"}))), (node, {tier, state}) => {
      const [kind, text] = state;
      node.dataset.kind = kind;
      const [name, about] = node.lastChild.children;
      say(name, shown(tier.name));
      say(about, [fill(tier), tier.queued_bytes ? `${bytes(tier.queued_bytes)} to write` : "",
        kind === "good" ? "" : text].filter(Boolean).join(" · "));
    });
};

const rates = (live) => {
  const {losses, at} = live;
  const of = (test) => (losses || []).filter(test);
  const pool = of((one) => one.kind === "eviction" && one.place === "pool");
  const below = of((one) => one.kind === "eviction" && one.place !== "pool");
  const pages = sum(pool, "minute");
  figure("evictions-tile", losses ? amount(pages) : "–", losses
    ? `pages of the pool in the last minute, ${amount(sum(pool, "total"))} since the start`
      + (below.length ? `; ${many(sum(below, "minute"), "block")} of tiers` : "") : undefined);
  draw("evictions-tile", evictions, at, losses ? pages : null);
  const failed = of((one) => one.kind === "error");
  const lately = sum(failed, "minute");
  figure("errors-tile", losses ? amount(lately) : "–", losses ? `in the last minute, ${
    amount(sum(failed, "total"))} since the start` : undefined);
  draw("errors-tile", errors, at, losses ? lately : null);
  byId("errors-tile").dataset.kind = lately ? "bad" : "good";
};

export const drawTiles = (live) => {
  saved(live);
  tiers(live);
  rates(live);
  hide(byId("saved"), !live.reused);
  hide(byId("losses"), !live.losses);
};
