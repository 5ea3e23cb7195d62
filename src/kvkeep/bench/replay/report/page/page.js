// The chart of a report of `kvkeep replay`: hit rates against capacity.
"use strict";

const data = JSON.parse(document.getElementById("data").textContent);
const root = document.documentElement;
const FONT = "12px system-ui, -apple-system, 'Segoe UI', Roboto, 'Noto Sans', sans-serif";
const COLOURS = 8;

const short = (value) =>
  value >= 100 ? Math.round(value).toLocaleString("en") : String(+value.toPrecision(3));
const tokens = (value) =>
  value >= 999500 ? `${short(value / 1e6)} M`
    : value >= 999.5 ? `${short(value / 1e3)} k` : String(Math.round(value));
const share = (value) => `${(100 * value).toFixed(1)} %`;

const probe = document.createElement("span");
probe.hidden = true;
document.body.append(probe);
const colour = (name) => {
  probe.style.color = `var(--${name})`;
  return getComputedStyle(probe).color;
};

// Keep the `ticks` ([place, text], in order) that fit side by side.
const roomFor = (ticks, low, high, width) => {
  const fitting = [];
  let free = -Infinity;
  for (const [at, text] of ticks) {
    if (at < low - 1e-9 || at > high + 1e-9) continue;
    const middle = (at - low) / (high - low || 1) * width, half = text.length * 3.6 + 6;
    if (middle - half < free) continue;
    fitting.push([at, text]);
    free = middle + half;
  }
  return fitting;
};

// Lines as uPlot draws them: bounds first, below the others; null where a line has no point.
const lines = () => {
  const bound = {colour: colour("bound"), width: 1.5};
  const all = data.policies.map((line, at) => ({...line, marked: true, width: 2,
    colour: colour(`c${at % COLOURS}`), dash: at < COLOURS ? undefined : [10, 3]}));
  if (data.belady) {
    all.unshift({...data.belady, ...bound, dash: [6, 4], fill: colour("shade"),
      marked: !data.policies.length});
  }
  if (data.infinite !== null) {
    const at = data.capacities.length ? data.capacities : [1];
    all.unshift({name: "infinite (bound)", ...bound, dash: [2, 4],
      points: at.map((capacity) => [capacity, data.infinite])});
  }
  const capacities = [...new Set(all.flatMap((line) => line.points.map(([at]) => at)))]
    .sort((a, b) => a - b);
  for (const line of all) {
    const rates = new Map(line.points);
    line.values = capacities.map((at) => (rates.has(at) ? rates.get(at) : null));
  }
  return [capacities, all];
};

class Chart {
  constructor(figure) {
    this.host = figure.querySelector(".plot");
    this.legend = figure.querySelector(".legend");
    this.said = figure.querySelector(".said");
    this.hidden = new Set();
    this.host.addEventListener("keydown", (event) => this.key(event));
    new ResizeObserver(() => this.resize()).observe(this.host);
  }

  draw() {
    if (this.plot) this.plot.destroy();
    this.legend.replaceChildren();
    this.said.textContent = "";
    [this.capacities, this.lines] = lines();
    this.plot = new uPlot(this.options(),
      [this.capacities.map(Math.log2), ...this.lines.map((line) => line.values)], this.host);
    this.keys();
  }

  options() {
    const axis = colour("quiet"), grid = {stroke: colour("grid"), width: 1};
    let ticks = [];
    return {
      width: this.host.clientWidth,
      height: this.host.clientHeight,
      legend: {show: false},
      cursor: {y: false, drag: {x: true, y: false}, points: {size: 7}},
      scales: {
        x: {time: false, range: (_, low, high) => {
          const pad = high > low ? (high - low) * 0.04 : 0.5;
          return [low - pad, high + pad];
        }},
        y: {range: (_, low, high) => [0, high > 0 ? high * 1.06 : 1]},
      },
      axes: [
        {
          stroke: axis, grid, ticks: {...grid, size: 5}, font: FONT, size: 30,
          label: "capacity, tokens", labelFont: FONT, labelSize: 18, labelGap: 0,
          splits: (plot, _, low, high) => {
            ticks = roomFor(this.capacities.map((at) => [Math.log2(at), tokens(at)]), low, high,
              plot.bbox.width / devicePixelRatio);
            return ticks.map(([at]) => at);
          },
          values: () => ticks.map(([, text]) => text),
        },
        {
          stroke: axis, grid, ticks: {show: false}, font: FONT, space: 44, size: 52,
          values: (_, splits) => splits.map((at) => `${+(100 * at).toFixed(1)} %`),
        },
      ],
      series: [{}, ...this.lines.map((line) => ({
        label: line.name,
        show: !this.hidden.has(line.name),
        stroke: line.colour,
        width: line.width,
        dash: line.dash,
        fill: line.fill,
        spanGaps: true,
        points: {show: Boolean(line.marked), size: 7, fill: line.colour},
      }))],
      hooks: {setCursor: [() => this.read()]},
    };
  }

  // The legend: a button for each line, which switches it.
  keys() {
    this.at = document.createElement("span");
    this.at.className = "at";
    this.legend.append(this.at);
    this.values = this.lines.map((line, number) => {
      const button = document.createElement("button");
      const sample = document.createElement("span");
      const name = document.createElement("bdi");
      const value = document.createElement("span");
      button.type = "button";
      sample.className = "line";
      sample.style.borderColor = line.colour;
      sample.style.borderTopStyle = !line.dash ? "solid" : line.dash[0] < 4 ? "dotted" : "dashed";
      name.textContent = line.name;
      value.className = "value";
      button.append(sample, name, value);
      const pressed = () => button.setAttribute("aria-pressed", !this.hidden.has(line.name));
      button.addEventListener("click", () => {
        if (!this.hidden.delete(line.name)) this.hidden.add(line.name);
        this.plot.setSeries(number + 1, {show: !this.hidden.has(line.name)});
        pressed();
      });
      pressed();
      this.legend.append(button);
      return value;
    });
    this.read();
  }

  read() {
    if (!this.values || !this.plot) return;
    const index = this.plot.cursor.idx, there = index !== null && index !== undefined;
    this.at.textContent = there ? `${tokens(this.capacities[index])} tokens` : "";
    this.lines.forEach((line, number) => {
      const value = there ? line.values[index] : null;
      this.values[number].textContent = value === null ? "" : share(value);
    });
  }

  key(event) {
    if (event.target !== this.host) return;
    const last = this.capacities.length - 1, index = this.plot.cursor.idx;
    const none = index === null || index === undefined;
    const next = {
      ArrowRight: none ? 0 : Math.min(last, index + 1),
      ArrowLeft: none ? last : Math.max(0, index - 1),
      Home: 0, End: last, Escape: -1,
    }[event.key];
    if (next === undefined) return;
    event.preventDefault();
    if (next < 0) {
      this.plot.setData(this.plot.data);  // redraws everything
      this.plot.setCursor({left: -10, top: -10});
      this.said.textContent = "";
      return;
    }
    this.plot.setCursor({left: this.plot.valToPos(Math.log2(this.capacities[next]), "x"), top: 10});
    this.said.textContent = `${tokens(this.capacities[next])} tokens: ` + this.lines
      .filter((line) => line.values[next] !== null && !this.hidden.has(line.name))
      .map((line) => `${line.name} ${share(line.values[next])}`).join(", ");
  }

  resize() {
    const {clientWidth: width, clientHeight: height} = this.host;
    if (this.plot && width && (width !== this.plot.width || height !== this.plot.height)) {
      this.plot.setSize({width, height});
    }
  }
}

const chart = new Chart(document.querySelector("[data-chart]"));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => chart.draw());
chart.draw();
