// Lets the search work from a folder. On file:// browsers refuse workers, in which the theme
// searches, so a hidden frame runs the same script in the place of a worker.
if (location.protocol === "file:") {
  window.Worker = window.IFrameWorker = class IFrameWorker extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.appendChild(frame);
      const inside = frame.contentWindow, page = frame.contentDocument;
      const load = (src) => new Promise((loaded, failed) => {
        const script = page.createElement("script");
        script.onload = loaded;
        script.onerror = () => failed(new Error(`cannot load ${src}`));
        script.src = src;
        page.body.appendChild(script);
      });
      inside.importScripts = async (...urls) => {
        for (const src of urls) await load(src);
      };
      inside.postMessage = (data) => queueMicrotask(
        () => this.dispatchEvent(new MessageEvent("message", {data})));
      // Messages wait until the script listens.
      const ready = load(url);
      this.postMessage = (data) => ready.then(
        () => inside.dispatchEvent(new inside.MessageEvent("message", {data})));
      this.terminate = () => frame.remove();
    }
  };
}
