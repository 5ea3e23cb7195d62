// Polled each second: the header, the figures with their sparklines, the pool, the charts.

import {fillBar, keyItem, spark} from "./bars.js";
import {byId, el, say, shown} from "./dom.js";
import {amount, bytes, many, running, seconds, share, tokens, whole} from "./words.js";

const REMEMBERED = 120;  // responses, for the sparklines
const before = {warm: [], cold: [], running: []};

const figure = (id, value, note) => {
  const card = byId(id);
  say(card.querySelector(".value"), value);
  say(card.querySelector(".note"), note);
  return card.querySelector(".spark");
};
const remember = (name, value) => {
  const list = before[name];
  list.push(value);
  if (list.length > REMEMBERED) list.shift();
  return list;
};

export const rates = (history) => {
  const prompts = history.reduce((sum, one) => sum + one[1], 0);
  const reused = history.reduce((sum, one) => sum + one[2], 0);
  return {prompts, reused, rate: prompts ? reused / prompts : null};
};

const hitRate = (live) => {
  const {prompts, rate} = rates(live.history);
  const all = live.totals;
  const saved = all.cached_tokens; // those loaded from tiers are part of them
  const overall = all.prompt_tokens ? `${share(saved / all.prompt_tokens)} since the start, `
    + `${tokens(saved)} not computed` : "no prompt yet";
  const line = live.history.map(([, asked, had]) => (asked ? had / asked : null));
  spark(figure("rate", prompts ? share(rate) : "–", overall), line, 1);
};

const firstToken = (name, figures, other) => {
  const has = figures && figures.count > 0 && figures.p50_s !== null;
  const line = remember(name, has ? figures.p50_s : null);
  const note = has ? `half of ${many(figures.count, "request")}; 95 % within ${seconds(figures.p95_s)}`
    : other;
  spark(figure(name, has ? seconds(figures.p50_s) : "–", note), line);
};

const busy = (live) => {
  const value = live.waiting ? `${whole(live.running)} + ${whole(live.waiting)}` : whole(live.running);
  const note = `${many(live.totals.requests, "request")} since the start`;
  spark(figure("running", value, note), remember("running", live.running + live.waiting));
};

const STATES = [
  ["private", "own", "of running requests"],
  ["cached_held", "held", "cached, in use"],
  ["cached_evictable", "kept", "cached, evictable"],
  ["free", "free", "free"],
];
const pool = (live) => {
  const {pages} = live;
  const host = byId("pool");
  fillBar(host.querySelector(".stack"),
    STATES.map(([name, kind]) => ({amount: pages[name] || 0, kind})), pages.total);
  const list = host.querySelector(".key");
  if (!list.children.length) {
    list.append(...STATES.map(([, kind]) => keyItem(kind, el("span", {}))), el("li", {class: "quiet"}));
  }
  STATES.forEach(([name, , text], at) => {
    say(list.children[at].lastChild, `${amount(pages[name] || 0)} ${text}`);
  });
  say(list.lastChild, `${amount(pages.total)} pages of ${live.page_size} tokens`
    + (pages.pinned ? `, ${amount(pages.pinned)} pinned` : ""));
  host.querySelector(".stack").setAttribute("aria-label",
    STATES.map(([name, , text]) => `${amount(pages[name] || 0)} ${text}`).join(", "));
};

export const drawLive = (live) => {
  say(byId("model"), `${shown(live.model)} · ${shown(live.policy)} · ${live.version}`);
  say(byId("uptime"), `up ${running(live.uptime_s)}`);
  hitRate(live);
  firstToken("warm", live.ttft?.warm, "no warm prompt in the last 5 minutes");
  firstToken("cold", live.ttft?.cold, "no cold prompt in the last 5 minutes");
  busy(live);
  pool(live);
};

// Bytes per second of each tier, from one response to the next.
const traffic = new Map();
export const speed = (live) => {
  for (const tier of live.tiers) {
    const old = traffic.get(tier.name);
    const now = {at: live.at, read: tier.read_bytes, written: tier.written_bytes};
    const span = old ? now.at - old.at : 0;
    if (!old || span <= 0) {
      if (!old) traffic.set(tier.name, {...now, reads: 0, writes: 0});
      continue;
    }
    if (span < 0.9) continue;
    // Smoothed, with a weight of a third for the newest, so that figures can be read.
    const smooth = (was, value) => (value < 1 && was < 512 ? 0 : was + (value - was) / 3);
    traffic.set(tier.name, {...now,
      reads: smooth(old.reads, Math.max(0, now.read - old.read) / span),
      writes: smooth(old.writes, Math.max(0, now.written - old.written) / span)});
  }
  return traffic;
};
export const flow = (value) => (value < 1 ? "–" : `${bytes(value)}/s`);
