// Why tokens were computed: first the causes against which something can be done, each with what;
// then those that are as they should be, prompts that were never seen last.

import {bar} from "./bars.js";
import {byId, el, hide, keyed, say, shown, theirs} from "./dom.js";
import {explain, reasonName} from "./explain.js";
import {ORDER, many, share, tokens, whole} from "./words.js";

const MOST = {change: 8, rest: 4};
// Where the page shows more about a reason.
const SEE = {
  __proto__: null,
  evicted: ["#whatif-title", "Hit rates of other pool sizes"],
  tier_unavailable: ["#tiers-title", "Tiers"],
  damaged: ["#tiers-title", "Tiers"],
  not_admitted: ["#tiers-title", "Tiers"],
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
  el("p", {class: "quiet"})),
  el("button", {type: "button"}, "Example"));
const fill = (node, cause) => {
  const [portion, text, button] = node.children;
  const [sentence, advice, figures] = text.children;
  say(portion.firstChild, share(cause.share));
  portion.lastChild.replaceWith(bar([{amount: cause.share, kind: `r-${cause.reason}`}], 1));
  const said = sentenceOf(cause);
  if (sentence.textContent !== said) sentence.replaceChildren(theirs(said));
  hide(advice, !cause.advice);
  say(advice.firstChild, cause.advice ? shown(cause.advice) : "");
  say(figures, [reasonName(cause.reason), tokens(cause.tokens), many(cause.requests, "request")]
    .join(" · "));
  button.hidden = !cause.example;
  button.onclick = () => explain(cause.example);
  button.setAttribute("aria-label", `Example of: ${said}`);
};

const part = (name, causes) => {
  const shownOnes = causes.slice(0, MOST[name]), left = causes.slice(MOST[name]);
  hide(byId(`causes-${name}`), !causes.length);
  keyed(byId(`causes-${name}-list`), shownOnes, causeKey, make, fill);
  const portion = left.reduce((all, one) => all + one.share, 0);
  say(byId(`causes-${name}-left`), left.length
    ? `${many(left.length, "smaller cause")} more, ${share(portion)} together.` : "");
};

export const drawCauses = (answer) => {
  const computed = Object.values(answer.computed).reduce((sum, one) => sum + one, 0);
  const never = answer.computed.new || 0;
  say(byId("causes-said"), !answer.requests ? "Nothing was asked yet."
    : `Of the last ${many(answer.requests, "request")}, ${tokens(computed)} of `
      + `${tokens(answer.prompt_tokens)} were computed: ${whole(never)} that were never seen before, `
      + `${whole(computed - never)} for other reasons.`);
  const ranked = [...answer.causes].sort((a, b) => (a.reason === "new") - (b.reason === "new")
    || b.tokens - a.tokens || ORDER.indexOf(a.reason) - ORDER.indexOf(b.reason));
  part("change", ranked.filter((one) => one.advice));
  part("rest", ranked.filter((one) => !one.advice));
};
