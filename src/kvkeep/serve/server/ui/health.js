// The state of a tier, in a colour and in words: the tile and the table say the same.

import {shown} from "./dom.js";
import {UNTOLD, amount, bytes, many, share} from "./words.js";

const WORDS = {
  __proto__: null,
  errors: "calls failed", late: "reads late", damaged: "records damaged", dropped: "writes dropped",
};
const listed = (words) => (words.length > 1 ? `${words.slice(0, -1).join(", ")} and ${words.at(-1)}`
  : words.join(""));
const calls = (tier, state) => Object.entries(tier.breakers || {})
  .filter(([, one]) => one === state).map(([call]) => shown(call));

// [good, fair or bad; words].
export const health = (tier, losses) => {
  if (!tier.breaker) return ["fair", UNTOLD];
  if (tier.breaker === "open") {
    const failed = calls(tier, "open");
    return ["bad", `failed: ${failed.length ? `no ${listed(failed)} calls` : "not asked"} for now`];
  }
  if (tier.breaker !== "closed") return ["fair", "failed, being tried again"];
  const parts = Object.keys(tier.parts || {}).length;
  if (parts) return ["fair", `${many(parts, "node")} not asked: failed`];
  const lately = (losses || []).filter((one) => one.place === tier.name && one.what in WORDS
    && one.minute);
  return lately.length ? ["fair", `${listed(lately.map((one) =>
    `${amount(one.minute)} ${WORDS[one.what]}`))} in the last minute`] : ["good", "works"];
};
export const fill = (tier) => {
  if (tier.used_bytes === null || tier.used_bytes === undefined) return "fill unknown";
  return tier.capacity ? `${share(tier.used_bytes / tier.capacity)} full`
    : `${bytes(tier.used_bytes)} used`;
};
