// The dashboard: what to poll when, the theme, the API key, the notice while the server is down.

import {Refused, ask, key, setKey} from "./api.js";
import {drawCauses} from "./causes.js";
import {drawHistory, drawWhatIf, redraw} from "./charts.js";
import {setClock} from "./clock.js";
import * as dialogs from "./dialogs.js";
import {byId, el, hide, say, shown} from "./dom.js";
import {askPrompt} from "./explain.js";
import {drawLive} from "./live.js";
import {Poll, isStopped, stop, wake} from "./poll.js";
import {drawRequests} from "./requests.js";
import {breakAll} from "./series.js";
import {drawTables} from "./tables.js";
import {drawTiles} from "./tiles.js";
import {Explorer} from "./tree.js";
import {ago, seconds} from "./words.js";

const LIVE_MS = 1000;
const REQUESTS_MS = 3000;
const SUMMARY_MS = 5000;


let live = null;
let answered;
const known = new Promise((resolve) => {
  answered = resolve;
});
let paused = false;

// --- the connection ---------------------------------------------------------------------------

const state = (kind, text) => {
  byId("state").dataset.state = kind;
  say(byId("state-text"), text);
  document.body.classList.toggle("stale", kind !== "live");
};
const notice = (...parts) => {
  const node = byId("notice");
  hide(node, !parts.length);
  if (!parts.length) node.replaceChildren();
  else if (node.firstChild?.textContent !== parts[0]) node.replaceChildren(...parts);
};

const silent = (error, wait) => {
  breakAll();
  if (error instanceof Refused && error.status === 401) {
    locked(error);
    return;
  }
  const old = live ? ` The figures shown are from ${ago(Date.now() / 1000 - live.seenAt)}.` : "";
  const why = error instanceof Refused ? shown(error.message) : "The server does not answer.";
  state("gone", "No answer");
  notice(`${why} Trying again in ${seconds(Math.max(1, Math.round(wait)))}.${old}`, " ",
    el("button", {type: "button", on: {click: wake}}, "Try now"));
};

const first = (error) => (live ? "" : `The server does not answer: ${shown(error.message)}`);

// --- the key -----------------------------------------------------------------------------------

const locked = (error) => {
  stop(true);
  state("locked", "Needs a key");
  notice(key() ? "The server rejected this API key." : "This server needs its API key.", " ",
    el("button", {type: "button", on: {click: () => askKey(error)}}, "Enter the key"));
  if (!dialogs.isOpen()) askKey();
};

const askKey = () => {
  const field = el("input", {type: "password", id: "key-field", autocomplete: "off",
    spellcheck: "false", required: true});
  const wrong = el("p", {class: "wrong", role: "alert"});
  const forget = el("button", {type: "button", disabled: !key(), on: {click: () => {
    setKey(null);
    dialogs.close();
    go();
  }}}, "Forget the key");
  const form = el("form", {class: "asked"},
    el("p", {}, "The key that the server was started with. This tab remembers it until it is closed, "
      + "and sends it to this server alone."),
    el("label", {for: "key-field"}, "API key"), field, wrong,
    el("div", {class: "buttons"}, forget, el("button", {type: "submit", class: "main"}, "Use it")));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    const typed = field.value.trim();
    if (!/^[\x21-\x7e]([\x20-\x7e]*[\x21-\x7e])?$/.test(typed)) {
      say(wrong, "A key must be printable ASCII.");
      return;
    }
    setKey(typed);
    dialogs.close();
    go();
  });
  dialogs.open("API key", form, {kind: "small"});
  field.focus();
};
byId("key").addEventListener("click", () => askKey());

// --- polling -----------------------------------------------------------------------------

new Poll({
  every: LIVE_MS,
  load: () => ask("kv/live"),
  show: (answer) => {
    answered();
    live = {...answer, seenAt: Date.now() / 1000};
    setClock(answer.at);
    state("live", "Live");
    notice();
    // What this server does not tell has no part: inside another engine there is no tree.
    const mapped = Boolean(answer.pages) && answer.map !== false;
    hide(byId("kept"), !mapped);
    hide(byId("ask"), !mapped);
    drawLive(answer);
    drawTiles(answer);
    drawHistory(answer.history);
    drawWhatIf(mapped ? answer.what_if : undefined, answer.totals);
    drawTables(answer);
  },
  failed: silent,
});

// After the first response, which says which endpoints there are.
const section = (id, every, load, show) => new Poll({
  every,
  element: byId(id),
  ready: known,
  load,
  show,
  failed: (error) => say(byId(`${id}-said`), error instanceof Refused && error.status !== 401
    ? shown(error.message) : first(error)),
});
section("requests", REQUESTS_MS, () => ask("kv/requests", {query: {last: 50}}), drawRequests);
section("causes", SUMMARY_MS, () => ask("kv/summary", {query: {last: 1000}}), drawCauses);
new Explorer(known);

byId("ask").addEventListener("click", askPrompt);

const dressPause = () => {
  say(byId("pause"), paused ? "Resume" : "Pause");
  byId("pause").setAttribute("aria-label", `${paused ? "Resume" : "Pause"} polling the server`);
};
const go = () => {
  paused = false;
  dressPause();
  notice();
  stop(false);
};
byId("pause").addEventListener("click", () => {
  if (paused || isStopped()) {
    go();
    return;
  }
  paused = true;
  breakAll();
  dressPause();
  stop(true);
  state("paused", "Paused");
});

// --- the theme ----------------------------------------------------------------------------------

const root = document.documentElement;
const systemDark = matchMedia("(prefers-color-scheme: dark)");
const dark = () => (root.dataset.theme || (systemDark.matches ? "dark" : "light")) === "dark";
const dress = () => {
  say(byId("theme"), dark() ? "Light" : "Dark");
  byId("theme").setAttribute("aria-label", dark() ? "Use the light theme" : "Use the dark theme");
  redraw();
};
byId("theme").addEventListener("click", () => {
  root.dataset.theme = dark() ? "light" : "dark";
  try {
    localStorage.setItem("kvkeep-theme", root.dataset.theme);
  } catch {
    // without storage the theme lasts as long as the page
  }
  dress();
});
systemDark.addEventListener("change", dress);
dress();
dressPause();
wake();
