"""The output of ``kvkeep tree URL``, as lines of `rich` without markup."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.text import Text

from kvkeep.cli.client import entries, text, whole
from kvkeep.cli.drawing import amount, plural
from kvkeep.cli.lines import fit

if TYPE_CHECKING:
    from collections.abc import Mapping

    Object = Mapping[str, Any]

__all__ = ["tree"]


def tree(said: Object, width: int, depth: int) -> list[Text]:
    """Return a line for each node: its size and hits, indented below its parent."""
    nodes = entries(said, "nodes")
    size = whole(said, "page_size")
    top = Text(plural(whole(said, "total_nodes"), "node"), "bold")
    top.append(f", {plural(whole(said, 'total_pages'), 'page')} of {plural(size, 'token')}")
    if not nodes:
        return [top, Text("nothing is cached")]
    head = Text(" below    own  pages   hits  node", "bold reverse", no_wrap=True, end="")
    lines = [top, fit(head, width)]
    below: dict[object, list[Object]] = {}
    ids = {_id(node) for node in nodes}
    for node in nodes:
        parent = node.get("parent")
        # A node whose parent is not in the reply is drawn as a root, so that none is lost.
        known = type(parent) is int and parent in ids and parent != _id(node)
        below.setdefault(parent if known else None, []).append(node)
    for children in below.values():
        children.sort(key=lambda n: (n.get("hidden") is True, -whole(n, "subtree_tokens")))
    # A stack instead of recursion: a reply may be 1,000 levels deep, or have a cycle, which is
    # never reached from a root.
    stack = [(node, "", 0) for node in reversed(below.get(None, []))]
    while stack:
        node, guide, level = stack.pop()
        children = below.pop(_id(node), [])
        cut = level + 1 >= depth and children
        lines.append(_node(node, guide, width, sum(_node_count(c) for c in children) if cut else 0))
        if cut:
            continue
        inner = guide.replace("├─ ", "│  ").replace("└─ ", "   ")
        last = len(children) - 1
        stack += reversed(
            [
                (child, inner + ("└─ " if at == last else "├─ "), level + 1)
                for at, child in enumerate(children)
            ]
        )
    return lines


def _id(node: Object) -> object:
    found = node.get("id")
    return found if type(found) is int else None


def _node_count(node: Object) -> int:
    """Return the number of nodes that ``node`` stands for, including all below it."""
    return max(whole(node, "subtree_nodes"), whole(node, "count"), 1)


def _node(node: Object, guide: str, width: int, left_out: int) -> Text:
    hidden = node.get("hidden") is True
    line = Text(no_wrap=True, end="")
    line.append(f"{amount(whole(node, 'subtree_tokens')):>6} ", "dim" if hidden else "bold")
    line.append(f"{amount(whole(node, 'tokens')):>6} {amount(whole(node, 'pages')):>6} ")
    line.append(f"{amount(whole(node, 'hits')):>6}")
    # Deep nodes show only the nearest levels, to leave room for the text.
    near = guide if len(guide) <= width // 3 else f"… {guide[-(width // 3) :]}"
    line.append(f"  {near}", "dim")
    if hidden:
        line.append(f"… {plural(max(whole(node, 'count'), 1), 'smaller one')}", "dim italic")
        return fit(line, width)
    marks = []
    if references := whole(node, "references"):
        marks.append((f" · {plural(references, 'ref')}", "green"))
    if whole(node, "pins"):
        marks.append((" · pinned", "magenta"))
    if left_out:
        marks.append((f" · … {left_out:,} below", "dim italic"))
    tail = Text(end="")
    for words, style in marks:
        tail.append(words, style)
    identity = _id(node)
    if type(identity) is int and identity >= 0:
        line.append(f"{identity} ", "dim")
    room = width - line.cell_len - tail.cell_len
    nameless = "(no cache_salt)" if node.get("text") == "" else "(no text)"
    label = Text(text(node, "text") or nameless, "cyan", no_wrap=True, end="")
    label.truncate(max(room, 8), overflow="ellipsis")
    return fit(line.append_text(label).append_text(tail), width)
