// Numbers for people. A number and its unit stay on one line.

const MINUTE = 60, HOUR = 3600, DAY = 86400;
const NB = "\u00a0";

const short = (value) =>
  Math.abs(value) >= 100 ? Math.round(value).toLocaleString("en") : String(+value.toPrecision(3));

export const whole = (value) => Math.round(value).toLocaleString("en");
export const amount = (value) =>
  value >= 999.5e6 ? `${short(value / 1e9)}${NB}G`
    : value >= 999500 ? `${short(value / 1e6)}${NB}M`
      : value >= 9999.5 ? `${short(value / 1e3)}${NB}k` : whole(value);
export const tokens = (value) => `${amount(value)}${NB}${value === 1 ? "token" : "tokens"}`;
export const many = (value, one, more = `${one}s`) =>
  `${amount(value)}${NB}${value === 1 ? one : more}`;
export const share = (value) => (value > 0 && value < 0.0005 ? `<${NB}0.1${NB}%`
  : `${(100 * value).toFixed(value > 0 && value < 0.0095 ? 1 : 0)}${NB}%`);
export const bytes = (value) => {
  for (const [size, unit] of [[2 ** 40, "TiB"], [2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"]]) {
    if (value >= size) return `${short(value / size)}${NB}${unit}`;
  }
  return `${Math.round(value)}${NB}B`;
};
export const seconds = (value) => {
  for (const [size, unit] of [[DAY, "days"], [HOUR, "h"], [MINUTE, "min"]]) {
    if (value >= 1.5 * size) return `${short(value / size)}${NB}${unit}`;
  }
  return value < 1 ? `${short(1000 * value)}${NB}ms` : `${short(value)}${NB}s`;
};
// How long ago, coarsely.
export const ago = (value) => {
  if (value < 1.5) return "just now";
  for (const [size, unit] of [[DAY, "days"], [HOUR, "h"], [MINUTE, "min"]]) {
    if (value >= 1.5 * size) return `${Math.round(value / size)}${NB}${unit}${NB}ago`;
  }
  return `${Math.round(value)}${NB}s${NB}ago`;
};
export const running = (value) => {
  const parts = [[DAY, "d"], [HOUR, "h"], [MINUTE, "min"]]
    .map(([size, unit], at, all) => [Math.floor((at ? value % all[at - 1][0] : value) / size), unit])
    .filter(([number]) => number).slice(0, 2);
  return parts.length ? parts.map(([number, unit]) => `${number}${NB}${unit}`).join(" ")
    : `${Math.floor(value)}${NB}s`;
};

// The names shown for the API's sources and reasons.
export const REASONS = {
  __proto__: null,
  diverged: "differs",
  evicted: "evicted",
  not_admitted: "not cached",
  tier_unavailable: "tier unavailable",
  damaged: "damaged",
  other_namespace: "other namespace",
  not_resumable: "no state there",
  not_loaded: "faster to compute",
  computing: "being computed",
  page_remainder: "rest of a page",
  last_token: "last token",
  new: "never seen",
};
export const sourceName = (source) => (source === "pool" ? "pool" : `tier ${source}`);
export const tenantName = (salt) => (salt ? salt : "(no salt)");
// Instead of what an endpoint or a field of an answer would say.
export const UNTOLD = "Not told by this server.";
