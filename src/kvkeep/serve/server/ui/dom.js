// Elements, and text from clients. Everything from a server goes through `textContent` here:
// nothing in this page is ever parsed as HTML.

export const byId = (id) => document.getElementById(id);

// Characters that act instead of showing: control characters, marks and overrides of direction,
// characters without width, lone surrogates. The server replaces them too; twice does no harm.
const ACTS = new RegExp(
  "[\\u0000-\\u001f\\u007f-\\u009f\\u00ad\\u061c\\u180e\\u200b\\u200e\\u200f\\u2028-\\u202e"
  + "\\u2060-\\u206f\\ufeff\\ufff9-\\ufffb\\ud800-\\udfff\\u{e0000}-\\u{e007f}]", "gu");
export const shown = (text) => String(text).replace(ACTS, (one) => {
  const code = one.codePointAt(0);
  if (code < 0x20) return String.fromCharCode(0x2400 + code);
  if (code === 0x7f) return "\u2421";
  return code < 0x10000 ? `\\u${code.toString(16).padStart(4, "0")}`
    : `\\U${code.toString(16).padStart(8, "0")}`;
});

const SVG = "http://www.w3.org/2000/svg";
const fill = (node, attributes, children) => {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "on") {
      for (const [event, listener] of Object.entries(value)) node.addEventListener(event, listener);
    } else {
      node.setAttribute(name, value === true ? "" : String(value));
    }
  }
  node.append(...children.flat().filter((one) => one !== null && one !== undefined && one !== false));
  return node;
};

// el("p", {class: "note"}, "text", other): an element; text among its children stays text.
export const el = (tag, attributes = {}, ...children) =>
  fill(document.createElement(tag), attributes, children);
export const svg = (tag, attributes = {}, ...children) =>
  fill(document.createElementNS(SVG, tag), attributes, children);

// Text from clients, with a text direction of its own.
export const theirs = (text, attributes = {}) => el("bdi", attributes, shown(text));

// Change a text only if it differs, so that screen readers and selections are not disturbed.
export const say = (node, text) => {
  if (node.textContent !== text) node.textContent = text;
};

export const hide = (node, hidden) => {
  if (node.hidden !== hidden) node.hidden = hidden;
};

// The children of `parent`, one for each of `items`, kept where their key is the same: focus,
// selection and scrolling survive. `make(item)` makes one, `update(node, item)` fills it.
export const keyed = (parent, items, key, make, update) => {
  const old = new Map([...parent.children].map((node) => [node.dataset.key, node]));
  const names = items.map((item) => String(key(item)));
  const stays = new Set(names);
  for (const [name, node] of old) {
    if (!stays.has(name)) node.remove();
  }
  const focus = parent.contains(document.activeElement) ? document.activeElement : null;
  let at = parent.firstElementChild;
  items.forEach((item, place) => {
    let node = old.get(names[place]);
    if (node === undefined) {
      node = make(item);
      node.dataset.key = names[place];
    }
    update(node, item);
    if (node === at) at = at.nextElementSibling;
    else parent.insertBefore(node, at);
  });
  // A moved element loses the focus.
  if (focus?.isConnected && focus !== document.activeElement) focus.focus({preventScroll: true});
};
