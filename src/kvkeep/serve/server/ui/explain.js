// Why a prompt was computed: the dialog for a request, a cause, or a typed prompt.

import {ask} from "./api.js";
import {bar, swatch} from "./bars.js";
import * as dialogs from "./dialogs.js";
import {el, say, shown, theirs} from "./dom.js";
import {REASONS, many, seconds, sourceName, tenantName, tokens, whole} from "./words.js";

const MOST_SPANS = 60;

const kindOf = (span) => (span.source ? (span.source === "pool" ? "pool" : "loaded")
  : `r-${span.reason in REASONS ? span.reason : "new"}`);
export const reasonName = (reason) => REASONS[reason] || reason;

// A link to the explanation of the request that the evidence names.
const other = ({nearest, by} = {}) => (nearest || by ? el("button", {type: "button", class: "link",
  on: {click: () => explain(nearest || by)}}, "Open that request") : null);

const line = (span) => el("li", {}, swatch(kindOf(span)),
  el("div", {}, el("b", {}, span.source ? `from the ${sourceName(span.source)}`
    : reasonName(span.reason)), ` · ${tokens(span.stop - span.start)} `,
  el("span", {class: "quiet"}, `(${whole(span.start)}–${whole(span.stop)})`),
  span.why ? el("p", {}, theirs(span.why), " ", other(span.evidence)) : null));

// The text around the first difference, which is at `place`. Letters are whole characters, as the
// server counts them, not what JavaScript calls one.
const around = (title, heading, letters, place) => {
  const marked = el("mark", {}, place < letters.length ? shown(letters[place]) : "(ends here)");
  const text = {class: "code", dir: "ltr", tabindex: 0, role: "group", "aria-label": title};
  return el("div", {class: "sample"}, el(heading, {class: "quiet"}, title), el("p", text,
    shown(letters.slice(0, place).join("")), marked, shown(letters.slice(place + 1).join(""))));
};

export const samples = (text, heading = "h3") => {
  const given = Array.from(text.given_text || ""), kept = Array.from(text.cached_text || "");
  let at = Math.min(text.at_given ?? 0, given.length);
  let other = Math.min(text.at_cached ?? 0, kept.length);
  // The first tokens that differ may begin with the same letters.
  while (at < given.length && other < kept.length && given[at] === kept[other]) {
    at += 1;
    other += 1;
  }
  return el("section", {class: "samples", "aria-label": "Where they differ"},
    around("This prompt", heading, given, at), around("Cached prompt", heading, kept, other));
};

const facts = (one) => {
  const list = [];
  const add = (name, value) => value === null || value === undefined || value === "" || list.push(
    el("div", {}, el("dt", {}, name), el("dd", {}, value)));
  add("prompt", tokens(one.prompt_tokens));
  add("answer", one.generated_tokens === null ? null : tokens(one.generated_tokens || 0));
  add("first token", one.ttft_s === null ? null : seconds(one.ttft_s));
  add("in all", one.seconds === null ? null : seconds(one.seconds));
  add("ended", one.id ? one.outcome || "running" : null);
  add("endpoint", one.endpoint && shown(one.endpoint));
  add("tenant", one.cache_salt ? theirs(tenantName(one.cache_salt)) : null);
  add("session", one.session ? theirs(one.session) : null);
  return el("dl", {class: "facts"}, list);
};

const drawn = (one) => {
  const spans = one.spans || [];
  const parts = spans.map((span) => ({amount: span.stop - span.start, kind: kindOf(span)}));
  const more = spans.length - MOST_SPANS;
  return [
    el("p", {class: "sentence"}, theirs(one.sentence)),
    bar(parts),
    el("ol", {class: "spans"}, spans.slice(0, MOST_SPANS).map(line)),
    more > 0 ? el("p", {class: "quiet"}, `and ${many(more, "part")} more`) : null,
    one.text ? samples(one.text) : null,
    facts(one),
  ].filter(Boolean);
};

const titled = (one) => (one.id ? `Request ${shown(one.id)}` : "If it were sent now");

// Open the dialog for a request.
export const explain = async (id) => {
  const title = `Request ${shown(id)}`;
  dialogs.open(title, el("p", {class: "quiet", role: "status"}, "Asking…"), {kind: "wide"});
  try {
    const one = await ask(`kv/explain/${encodeURIComponent(id)}`);
    if (dialogs.isOpen()) dialogs.open(titled(one), drawn(one), {kind: "wide"});
  } catch (error) {
    if (dialogs.isOpen()) dialogs.open(title, el("p", {class: "wrong"}, shown(error.message)));
  }
};

// Explain a prompt that is typed in.
export const askPrompt = () => {
  const text = el("textarea", {rows: 6, required: true, spellcheck: "false", id: "ask-text"});
  const salt = el("input", {type: "text", id: "ask-salt", autocomplete: "off", maxlength: 256});
  const chat = el("input", {type: "checkbox", id: "ask-chat"});
  const said = el("p", {class: "wrong", role: "alert"});
  const form = el("form", {class: "asked"},
    el("p", {}, "Shows what of a prompt would be reused now. Nothing is computed or cached."),
    el("label", {for: "ask-text"}, "Prompt"), text,
    el("label", {class: "tick"}, chat, " as the message of a user in a chat"),
    el("label", {for: "ask-salt"}, "cache_salt, if there is one"), salt, said,
    el("div", {class: "buttons"}, el("button", {type: "submit", class: "main"}, "Explain")));
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    const body = chat.checked ? {messages: [{role: "user", content: text.value}]}
      : {prompt: text.value};
    if (salt.value) body.cache_salt = salt.value;
    try {
      const one = await ask("kv/explain", {body});
      dialogs.open(titled(one), drawn(one), {kind: "wide"});
    } catch (error) {
      say(said, shown(error.message));
    }
  });
  dialogs.open("Explain a prompt", form, {kind: "wide"});
  text.focus();
};
