// The tree of a /kv/map response, and where its nodes are drawn. Nothing here touches the page.

import {amount, many, tokens} from "./words.js";

// The tree of a response: {nodes: Map id → node, tops: nodes without a parent}. A node has the
// server's fields, `up`, `children` (largest first, hidden ones last) and `level`.
export const grow = (answer) => {
  const nodes = new Map(answer.nodes.map((one) => [one.id, {...one, up: null, children: []}]));
  const tops = [];
  for (const node of nodes.values()) {
    node.up = nodes.get(node.parent) || null;
    (node.up ? node.up.children : tops).push(node);
  }
  const order = (a, b) => Boolean(a.hidden) - Boolean(b.hidden)
    || b.subtree_tokens - a.subtree_tokens || a.id - b.id;
  tops.sort(order);
  const level = (list, depth) => {
    let rest = list.map((node) => [node, depth]);
    while (rest.length) {
      rest = rest.flatMap(([node, at]) => {
        node.level = at;
        node.children.sort(order);
        return node.children.map((child) => [child, at + 1]);
      });
    }
  };
  level(tops, 0);
  return {...answer, nodes, tops};
};

// Rectangles of an icicle in shares of the width: [{node, left, width, row, siblings, place}], row by
// row, left to right. Siblings narrower than `least` are drawn as one, together with the server's
// own hidden node; rows below `rows` are left out. A node is `cut` if nothing below it is drawn.
export const icicle = (tops, least, rows) => {
  const found = [];
  const whole = tops.reduce((sum, one) => sum + one.subtree_tokens, 0) || 1;
  let line = [{children: tops, left: 0, width: 1, tokens: whole, node: null, row: -1}];
  while (line.length) {
    const next = [];
    for (const box of line) {
      const below = box.children.reduce((sum, one) => sum + one.subtree_tokens, 0);
      const scale = box.width / (Math.max(box.tokens, below) || 1);
      const drawn = box.row + 1 >= rows ? [] : merged(box.children, least / scale, box.node);
      let left = box.left;
      drawn.forEach((node, at) => {
        const width = node.subtree_tokens * scale;
        next.push({node, left, width, row: box.row + 1, children: node.children,
          tokens: node.subtree_tokens, place: at + 1, siblings: drawn.length});
        left += width;
      });
      if (box.node) box.node.cut = box.children.length > 0 && !drawn.length;
    }
    found.push(...next);
    line = next;
  }
  return {boxes: found, rows: found.reduce((most, one) => Math.max(most, one.row + 1), 0)};
};

// `nodes`, with those of fewer than `least` tokens and the hidden one combined at the end.
const merged = (nodes, least, up) => {
  const large = nodes.filter((one) => !one.hidden && one.subtree_tokens >= least);
  const rest = nodes.filter((one) => one.hidden || one.subtree_tokens < least);
  const tokens = rest.reduce((sum, one) => sum + one.subtree_tokens, 0);
  if (!rest.length || tokens < least) return large;
  if (rest.length === 1) return [...large, rest[0]];
  const sum = (name) => rest.reduce((all, one) => all + (one[name] || 0), 0);
  return [...large, {...rest[0], id: `rest of ${up ? up.id : "all"}`, hidden: true, up, children: [],
    tokens, subtree_tokens: tokens, pages: undefined, hits: sum("hits"), pins: sum("pins"),
    references: sum("references"), text: null,
    subtree_nodes: sum("subtree_nodes"), count: rest.reduce((all, one) => all + (one.count || 1), 0)}];
};

// --- colours: classes h0 (cold) to h5 (hot), in bands with names ----------------------

const HITS = [[0, "none"], [1, "1"], [5, "2–5"], [20, "6–20"], [100, "21–100"]];
const STATES = [["h0", "not in use"], ["h3", "held by a request"], ["h5", "pinned"]];

export const COLOURS = {
  hits: {
    of: (node) => {
      const band = HITS.findIndex(([most]) => (node.hits || 0) <= most);
      return `h${band < 0 ? 5 : band}`;
    },
    legend: () => [...HITS.map(([, text], at) => [`h${at}`, text]), ["h5", "more hits"]],
  },
  state: {
    of: (node) => (node.pins ? "h5" : node.references ? "h3" : "h0"),
    legend: () => STATES,
  },
};

// --- words -------------------------------------------------------------------------------------

// A namespace's node is above all its runs; its text is the cache_salt.
export const isSpace = (node) => node.id < 0 && !node.hidden;
export const titleOf = (node) => {
  if (node.hidden) return `${many(node.count || 0, "smaller branch", "smaller branches")}`;
  if (isSpace(node)) return node.text ? `tenant ${node.text}` : "without a salt";
  return node.text === null || node.text === undefined ? `prompt of ${tokens(node.tokens)}` : node.text;
};
export const figuresOf = (node) => [
  tokens(node.subtree_tokens),
  node.hits === null || node.hits === undefined ? "" : many(node.hits, "hit"),
  node.pins ? "pinned" : node.references ? many(node.references, "reference") : "",
].filter(Boolean);
export const sizeOf = (node) => amount(node.subtree_tokens);
