// Polled each second: the header, the figures with their sparklines, the pool.

import {fillBar, keyItem, spark} from "./bars.js";
import {byId, el, hide, say, shown} from "./dom.js";
import {Series, clearAll} from "./series.js";
import {UNTOLD, amount, bytes, many, running, seconds, share, whole} from "./words.js";

const SPAN_S = 120;  // of the sparklines
const SHORT_S = 20;  // a line that has just begun is not drawn over the whole width
const EACH_S = 5;  // of the history
const MINUTE_S = 60;

export const figure = (id, value, note = UNTOLD) => {
  say(byId(id).querySelector(".value"), value);
  say(byId(id).querySelector(".note"), note);
};
export const follow = () => new Series(SPAN_S);
// Draw the line of a tile up to `at`, with the value there.
export const draw = (id, series, at, value) => {
  series.add(at, value);
  const begun = Math.min(series.points[0][0], at - SHORT_S);
  spark(byId(id).querySelector(".spark"), series.points, {from: begun, to: at});
};
const lines = {warm: follow(), cold: follow(), running: follow()};

export const rates = (history) => {
  const prompts = history.reduce((sum, one) => sum + one[1], 0);
  const reused = history.reduce((sum, one) => sum + one[2], 0);
  return {prompts, reused, rate: prompts ? reused / prompts : null};
};

const hitRate = (live) => {
  if (!live.history) {
    figure("rate", "–");
    return;
  }
  const {prompts, rate} = rates(live.history);
  const all = live.totals;
  figure("rate", prompts ? share(rate) : "–", all?.prompt_tokens
    ? `of the last ten minutes; ${share(all.cached_tokens / all.prompt_tokens)} since the start`
    : "no prompt yet");
  const begun = live.history.length ? live.history[0][0] : live.at;
  spark(byId("rate").querySelector(".spark"),
    live.history.map(([at, asked, had]) => [at, asked ? had / asked : null]),
    {from: Math.min(begun, live.at - MINUTE_S), to: live.at + EACH_S, most: 1});
};

const firstToken = (live, name) => {
  const figures = live.ttft?.[name];
  const has = figures && figures.count > 0 && figures.p50_s !== null;
  figure(name, has ? seconds(figures.p50_s) : "–", !live.ttft ? undefined : has
    ? `half of ${many(figures.count, "request")}; 95 % within ${seconds(figures.p95_s)}`
    : `no ${name} prompt in the last 5 minutes`);
  draw(name, lines[name], live.at, has ? figures.p50_s : null);
};

const busy = (live) => {
  figure("running", live.waiting ? `${whole(live.running)} + ${whole(live.waiting)}`
    : whole(live.running), `${many(live.totals?.requests ?? 0, "request")} since the start`);
  draw("running", lines.running, live.at, live.running + live.waiting);
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
  hide(host, !pages);
  if (!pages) return;
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

let begun = null;  // when the server began
export const drawLive = (live) => {
  const began = live.at - live.uptime_s;
  if (begun !== null && began > begun + MINUTE_S / 12) {
    clearAll();
    traffic.clear();
  }
  begun = began;
  say(byId("model"), [live.model, live.policy, live.version].filter(Boolean).map(shown)
    .join(" · "));
  say(byId("uptime"), `up ${running(live.uptime_s)}`);
  hitRate(live);
  firstToken(live, "warm");
  firstToken(live, "cold");
  busy(live);
  pool(live);
};

// Bytes per second of each tier, from one response to the next.
const traffic = new Map();
export const speed = (live) => {
  for (const tier of live.tiers || []) {
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
