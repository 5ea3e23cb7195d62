// The one dialog of the page. The browser keeps the focus in it and gives it back; Escape closes.

import {byId, say} from "./dom.js";

const dialog = byId("dialog");
let closed = null;

byId("dialog-close").addEventListener("click", () => dialog.close());
dialog.addEventListener("click", (event) => {
  if (event.target === dialog) dialog.close();  // a click beside the dialog
});
dialog.addEventListener("close", () => {
  byId("dialog-body").replaceChildren();
  const then = closed;
  closed = null;
  then?.();
});

export const isOpen = () => dialog.open;
export const close = () => dialog.close();

// Show `body` under `title`, replacing the present content. `kind` is a class; `after` is called
// when the dialog closes.
export const open = (title, body, {kind = "", after = null} = {}) => {
  say(byId("dialog-title"), title);
  byId("dialog-body").replaceChildren(...[body].flat());
  dialog.className = kind;
  closed = after;
  if (!dialog.open) dialog.showModal();
  dialog.scrollTop = 0;
};
