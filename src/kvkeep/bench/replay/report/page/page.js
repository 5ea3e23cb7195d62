// The charts of a report of `kvkeep replay`.
"use strict";

const COLOURS = 8;
const places = new Map(data.policies.map((line, at) => [line.name, at]));
const painted = (name) => {
  const at = places.get(name);
  if (at === undefined) return {colour: colour("bound"), dash: [6, 4], width: 1.25, behind: true};
  return {colour: colour(`c${at % COLOURS}`), dash: at < COLOURS ? undefined : [10, 3]};
};

// Put series of [x, y] on a common x; null where a series has no point.
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

// Draw a line wider if later lines cover it, so that it stays visible.
const uncovered = (series) => {
  const lines = series.filter((one) => one.points);
  const all = Math.max(...lines.flatMap((one) => one.values));
  lines.forEach((one, at) => {
    const covers = lines.slice(at + 1).filter((other) => one.values.every((value, place) =>
      value === null || Math.abs(value - other.values[place]) < 0.006 * all));
    one.width = 2 + 3 * covers.length;
  });
};

const byCapacity = (figure, yText, extra) => {
  const lines = data.policies.map((line) => ({
    name: line.name, points: true, ...painted(line.name),
    rows: line.points.map((one) => [one.capacity, figure(one)]).filter((row) => row[1] != null),
  }));
  const series = [...extra, ...lines].filter((one) => one.rows.length);
  const capacities = joined(series);
  uncovered(series);
  const ticks = [...new Set(series.filter((one) => one.points).flatMap((one) =>
    one.rows.map((row) => row[0])))].sort((a, b) => a - b);
  return {
    x: capacities.map(Math.log2), xPad: 0.04, xName: "capacity", xLabel: "capacity, tokens",
    yText, yTick: yText, series,
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

const times = (name, choice) => () => {
  const chosen = document.getElementById(choice).value;
  const spec = byCapacity((one) => one[name] && one[name][chosen], seconds, []);
  const found = spec.series.flatMap((one) => one.values).filter((value) => value !== null);
  spec.yLog = Math.min(...found) > 0 && Math.max(...found) > 20 * Math.min(...found);
  if (spec.yLog) spec.yTick = (value) => (value < 1 ? `${short(1000 * value)} ms` : `${value} s`);
  return spec;
};

// Each point has its own row, as two points may have the same hit rate.
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
    yText: money, yTick: (value) => data.currency + short(value),
  };
};

const chosenDetails = () => {  // bounds first, below the other lines
  const all = data.details[document.getElementById("capacity").value] || [];
  return [...all].sort((a, b) => places.has(a.name) - places.has(b.name));
};

const STEPS = [1, 2, 5, 10, 15, 30, ...[1, 2, 5, 10, 15, 30].map((n) => n * MINUTE),
  ...[1, 2, 3, 6, 12].map((n) => n * HOUR), ...[1, 2, 7, 14, 30, 90].map((n) => n * DAY)];
const time = () => {
  const series = chosenDetails().map((one) => (
    {name: one.name, width: 1.5, ...painted(one.name), rows: one.time}));
  if (data.infinite) {
    series.unshift(
      {name: "infinite", ...painted("infinite"), dash: [2, 4], rows: data.infinite.time});
  }
  const x = joined(series);
  return {
    x, series, xName: "until", xLabel: "since the trace began",
    xText: (at) => `at ${seconds(x[at])}`, yText: share,
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

const MOMENTS = [0.001, 0.004, 0.015, 0.0625, 0.25, 1, 4, 15, MINUTE, 4 * MINUTE, 15 * MINUTE,
  HOUR, 4 * HOUR, 12 * HOUR, DAY, 4 * DAY, 20 * DAY];
// The first step counts all durations up to `lowest`.
const histogram = (field, xLabel, lowest, all) => () => {
  const closed = (rows) => {  // the end of the last step
    const [from] = rows[rows.length - 1];
    return [...rows, [+(from * 2 ** 0.25).toPrecision(5), 0]];
  };
  const series = chosenDetails().filter((one) => one[field].length).map((one) => (
    {name: one.name, stepped: true, width: 1.5, ...painted(one.name), rows: closed(one[field])}));
  if (all && data.infinite && data.infinite[field].length) {
    series.unshift({name: "infinite", stepped: true, ...painted("infinite"), dash: undefined,
      width: 1, fill: colour("shade"), rows: closed(data.infinite[field])});
  }
  const from = joined(series);
  return {
    x: from.map(Math.log2), series, xName: "time", xPad: 0.01, xLabel,
    xText: (at) => (from[at] <= lowest ? `up to ${seconds(from[at] * 2 ** 0.25)}` :
      `from ${seconds(from[at])}`), yText: tokens, yTick: tokens,
    xTicks: () => MOMENTS.map((at) => [Math.log2(at), at <= lowest ? "0" : moment(at)]),
  };
};

const SPECS = {
  rates, ttft: times("ttft", "percentile"), jobs: times("jobs", "job-percentile"), cost, time, gap: histogram("gap", "time since the last use", 2 ** -4, true),
  life: histogram("life", "time in the cache", 2 ** -4),
  ago: histogram("ago", "time since the eviction", 2 ** -4),
  wait: histogram("wait", "time to the first token", 2 ** -14),
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
for (const name of ["capacity", "percentile", "job-percentile"]) {
  const choice = document.getElementById(name);
  if (choice) choice.addEventListener("change", draw);
}
dressed();
