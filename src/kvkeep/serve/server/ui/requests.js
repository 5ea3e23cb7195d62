// The last requests, each with a bar that opens its explanation.

import {bar, keyItem} from "./bars.js";
import {now} from "./clock.js";
import {byId, el, keyed, say, shown, theirs} from "./dom.js";
import {explain} from "./explain.js";
import {ago, seconds, tenantName, tokens, whole} from "./words.js";

byId("requests-key").append(keyItem("pool", "reused"), keyItem("loaded", "loaded from a tier"),
  keyItem("computed", "computed"));

const sums = (one) => {
  const pool = one.reused.pool || 0;
  const reused = Object.values(one.reused).reduce((sum, many) => sum + many, 0);
  const computed = Object.values(one.computed).reduce((sum, many) => sum + many, 0);
  return {pool, loaded: reused - pool, computed};
};
const LONG_ID = /\b((?:chat)?cmpl-[0-9a-f]{6})[0-9a-f]+/g;
const took = (one) => (one.outcome === null || one.outcome === undefined ? "running"
  : one.ttft_s === null || one.ttft_s === undefined ? one.outcome : seconds(one.ttft_s));

const make = (one) => el("li", {}, el("button", {type: "button", class: "request",
  on: {click: () => explain(one.id)}},
el("span", {class: "when quiet"}), el("span", {class: "drawn"}),
el("span", {class: "size"}), el("span", {class: "took"}), el("span", {class: "why"})));

const fill = (node, one) => {
  const [when, drawn, size, time, why] = node.firstChild.children;
  const {pool, loaded, computed} = sums(one);
  say(when, ago(Math.max(0, now() - one.at)));
  const state = `${pool} ${loaded} ${computed}`;
  if (drawn.dataset.state !== state) {
    drawn.dataset.state = state;
    drawn.replaceChildren(bar([{amount: pool, kind: "pool"}, {amount: loaded, kind: "loaded"},
      {amount: computed, kind: "computed"}], Math.max(one.prompt_tokens, pool + loaded + computed)),
    el("span", {class: "unseen"},
      `${whole(pool + loaded)} of them reused, ${whole(computed)} computed.`));
  }
  say(size, tokens(one.prompt_tokens));
  say(time, took(one));
  const tenant = one.cache_salt ? ` · ${shown(tenantName(one.cache_salt))}` : "";
  const sentence = shown(one.sentence || "").replace(LONG_ID, "$1…") + tenant;
  if (why.textContent !== sentence) why.replaceChildren(theirs(sentence));
};

export const drawRequests = (answer) => {
  const list = answer.requests;
  say(byId("requests-said"), list.length ? ""
    : "Nothing was asked yet. A request appears here as soon as it begins.");
  keyed(byId("requests-list"), list, (one) => one.id, make, fill);
};
