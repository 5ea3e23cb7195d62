// Polling, as little as possible: only while the page and the part concerned are visible, with
// backoff after errors, and less often if responses take long.

import {Refused} from "./api.js";

const LONGEST_MS = 30000;
const OFF_MS = 60000;  // an endpoint that is off may be on after a restart
const REST = 4;  // times the duration of the last request

const all = new Set();
let stopped = false;  // by the user, or for want of an API key

// `load()` requests, `show(answer)` draws, `failed(error, seconds until the next try)` reports.
// `element`: poll only while it is on or near the screen; without one, always. `ready`: a promise
// to await first.
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

  // Poll at once, unless the result would not be visible.
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
      reportError(error);  // a bug of ours: the next response may not trigger it
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

export const wake = () => all.forEach((one) => one.now());
export const stop = (value) => {
  stopped = value;
  if (!value) wake();
};
export const isStopped = () => stopped;

document.addEventListener("visibilitychange", () => {
  if (!document.hidden) wake();
});
