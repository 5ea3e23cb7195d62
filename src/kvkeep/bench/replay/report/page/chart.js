// One chart: its lines, the legend that switches them, the table behind it.
"use strict";

const FONT = "12px system-ui, -apple-system, 'Segoe UI', Roboto, 'Noto Sans', sans-serif";

// Keep the `ticks` ([place, text], in order) that fit side by side.
const roomFor = (ticks, low, high, width) => {
  const kept = [];
  let free = -Infinity;
  for (const [at, text] of ticks) {
    if (at < low - 1e-9 || at > high + 1e-9) continue;
    const middle = (at - low) / (high - low || 1) * width, half = text.length * 3.6 + 6;
    if (middle - half < free) continue;
    kept.push([at, text]);
    free = middle + half;
  }
  return kept;
};

class Chart {
  // `spec` is called for each drawing and returns {x, xName, xLabel, xPad, xTicks(low, high, width),
  // xText(index), yText, yTick, yLog, series: [{name, values, colour, dash, width, stepped, points,
  // fill, behind}]}, or null if there is nothing to draw.
  constructor(figure, spec) {
    this.figure = figure;
    this.host = figure.querySelector(".plot");
    this.legend = figure.querySelector(".legend");
    this.said = figure.querySelector(".said");
    this.filled = figure.querySelector(".filled");
    this.spec = spec;
    this.hidden = new Set();
    this.plot = null;
    this.host.addEventListener("keydown", (event) => this.key(event));
    if (this.filled) {
      this.filled.parentElement.addEventListener("toggle", () => this.fill());
    }
    new ResizeObserver(() => this.resize()).observe(this.host);
  }

  draw() {
    if (this.plot) this.plot.destroy();
    this.plot = null;
    this.host.replaceChildren();
    this.legend.replaceChildren();
    this.said.textContent = "";
    this.now = this.spec();
    if (!this.now || !this.now.x.length) {
      const empty = document.createElement("p");
      empty.className = "empty";
      empty.textContent = "There is nothing of this kind here.";
      this.host.append(empty);
    } else {
      this.plot = new uPlot(this.options(), [this.now.x, ...this.now.series.map((s) => s.values)],
        this.host);
      this.keys();
    }
    this.fill();
  }

  options() {
    const spec = this.now, axis = colour("quiet"), grid = {stroke: colour("grid"), width: 1};
    let ticks = [];
    return {
      width: this.host.clientWidth,
      height: this.host.clientHeight,
      legend: {show: false},
      cursor: {y: false, drag: {x: true, y: false}, points: {size: 7}},
      scales: {
        x: {time: false, range: (_, low, high) => {
          const pad = high > low ? (high - low) * (spec.xPad || 0) : 0.5;
          return [low - pad, high + pad];
        }},
        y: spec.yLog ? {distr: 3} : {range: (_, low, high) => [0, high > 0 ? high * 1.06 : 1]},
      },
      axes: [
        {
          stroke: axis, grid, ticks: {...grid, size: 5}, font: FONT, size: 30,
          label: spec.xLabel, labelFont: FONT, labelSize: 18, labelGap: 0,
          splits: (plot, _, low, high) => {
            ticks = roomFor(spec.xTicks(low, high, plot.bbox.width / devicePixelRatio), low, high,
              plot.bbox.width / devicePixelRatio);
            return ticks.map(([at]) => at);
          },
          values: () => ticks.map(([, text]) => text),
        },
        {
          stroke: axis, grid, ticks: {show: false}, font: FONT, space: 44,
          size: (_, values) => 16 + 7 * Math.max(3, ...(values || []).map((text) => text.length)),
          values: (_, splits) => splits.map((at) => (at === null ? "" : spec.yTick(at))),
        },
      ],
      series: [{}, ...spec.series.map((one) => ({
        label: one.name,
        show: !this.hidden.has(one.name),
        stroke: one.colour,
        width: one.width || 2,
        dash: one.dash,
        fill: one.fill,
        spanGaps: true,
        paths: one.stepped ? uPlot.paths.stepped({align: 1}) : undefined,
        points: {show: Boolean(one.points), size: 7, fill: one.colour},
      }))],
      hooks: {setCursor: [() => this.read()]},
    };
  }

  keys() {
    this.at = document.createElement("span");
    this.at.className = "at";
    this.values = [];
    this.legend.append(this.at);
    for (const number of this.order()) {
      const one = this.now.series[number];
      const button = document.createElement("button");
      const line = document.createElement("span");
      const name = document.createElement("bdi");
      const value = document.createElement("span");
      button.type = "button";
      line.className = "line";
      line.style.borderColor = one.colour;
      line.style.borderTopStyle = !one.dash ? "solid" : one.dash[0] < 4 ? "dotted" : "dashed";
      name.textContent = one.name;
      value.className = "value";
      button.append(line, name, value);
      const pressed = () => button.setAttribute("aria-pressed", String(!this.hidden.has(one.name)));
      button.addEventListener("click", () => {
        if (!this.hidden.delete(one.name)) this.hidden.add(one.name);
        this.plot.setSeries(number + 1, {show: !this.hidden.has(one.name)});
        pressed();
      });
      pressed();
      this.legend.append(button);
      this.values[number] = value;
    }
    this.read();
  }

  // Names of lines behind the others come last in the legend.
  order() {
    const behind = (number) => Boolean(this.now.series[number].behind);
    return this.now.series.map((_, number) => number).sort((a, b) => behind(a) - behind(b));
  }

  read() {
    if (!this.values || !this.plot) return;
    const index = this.plot.cursor.idx, there = index !== null && index !== undefined;
    this.at.textContent = there ? this.now.xText(index) : "";
    this.now.series.forEach((one, number) => {
      const value = there ? one.values[index] : null;
      this.values[number].textContent =
        value === null || value === undefined ? "" : this.now.yText(value);
    });
  }

  key(event) {
    if (!this.plot || event.target !== this.host) return;
    const last = this.now.x.length - 1, index = this.plot.cursor.idx;
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
    this.plot.setCursor({left: this.plot.valToPos(this.now.x[next], "x"), top: 10});
    this.said.textContent = `${this.now.xText(next)}: ` + this.now.series
      .filter((one) => one.values[next] !== null && !this.hidden.has(one.name))
      .map((one) => `${one.name} ${this.now.yText(one.values[next])}`).join(", ");
  }

  resize() {
    const {clientWidth: width, clientHeight: height} = this.host;
    if (this.plot && width && (width !== this.plot.width || height !== this.plot.height)) {
      this.plot.setSize({width, height});
    }
  }

  // The table behind a chart whose data can be chosen; filled when it is opened.
  fill() {
    if (!this.filled) return;
    this.filled.replaceChildren();
    if (!this.filled.parentElement.open || !this.now || !this.now.x.length) return;
    const series = this.order().map((number) => this.now.series[number]);
    const table = document.createElement("table"), wide = document.createElement("div");
    const row = (parent, cells, tag) => {
      const line = parent.insertRow();
      cells.forEach((text, at) => {
        const cell = document.createElement(at ? tag : "th");
        cell.scope = at ? (tag === "th" ? "col" : "") : (tag === "th" ? "col" : "row");
        if (at) cell.className = "n";
        cell.textContent = text;
        line.append(cell);
      });
    };
    row(table.createTHead(), [this.now.xName, ...series.map((one) => one.name)], "th");
    const body = table.createTBody();
    this.now.x.forEach((_, at) => row(body, [this.now.xText(at), ...series.map((one) =>
      one.values[at] === null ? "–" : this.now.yText(one.values[at]))], "td"));
    wide.className = "wide";
    wide.tabIndex = 0;
    wide.setAttribute("role", "region");
    wide.setAttribute("aria-label", this.figure.querySelector("h3").textContent);
    wide.append(table);
    this.filled.append(wide);
  }
}
