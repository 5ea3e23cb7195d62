// Values over time. Where answers are missing, and where the server began anew, there is a gap.

const FEW_S = 3.5;  // longer without an answer is a gap, however seldom answers come otherwise

const all = new Set();

// The values of the last `span` seconds; null where there is none.
export class Series {
  constructor(span) {
    Object.assign(this, {span, points: [], broken: false});
    all.add(this);
  }

  add(at, value) {
    const last = this.points.at(-1);
    if (last && at <= last[0]) return;  // the answer that was already drawn
    const before = this.points.at(-2);
    const usual = last && before && before[1] !== null ? last[0] - before[0] : 0;
    if (this.broken || (last && at - last[0] > Math.max(FEW_S, 3 * usual))) {
      if (last) this.points.push([last[0] + 1e-6, null]);
    }
    this.broken = false;
    this.points.push([at, value]);
    while (this.points[0][0] < at - this.span) this.points.shift();
  }
}

// From here on something is missing: no line leads over it.
export const breakAll = () => all.forEach((one) => {
  one.broken = true;
});
// The server began anew: what was before is of another.
export const clearAll = () => all.forEach((one) => {
  one.points = [];
});
