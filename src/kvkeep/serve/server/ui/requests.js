// The last requests, each with a bar that opens its explanation; and the costliest causes, ranked.

import {bar, keyItem} from "./bars.js";
import {now} from "./clock.js";
import {byId, el, keyed, say, shown, theirs} from "./dom.js";
import {explain, reasonName} from "./explain.js";
import {ORDER, ago, many, seconds, share, tenantName, tokens, whole} from "./words.js";

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

// --- causes ------------------------------------------------------------------------------------

const CAUSES = 8;
// Without the share at its beginning, which is shown beside it.
const sentenceOf = (cause) => {
  const said = shown(cause.sentence).replace(/^[^:]{0,30}of all computed tokens: /, "");
  return said.charAt(0).toUpperCase() + said.slice(1);
};
const causeKey = (cause) => [cause.reason, cause.cache_salt, cause.position].join(" ");

export const drawCauses = (answer) => {
  const computed = Object.values(answer.computed).reduce((sum, one) => sum + one, 0);
  say(byId("causes-said"), !answer.requests ? "Nothing was asked yet."
    : `Of the last ${many(answer.requests, "request")}, ${tokens(computed)} of `
      + `${tokens(answer.prompt_tokens)} were computed. What costs most comes first`
      + `${answer.causes.length > CAUSES ? `; ${whole(answer.causes.length - CAUSES)} smaller `
        + "causes are left out." : "."}`);
  const ranked = [...answer.causes].sort((a, b) => b.tokens - a.tokens
    || ORDER.indexOf(a.reason) - ORDER.indexOf(b.reason)).slice(0, CAUSES);
  keyed(byId("causes-list"), ranked, causeKey, (cause) => el("li", {},
    el("div", {class: "portion"}, el("b", {}), bar([])),
    el("div", {}, el("p", {class: "sentence"}), el("p", {class: "quiet"})),
    el("button", {type: "button"}, "Example")), (node, cause) => {
    const [portion, text, button] = node.children;
    say(portion.firstChild, share(cause.share));
    portion.lastChild.replaceWith(bar([{amount: cause.share, kind: `r-${cause.reason}`}], 1));
    const said = sentenceOf(cause);
    if (text.firstChild.textContent !== said) text.firstChild.replaceChildren(theirs(said));
    say(text.lastChild, [reasonName(cause.reason), tokens(cause.tokens),
      many(cause.requests, "request")].join(" · "));
    button.hidden = !cause.example;
    button.onclick = () => explain(cause.example);
    button.setAttribute("aria-label", `Example of: ${said}`);
  });
};
