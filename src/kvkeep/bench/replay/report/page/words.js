// Figures as people read them, as in words.py, and the current colours of the page.
"use strict";

const data = JSON.parse(document.getElementById("data").textContent);
const root = document.documentElement;
const MINUTE = 60, HOUR = 3600, DAY = 86400;

const short = (value) =>
  value >= 100 ? Math.round(value).toLocaleString("en") : String(+value.toPrecision(3));
const tokens = (value) =>
  value >= 999500 ? `${short(value / 1e6)} M`
    : value >= 999.5 ? `${short(value / 1e3)} k` : String(Math.round(value));
const share = (value) => `${(100 * value).toFixed(1)} %`;
const money = (value) => {
  const digits = value < 100 ? 2 : 0;
  return data.currency + value.toLocaleString("en",
    {minimumFractionDigits: digits, maximumFractionDigits: digits});
};
const seconds = (value) => {
  for (const [size, unit] of [[DAY, "days"], [HOUR, "h"], [MINUTE, "min"]]) {
    if (value >= 1.5 * size) return `${short(value / size)} ${unit}`;
  }
  return value && value < 1 ? `${short(1000 * value)} ms` : `${short(value)} s`;
};
const brief = (value) => (value === 1 || value % 1 === 0 ? String(value) : short(value));
const moment = (value) => {  // a round time, for an axis
  if (value < 1) return `${1000 * value} ms`;
  const [size, unit] = value >= DAY ? [DAY, "d"] : value >= HOUR ? [HOUR, "h"]
    : value >= MINUTE ? [MINUTE, "min"] : [1, "s"];
  return `${brief(value / size)} ${unit}`;
};

const probe = document.createElement("span");
probe.hidden = true;
document.body.append(probe);
const colour = (name) => {
  probe.style.color = `var(--${name})`;
  return getComputedStyle(probe).color;
};
const systemDark = matchMedia("(prefers-color-scheme: dark)");
const dark = () => (root.dataset.theme || (systemDark.matches ? "dark" : "light")) === "dark";
