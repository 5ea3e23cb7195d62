// Asking again and again, as little as can be: only while the page is seen and the part of it that
// the answer is for, later after errors, and less often where answers take long.

import {Refused} from "./api.js";

const LONGEST_MS = 30000;
const OFF_MS = 60000;  // what the server does not have, it may have after a restart
const REST = 4;  // times what the last answer took

const all = new Set();
let stopped = false;  // by the person, or for want of a key

// `load()` asks, `show(answer)` draws; `failed(error, seconds until the next try)` says so.
// `element`: asked only while it is on or near the screen; without one, always. `ready`: a promise
// that is waited for first.
export class Poll {
  constructor({every, load, show, failed, element = null, ready = null}) {
    Object.assign(this, {every, load, show, failed, element, ready});
    this.seen = element === null;
    this.failures = 0;
    this.timer = null;
    this.asking = false;
    this.again = false;
    all.add(this);
    if (element) {
      new IntersectionObserver(([...entries]) => {
        this.seen = entries[entries.length - 1].isIntersecting;
        if (this.seen) this.now();
      }, {rootMargin: "200px"}).observe(element);
    }
  }

  // Ask at once, unless nobody would see it.
  async now() {
    clearTimeout(this.timer);
    if (stopped || document.hidden || !this.seen) return;
    if (this.asking) {
      this.again = true;
      return;
    }
    this.asking = true;
    await this.ready;
    const begun = performance.now();
    let wait, draw;
    try {
      const answer = await this.load();
      this.failures = 0;
      wait = Math.max(this.every, REST * (performance.now() - begun));
      draw = () => this.show(answer);
    } catch (error) {
      wait = this.wait(error);
      draw = () => this.failed(error, wait / 1000);
    }
    this.asking = false;
    try {
      draw();
    } catch (error) {
      reportError(error);  // ours: the next answer may do better
    }
    if (this.again) {
      this.again = false;
      this.now();
    } else {
      this.timer = setTimeout(() => this.now(), wait);
    }
  }

  wait(error) {
    if (error instanceof Refused && error.status === 404) return OFF_MS;
    this.failures += 1;
    return Math.min(LONGEST_MS, this.every * 2 ** this.failures);
  }
}

// One of them: what came too late to be shown is not shown.
export const latest = () => {
  let number = 0;
  return async (load, show) => {
    const own = ++number;
    const answer = await load();
    if (own === number) show(answer);
  };
};

export const wake = () => all.forEach((one) => one.now());
export const stop = (value) => {
  stopped = value;
  if (!value) wake();
};
export const isStopped = () => stopped;

document.addEventListener("visibilitychange", () => {
  if (!document.hidden) wake();
});
