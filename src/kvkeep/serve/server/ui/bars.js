// Small drawings: bars of parts, and lines without axes. Colours are classes of the style.

import {el, svg} from "./dom.js";

const WIDE = 1000;

// Draw `parts` [{amount, kind}] beside each other into `host`, an <svg> of 1000 by 10.
export const fillBar = (host, parts, whole = null) => {
  const total = whole ?? parts.reduce((sum, one) => sum + one.amount, 0);
  let left = 0;
  host.replaceChildren(...parts.filter((one) => one.amount > 0 && total > 0).map((one) => {
    const width = WIDE * Math.min(1, one.amount / total);
    const rect = svg("rect", {class: `p-${one.kind}`, x: left.toFixed(2), y: 0, width: width.toFixed(2),
      height: 10});
    left += width;
    return rect;
  }));
};
export const bar = (parts, whole = null) => {
  const host = svg("svg", {class: "stack", viewBox: `0 0 ${WIDE} 10`, preserveAspectRatio: "none",
    "aria-hidden": "true"});
  fillBar(host, parts, whole);
  return host;
};

export const swatch = (kind) =>
  svg("svg", {class: "swatch", viewBox: "0 0 10 10", "aria-hidden": "true"},
    svg("rect", {class: `p-${kind}`, width: 10, height: 10}));
export const keyItem = (kind, ...text) => el("li", {}, swatch(kind), ...text);

// A line through `points` [time, value or null], from the time `from` to `to`, from zero to the
// largest value or `most`. No line leads over null; a value alone is a dot.
export const spark = (host, points, {from, to, most = null}) => {
  const top = most ?? Math.max(...points.map(([, value]) => value ?? 0), 0);
  const scale = 100 / Math.max(1e-3, to - from);
  const runs = [];
  let run = null;
  for (const [at, value] of points) {
    if (value === null) run = null;
    else {
      if (!run) runs.push(run = []);
      run.push([(scale * (at - from)).toFixed(2), (28 - 25 * (top ? value / top : 0)).toFixed(2)]);
    }
  }
  const line = (one) => `M${one.map(([x, y]) => `${x} ${y}`).join("L")}${one.length > 1 ? "" : "h0"}`;
  host.replaceChildren(
    svg("path", {class: "area", d: runs.map((one) =>
      `${line(one)}V30H${one[0][0]}Z`).join("") || "M0 0"}),
    svg("path", {class: "line", d: runs.map(line).join("") || "M0 0"}));
};
