// Why tokens were computed: first the causes against which something can be done, each with what;
// then, by reason, those that are as they should be. Their order is the server's.

import {bar} from "./bars.js";
import {byId, el, hide, keyed, say, shown, theirs} from "./dom.js";
import {explain, reasonName, samples} from "./explain.js";
import {many, share, tokens, whole} from "./words.js";

const MOST = 8;
// Where the page shows more about a reason.
const SEE = {
  __proto__: null,
  evicted: ["#whatif-title", "Hit rates of other pool sizes"],
  tier_unavailable: ["#tiers-title", "Tiers"],
  damaged: ["#tiers-title", "Tiers"],
  not_admitted: ["#tiers-title", "Tiers"],
};
const REST = {
  __proto__: null,
  not_loaded: "A tier has them, and computing them is faster",
  computing: "Another request was just computing them",
  page_remainder: "Ends of prompts within a page, which are shared as a whole only",
  last_token: "The last token of a prompt is always computed",
  not_resumable: "Their KV is cached, but no state where they could go on",
  not_admitted: "They were not stored, on purpose",
  new: "Never seen before",
};

// Without the share at its beginning, which is shown beside it.
const sentenceOf = (cause) => {
  const said = shown(cause.sentence).replace(/^[^:]{0,30}of all computed tokens: /, "");
  return said.charAt(0).toUpperCase() + said.slice(1);
};
const causeKey = (cause) =>
  [cause.reason, cause.cache_salt, cause.position, cause.advice, cause.example].join(" ");

const make = (cause) => el("li", {},
  el("div", {class: "portion"}, el("b", {}), bar([])),
  el("div", {}, el("p", {class: "sentence"}), el("p", {class: "advice"},
    el("span", {}), " ", cause.advice && cause.reason in SEE
      ? el("a", {href: SEE[cause.reason][0]}, SEE[cause.reason][1]) : null),
  el("p", {class: "quiet"}), el("div", {})),
  el("button", {type: "button"}, "Example"));
const fill = (node, cause) => {
  const [portion, text, button] = node.children;
  const [sentence, advice, figures, breaks] = text.children;
  say(portion.firstChild, share(cause.share));
  portion.lastChild.replaceWith(bar([{amount: cause.share, kind: `r-${cause.reason}`}], 1));
  const said = sentenceOf(cause);
  if (sentence.textContent !== said) sentence.replaceChildren(theirs(said));
  hide(advice, !cause.advice);
  say(advice.firstChild, cause.advice ? shown(cause.advice) : "");
  say(figures, [reasonName(cause.reason), tokens(cause.tokens), many(cause.requests, "request"),
    cause.text ? `${tokens(cause.tokens_per_hour)} an hour` : ""].filter(Boolean).join(" · "));
  const texts = JSON.stringify(cause.text || null);
  if (breaks.dataset.texts !== texts) {
    breaks.dataset.texts = texts;
    breaks.replaceChildren(...(cause.text ? [samples(cause.text, "p")] : []));
  }
  button.hidden = !cause.example;
  button.onclick = () => explain(cause.example);
  button.setAttribute("aria-label", `Example of: ${said}`);
};

const change = (causes) => {
  const left = causes.slice(MOST);
  hide(byId("causes-change"), !causes.length);
  keyed(byId("causes-change-list"), causes.slice(0, MOST), causeKey, make, fill);
  const portion = left.reduce((all, one) => all + one.share, 0);
  say(byId("causes-change-left"), left.length
    ? `${many(left.length, "smaller cause")} more, ${share(portion)} together.` : "");
};
// One line for each reason, with the example of the largest cause.
const rest = (causes) => {
  const reasons = new Map();
  for (const cause of causes) {
    const {reason} = cause, sum = reasons.get(reason);
    if (!sum) {
      reasons.set(reason, {...cause, sentence: REST[reason] || reasonName(reason)});
    } else {
      sum.tokens += cause.tokens;
      sum.requests += cause.requests;
      sum.share += cause.share;
    }
  }
  hide(byId("causes-rest"), !reasons.size);
  keyed(byId("causes-rest-list"), [...reasons.values()], (one) => one.reason, make, fill);
};

export const drawCauses = (answer) => {
  const computed = Object.values(answer.computed).reduce((sum, one) => sum + one, 0);
  const never = answer.computed.new || 0;
  say(byId("causes-said"), !answer.requests ? "Nothing was asked yet."
    : `Of the last ${many(answer.requests, "request")}, ${tokens(computed)} of `
      + `${tokens(answer.prompt_tokens)} were computed: ${whole(never)} that were never seen before, `
      + `${whole(computed - never)} for other reasons.`);
  change(answer.causes.filter((one) => one.advice));
  rest(answer.causes.filter((one) => !one.advice));
};
