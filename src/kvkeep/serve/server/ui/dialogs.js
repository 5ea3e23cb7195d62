// The one dialog of the page. The browser keeps the focus in it and gives it back; Escape closes.

import {byId, el, say} from "./dom.js";

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

// Ask for confirmation: the button calls `act()`, and an error of it is shown.
export const confirm = (title, sentences, button, act, {grave = false, fields = []} = {}) => {
  const said = el("p", {class: "wrong", role: "alert"});
  const yes = el("button", {type: "submit", class: grave ? "grave" : "main"}, button);
  const no = el("button", {type: "button", on: {click: close}}, "Cancel");
  const form = el("form", {class: "asked"}, sentences.map((one) => el("p", {}, one)), fields, said,
    el("div", {class: "buttons"}, no, yes));
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    yes.disabled = true;
    try {
      await act();
      close();
    } catch (error) {
      say(said, error.message);
      yes.disabled = false;
    }
  });
  open(title, form, {kind: "small"});
  (fields.length ? fields[0].querySelector("input, select, textarea") : no)?.focus();
};
