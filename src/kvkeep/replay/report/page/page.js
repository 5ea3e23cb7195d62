// Draws the charts of a report of `kvkeep replay` from the figures embedded in the page.
(() => {
  "use strict";
  const data = JSON.parse(document.getElementById("data").textContent);
  const root = document.documentElement;
  const COLOURS = 8;
  const MINUTE = 60, HOUR = 3600, DAY = 86400;

  // --- figures as people read them: the same as in words.py ------------------------------------

  const short = (value) =>
    value >= 1000 ? Math.round(value).toLocaleString("en") : String(+value.toPrecision(3));
  const tokens = (value) =>
    value >= 999500 ? `${short(Math.round(value / 1e5) / 10)} M`
      : value >= 999.5 ? `${short(Math.round(value / 100) / 10)} k` : String(Math.round(value));
  const share = (value) => `${(100 * value).toFixed(1)} %`;
  const money = (value) => data.currency +
    value.toLocaleString("en", {maximumFractionDigits: value < 100 ? 2 : 0});
  const seconds = (value) => {
    for (const [size, unit] of [[DAY, "days"], [HOUR, "h"], [MINUTE, "min"]]) {
      if (value >= 1.5 * size) return `${short(Math.round(10 * value / size) / 10)} ${unit}`;
    }
    return value && value < 1 ? `${short(1000 * value)} ms` : `${short(value)} s`;
  };
  const brief = (value) => (value === 1 || value % 1 === 0 ? String(value) : short(value));
  const moment = (value) => {  // a round time, for an axis
    const [size, unit] = value >= DAY ? [DAY, "d"] : value >= HOUR ? [HOUR, "h"]
      : value >= MINUTE ? [MINUTE, "min"] : [1, "s"];
    return `${brief(value / size)} ${unit}`;
  };

  // --- colours, as the page's style has them now -----------------------------------------------

  const probe = document.createElement("span");
  probe.hidden = true;
  document.body.append(probe);
  const colour = (name) => {
    probe.style.color = `var(--${name})`;
    return getComputedStyle(probe).color;
  };
  const systemDark = matchMedia("(prefers-color-scheme: dark)");
  const dark = () => (root.dataset.theme || (systemDark.matches ? "dark" : "light")) === "dark";

  // --- one chart -------------------------------------------------------------------------------

  const FONT = "12px system-ui, -apple-system, 'Segoe UI', Roboto, 'Noto Sans', sans-serif";

  // As many of `ticks` ([place, text], in order) as have room beside each other.
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
    // `spec` is asked for anew at each drawing: {x, xName, xLabel, xPad, xTicks(low, high, width), xText(index),
    // yText, yTick, series: [{name, values, colour, dash, width, stepped, points, fill}]}, or
    // null where there is nothing to draw.
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
          y: {range: (_, low, high) => [0, high > 0 ? high * 1.06 : 1]},
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
            values: (_, splits) => splits.map((at) => (ticks.find((tick) => tick[0] === at) || ["", ""])[1]),
          },
          {
            stroke: axis, grid, ticks: {show: false}, font: FONT, space: 44,
            size: (_, values) => 16 + 7 * Math.max(3, ...(values || []).map((text) => text.length)),
            values: (_, splits) => splits.map((at) => spec.yTick(at)),
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
      const order = this.now.series.map((one, number) => number);
      order.sort((a, b) => Boolean(this.now.series[a].behind) - Boolean(this.now.series[b].behind));
      for (const number of order) {
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
        this.plot.setData(this.plot.data);  // all of it again
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

    // The table behind a chart whose figures change with what is chosen; made when it is opened.
    fill() {
      if (!this.filled) return;
      this.filled.replaceChildren();
      if (!this.filled.parentElement.open || !this.now || !this.now.x.length) return;
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
      row(table.createTHead(), [this.now.xName, ...this.now.series.map((one) => one.name)], "th");
      const body = table.createTBody();
      this.now.x.forEach((_, at) => row(body, [this.now.xText(at), ...this.now.series.map((one) =>
        one.values[at] === null ? "–" : this.now.yText(one.values[at]))], "td"));
      wide.className = "wide";
      wide.tabIndex = 0;
      wide.setAttribute("role", "region");
      wide.setAttribute("aria-label", this.figure.querySelector("h3").textContent);
      wide.append(table);
      this.filled.append(wide);
    }
  }

  // --- what is drawn ---------------------------------------------------------------------------

  const places = new Map(data.policies.map((line, at) => [line.name, at]));
  const painted = (name) => {
    const at = places.get(name);
    if (at === undefined) return {colour: colour("bound"), dash: [6, 4], width: 1.25, behind: true};
    return {colour: colour(`c${at % COLOURS}`), dash: at < COLOURS ? undefined : [10, 3]};
  };

  // Series of [x, y] on one common x; null where a series has nothing.
  const joined = (series) => {
    const x = [...new Set(series.flatMap((one) => one.rows.map((row) => row[0])))]
      .sort((a, b) => a - b);
    const place = new Map(x.map((value, at) => [value, at]));
    for (const one of series) {
      one.values = new Array(x.length).fill(null);
      for (const [at, value] of one.rows) one.values[place.get(at)] = value;
    }
    return x;
  };

  const byCapacity = (figure, yText, extra) => {
    const lines = data.policies.map((line) => ({
      name: line.name, points: true, ...painted(line.name),
      rows: line.points.map((one) => [one.capacity, figure(one)]).filter((row) => row[1] != null),
    }));
    const series = [...extra, ...lines].filter((one) => one.rows.length);
    const capacities = joined(series);
    const ticks = [...new Set(series.filter((one) => one.points).flatMap((one) =>
      one.rows.map((row) => row[0])))].sort((a, b) => a - b);
    return {
      x: capacities.map(Math.log2), xPad: 0.04, xName: "capacity", xLabel: "capacity, tokens", yText, yTick: yText, series,
      xTicks: () => ticks.map((at) => [Math.log2(at), tokens(at)]),
      xText: (at) => `${tokens(capacities[at])} tokens`,
    };
  };

  const rates = () => {
    const extra = [];
    const bound = {colour: colour("bound"), width: 1.5, behind: true};
    if (data.belady) {
      extra.push({name: "belady (bound)", ...bound, dash: [6, 4], fill: colour("shade"),
        points: !data.policies.length,
        rows: data.belady.points.map((one) => [one.capacity, one.rate])});
    }
    if (data.infinite) {
      const at = data.capacities.length ? data.capacities : [1];
      extra.push({name: "infinite (bound)", ...bound, dash: [2, 4],
        rows: at.map((capacity) => [capacity, data.infinite.rate])});
    }
    for (const line of data.policies) {
      extra.push({name: `${line.name}, what-if`, ...painted(line.name), width: 1.25, dash: [5, 4],
        behind: true, rows: line.what_if});
    }
    const spec = byCapacity((one) => one.rate, share, extra);
    spec.yTick = (value) => `${+(100 * value).toFixed(1)} %`;
    return spec;
  };

  const ttft = () => {
    const chosen = document.getElementById("percentile").value;
    return byCapacity((one) => one.ttft && one.ttft[chosen], seconds, []);
  };

  // Each point is on a row of its own: two may have the same hit rate.
  const cost = () => {
    const lines = [...data.policies];
    if (data.belady) lines.unshift({...data.belady, name: "belady (bound)"});
    const points = lines.flatMap((line, at) => line.points
      .filter((one) => one.cost != null).map((one) => ({...one, at})));
    points.sort((a, b) => a.rate - b.rate || a.capacity - b.capacity);
    return {
      x: points.map((one) => one.rate), xPad: 0.04, xName: "hit rate", xLabel: "hit rate",
      series: lines.map((line, at) => ({
        name: line.name, points: true, ...painted(line.name),
        values: points.map((one) => (one.at === at ? one.cost : null)),
      })),
      xTicks: (low, high, width) => {
        const step = [0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2]
          .find((one) => (high - low) / one * 56 <= width) || 0.5;
        const ticks = [];
        for (let at = Math.ceil(low / step); at * step <= high; at++) {
          ticks.push([at * step, `${+(100 * at * step).toFixed(1)} %`]);
        }
        return ticks;
      },
      xText: (at) => `${share(points[at].rate)}, ${tokens(points[at].capacity)} tokens`,
      yText: money, yTick: money,
    };
  };

  const chosenDetails = () => {  // bounds first: the others are drawn over them
    const all = data.details[document.getElementById("capacity").value] || [];
    return [...all].sort((a, b) => places.has(a.name) - places.has(b.name));
  };

  const STEPS = [1, 2, 5, 10, 15, 30, ...[1, 2, 5, 10, 15, 30].map((n) => n * MINUTE),
    ...[1, 2, 3, 6, 12].map((n) => n * HOUR), ...[1, 2, 7, 14, 30, 90].map((n) => n * DAY)];
  const time = () => {
    const series = chosenDetails().map((one) => (
      {name: one.name, width: 1.5, ...painted(one.name), rows: one.time}));
    if (data.infinite) {
      series.unshift({name: "infinite", ...painted("infinite"), dash: [2, 4], rows: data.infinite.time});
    }
    const x = joined(series);
    return {
      x, series, xName: "until", xLabel: "since the trace began", xText: (at) => `at ${seconds(x[at])}`, yText: share,
      yTick: (value) => `${+(100 * value).toFixed(1)} %`,
      xTicks: (low, high, width) => {
        const step = STEPS.find((one) => (high - low) / one * 72 <= width) || 365 * DAY;
        const ticks = [];
        for (let at = Math.ceil(low / step); at * step <= high; at++) {
          ticks.push([at * step, at ? moment(at * step) : "0"]);
        }
        return ticks;
      },
    };
  };

  const MOMENTS = [0.0625, 0.25, 1, 4, 15, MINUTE, 4 * MINUTE, 15 * MINUTE, HOUR, 4 * HOUR, 12 * HOUR,
    DAY, 4 * DAY, 20 * DAY];
  const histogram = (field, xLabel, all) => () => {
    const closed = (rows) => {  // an end for the last step
      const [from] = rows[rows.length - 1];
      return [...rows, [+(from * 2 ** 0.25).toPrecision(5), 0]];
    };
    const series = chosenDetails().filter((one) => one[field].length).map((one) => (
      {name: one.name, stepped: true, width: 1.5, ...painted(one.name), rows: closed(one[field])}));
    if (all && data.infinite && data.infinite[field].length) {
      series.unshift({name: "infinite", stepped: true, ...painted("infinite"), dash: undefined, width: 1,
        fill: colour("shade"), rows: closed(data.infinite[field])});
    }
    const from = joined(series);
    return {
      x: from.map(Math.log2), series, xName: "time", xPad: 0.01, xLabel,
      xText: (at) => (from[at] <= MOMENTS[0] ? `up to ${seconds(from[at] * 2 ** 0.25)}` :
        `from ${seconds(from[at])}`), yText: tokens, yTick: tokens,
      xTicks: () => MOMENTS.map((at) => [Math.log2(at), at < 0.1 ? "0" : at < 1 ? `${1000 * at} ms` : moment(at)]),
    };
  };

  const SPECS = {
    rates, ttft, cost, time, gap: histogram("gap", "time since the last use", true),
    life: histogram("life", "time in the cache"), ago: histogram("ago", "time since the eviction"),
  };
  const charts = [...document.querySelectorAll("[data-chart]")]
    .map((figure) => new Chart(figure, SPECS[figure.dataset.chart]));
  const draw = () => charts.forEach((chart) => chart.draw());

  const button = document.getElementById("theme");
  const dressed = () => {
    button.textContent = dark() ? "Light" : "Dark";
    button.setAttribute("aria-label", `Show it ${dark() ? "light" : "dark"}`);
    draw();
  };
  button.hidden = false;
  button.addEventListener("click", () => {
    root.dataset.theme = dark() ? "light" : "dark";
    dressed();
  });
  systemDark.addEventListener("change", dressed);
  for (const name of ["capacity", "percentile"]) {
    const choice = document.getElementById(name);
    if (choice) choice.addEventListener("change", draw);
  }
  dressed();
})();
