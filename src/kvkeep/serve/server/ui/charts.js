// The two charts with axes, drawn by uPlot in the colours of the current theme.

/* global uPlot */
import {byId, el, hide, keyed, say} from "./dom.js";
import {amount, share, tokens, whole} from "./words.js";

const FONT = "12px system-ui, -apple-system, 'Segoe UI', Roboto, 'Noto Sans', sans-serif";
const MINUTE_ROWS = 12;  // of five seconds

const probe = el("span", {hidden: true});
document.body.append(probe);
const colour = (name) => {
  probe.style.color = `var(--${name})`;
  return getComputedStyle(probe).color;
};

// A chart in `host` with the options of `make()`; made anew when the theme changes.
class Chart {
  constructor(host, make) {
    Object.assign(this, {host, make, plot: null, data: null});
    new ResizeObserver(() => this.resize()).observe(host);
  }

  draw(data) {
    this.data = data;
    if (!this.host.clientWidth) return;
    if (this.plot) this.plot.setData(data);
    else {
      this.plot = new uPlot({...this.make(), width: this.host.clientWidth,
        height: this.host.clientHeight, legend: {show: false}}, data, this.host);
    }
  }

  again() {
    this.plot?.destroy();
    this.plot = null;
    if (this.data) this.draw(this.data);
  }

  resize() {
    const {clientWidth: width, clientHeight: height} = this.host;
    if (!width) return;
    if (!this.plot) this.again();
    else if (width !== this.plot.width || height !== this.plot.height) {
      this.plot.setSize({width, height});
    }
  }
}

const axis = () => ({stroke: colour("quiet"), font: FONT, grid: {stroke: colour("grid"), width: 1},
  ticks: {show: false}});
const percent = (_, splits) => splits.map((at) => `${Math.round(100 * at)} %`);
const bars = (fill) => ({paths: uPlot.paths.bars({size: [0.8, 12]}), points: {show: false},
  scale: "tokens", fill, stroke: fill, width: 0});

const historyOptions = () => ({
  cursor: {y: false, drag: {x: false, y: false}, points: {size: 7}},
  scales: {x: {range: (_, low, high) => [low - 2.5, Math.max(high, low + 60) + 2.5]},
    "%": {range: [0, 1.02]},
    tokens: {range: (_, low, high) => [0, Math.max(4, high * 1.05)]}},
  axes: [
    {...axis(), space: 70, size: 30, values: [[60, "{HH}:{mm}", null, null, null, null, null, null, 1],
      [1, "{HH}:{mm}:{ss}", null, null, null, null, null, null, 1]]},
    {...axis(), scale: "%", size: 46, splits: () => [0, 0.25, 0.5, 0.75, 1], values: percent},
    {...axis(), scale: "tokens", side: 1, size: 52, space: 40, grid: {show: false},
      values: (_, splits) => splits.map((at) => amount(at))},
  ],
  series: [{}, bars(colour("p-computed")), bars(colour("p-kept")),
    {scale: "%", stroke: colour("accent"), width: 2, points: {show: false}}],
  hooks: {setCursor: [(plot) => pointed(plot.cursor.idx)]},
});

let rows = [], sum = "";
const time = (at) => new Date(1000 * at).toLocaleTimeString("en-GB");
const pointed = (at) => {
  const row = at === null || at === undefined ? null : rows[at];
  say(byId("history-said"), row ? `${time(row[0])}: ${tokens(row[1])} of prompts, `
    + `${tokens(row[2])} reused${row[1] ? ` (${share(row[2] / row[1])})` : ""}` : sum);
};

const history = new Chart(byId("history"), historyOptions);
export const drawHistory = (found) => {
  hide(byId("history-card"), !found);
  rows = found || [];
  const asked = rows.reduce((all, one) => all + one[1], 0);
  const reused = rows.reduce((all, one) => all + one[2], 0);
  sum = asked ? `Bars: ${tokens(asked)} of prompts, ${tokens(reused)} of them reused (in colour). `
    + "Line: hit rate of the minute before." : "No prompt in the last ten minutes.";
  const line = rows.map((_, at) => {
    const minute = rows.slice(Math.max(0, at - MINUTE_ROWS + 1), at + 1);
    const all = minute.reduce((some, one) => some + one[1], 0);
    return all ? minute.reduce((some, one) => some + one[2], 0) / all : null;
  });
  if (rows.length) {
    history.draw([...[0, 1, 2].map((column) => rows.map((one) => one[column])), line]);
  }
  const at = history.plot?.cursor.idx;
  pointed(at === undefined ? null : at);
};

const times = (value) => (value < 1 ? `${+value.toPrecision(2)}` : `${+value.toPrecision(3)}`) + "×";
const whatIfOptions = () => ({
  cursor: {show: false},
  scales: {x: {time: false, range: (_, low, high) => [low - 0.25, high + 0.25]},
    y: {range: (_, low, high) => [0, Math.min(1.02, Math.max(0.1, high * 1.15))]}},
  axes: [
    {...axis(), size: 30, splits: () => points.map((one) => Math.log2(one.times)),
      values: (_, splits) => splits.map((at) => times(2 ** at))},
    {...axis(), size: 46, space: 36, values: percent},
  ],
  series: [{}, {stroke: colour("accent"), width: 2, fill: colour("shade"),
    points: {show: true, size: 7, fill: colour("accent")}}],
});

let points = [];
const whatIf = new Chart(byId("whatif"), whatIfOptions);
const sentence = () => {
  const now = points.find((one) => one.times === 1), twice = points.find((one) => one.times === 2);
  if (points.length < 2) return "The prompts are too short to tell what pools of other sizes would reuse.";
  if (!now || !twice) return "Hit rates of pools of other sizes, estimated from a sample of prompts.";
  const gain = twice.hit_rate - now.hit_rate;
  return gain < 0.005 ? "More pages would hardly have raised the hit rate so far."
    : `Twice the pages would have reused ${share(twice.hit_rate)} instead of ${share(now.hit_rate)}.`;
};
// What makes 1× less than the hit rate of the page's first tile.
const besides = ({loaded_tokens: loaded, prompt_tokens: all}) =>
  loaded ? ` Of the pool alone: tiers gave ${share(loaded / all)} besides.` : "";
export const drawWhatIf = (found, totals) => {
  hide(byId("whatif-card"), found === undefined);
  const there = Boolean(found && found.length);
  hide(byId("whatif"), !there);
  hide(byId("whatif-points"), !there);
  if (!there) {
    say(byId("whatif-said"), "No estimate: the server does not sample its blocks, "
      + "or has seen too few prompts.");
    return;
  }
  points = [...found].sort((a, b) => a.times - b.times);
  const bound = points.some((one) => one.kv_only);
  say(byId("whatif-said"), sentence() + (bound ? " Of the KV alone: windows and states allow less."
    : besides(totals)));
  whatIf.draw([points.map((one) => Math.log2(one.times)), points.map((one) => one.hit_rate)]);
  const make = () => el("li", {}, el("b", {}), el("span", {}));
  keyed(byId("whatif-points"), points, (one) => one.times, make, (node, one) => {
    say(node.firstChild, times(one.times));
    say(node.lastChild, share(one.hit_rate));
    node.title = `${whole(one.pages)} pages`;
    node.classList.toggle("now", one.times === 1);
  });
};

export const redraw = () => {
  history.again();
  whatIf.again();
};
