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

// A line through `values`, null where there is none; from zero to its largest, or `most`.
export const spark = (host, values, most = null) => {
  const top = most ?? Math.max(...values.filter((one) => one !== null), 0);
  const step = 100 / Math.max(1, values.length - 1);
  let path = "", open = false, last = 0;
  const areas = [];
  const end = () => {
    if (open) areas.push(`${path.slice(path.lastIndexOf("M"))}V30H${areas.from}Z`);
  };
  values.forEach((value, at) => {
    if (value === null) {
      end();
      open = false;
      return;
    }
    const x = (at * step).toFixed(2), y = (28 - 25 * (top ? value / top : 0)).toFixed(2);
    if (!open) areas.from = x;
    path += `${open ? "L" : "M"}${x} ${y}`;
    open = true;
    last = x;
  });
  end();
  host.replaceChildren(svg("path", {class: "area", d: areas.join("") || "M0 0"}),
    svg("path", {class: "line", d: path || "M0 0"}));
  return last;
};
