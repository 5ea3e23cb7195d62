"""/kv/map and /kv/map/{id}: the tree of a real server, looked at."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.model

COMPLETIONS = "/v1/completions"
HEAD = "You are a helpful assistant. Answer in one short sentence, and be polite about it. " * 2
ASKED = (HEAD + "What does textwrap.dedent do?" * 3, HEAD + "Why is the sky blue, says who?" * 3)


def complete(server, prompt, **fields):
    asked = {"prompt": prompt, "max_tokens": 1, "temperature": 0, **fields}
    return server.http.post(COMPLETIONS, json=asked).raise_for_status()


def the_map(server, **query):
    return server.http.get("/kv/map", params=query).raise_for_status().json()


@pytest.fixture
def planted(server):
    """Two prompts that begin alike, one of them asked for again, and one of another tenant."""
    server.http.post("/kv/clear", json={}).raise_for_status()
    for prompt in (*ASKED, ASKED[0]):
        complete(server, prompt)
    complete(server, ASKED[0], cache_salt="tenant\u202e-1")
    return server


def of_salt(answer, salt):
    (top,) = [node for node in answer["nodes"] if node["id"] < 0 and node["text"] == salt]
    return top, [node for node in answer["nodes"] if node["parent"] == top["id"]]


def test_the_map_shows_what_is_shared(planted):
    answer = the_map(planted)
    tokens = [planted.engine.tokenizer.encode(prompt) for prompt in ASKED]
    alike = next(i for i, (a, b) in enumerate(zip(*tokens, strict=False)) if a != b)
    top, (head,) = of_salt(answer, "")
    assert (head["text"], head["hidden"]) == (HEAD[:80], False)
    assert head["tokens"] == head["pages"] * 16 == alike // 16 * 16
    ends = [node for node in answer["nodes"] if node["parent"] == head["id"]]
    assert len(ends) == 2
    assert head["subtree_tokens"] == head["tokens"] + sum(node["subtree_tokens"] for node in ends)
    runs = list(planted.engine.cache.runs(planted.service.namespace(None)))
    assert top["subtree_nodes"] == head["subtree_nodes"] == len(runs)
    assert top["subtree_tokens"] == 16 * sum(len(run.pages) for run in runs)
    assert head["hits"] == 2
    assert sorted(node["hits"] for node in ends) == [0, 1]
    _, (other,) = of_salt(answer, "tenant\\u202e-1")
    assert answer["total_pages"] == top["subtree_tokens"] // 16 + other["pages"]
    assert answer["total_pages"] == sum(node["pages"] for node in answer["nodes"])
    assert answer["total_nodes"] == len(runs) + 1


def test_one_tenant_or_one_branch_alone(planted):
    answer = the_map(planted, namespace="tenant\u202e-1")
    (run,) = answer["nodes"]
    assert run["parent"] is None
    assert answer["total_pages"] == run["pages"]
    assert the_map(planted, namespace="nobody")["nodes"] == []
    top, (head,) = of_salt(the_map(planted), "")
    below = the_map(planted, root=head["id"])
    assert [node["parent"] for node in below["nodes"]][:3] == [None, head["id"], head["id"]]
    assert below["total_nodes"] == head["subtree_nodes"]
    space = the_map(planted, root=top["id"])
    assert space["nodes"][0]["id"] == top["id"]
    assert space["total_nodes"] == head["subtree_nodes"]


def test_small_siblings_are_summed_up(planted):
    answer = the_map(planted, nodes=1)
    assert [node["hidden"] for node in answer["nodes"]] == [False, True, True]
    assert {node["text"] for node in answer["nodes"] if node["hidden"]} == {None}
    assert sum(node["pages"] for node in answer["nodes"]) == answer["total_pages"]
    (below,) = [node for node in answer["nodes"] if node["hidden"] and node["parent"] is not None]
    assert (below["count"], below["subtree_nodes"]) == (1, answer["total_nodes"] - 1)
    hidden = planted.http.get(f"/kv/map/{below['id']}")
    assert hidden.status_code == 404


def test_one_node(planted):
    _, (head,) = of_salt(the_map(planted), "")
    known = planted.http.get(f"/kv/map/{head['id']}").json()
    assert known["text"] == planted.engine.tokenizer.decode(
        planted.engine.tokenizer.encode(ASKED[0])[: head["tokens"]]
    )
    assert len(known["text"]) > 80
    assert (known["path_tokens"], known["children"], known["namespace"]) == (0, 2, "")
    assert len(known["page_ids"]) == known["pages"]
    assert "hits" in known["policy"]
    assert known["parent"] == head["parent"]
    space = planted.http.get(f"/kv/map/{head['parent']}").json()
    assert (space["pages"], space["children"], space["parent"]) == (0, 1, None)


def test_who_is_not_there(planted):
    for number in (10**6, -(10**6), 0, 2**53 - 1, -(2**52)):
        answer = planted.http.get(f"/kv/map/{number}")
        assert answer.status_code == 404
        assert answer.json()["error"]["code"] == "unknown_node"
    for number in ("x", "1.5", str(2**53), "9" * 40):
        assert planted.http.get(f"/kv/map/{number}").status_code == 400
    assert planted.http.get("/kv/map?root=1000000").status_code == 404


def test_other_methods_are_told_which_there_are(planted):
    answer = planted.http.delete("/kv/map/1")
    assert (answer.status_code, answer.headers["allow"]) == (405, "GET")


# --- texts -----------------------------------------------------------------------------------


def test_hostile_text_is_shown(server):
    hostile = "\x1b[31m<script>alert(1)</script>\u202eabc\x00 and more of it, to fill some pages"
    complete(server, hostile)
    (run,) = [n for n in the_map(server, nodes=999)["nodes"] if "<script>" in (n["text"] or "")]
    for text in (
        run["text"],
        server.http.get(f"/kv/map/{run['id']}").json()["text"],
    ):
        assert "<script>" in text
        assert not set("\x1b\x00\u202e") & set(text)
        assert "\\u202e" in text


def test_no_text_where_none_is_shown(start_server):
    with start_server(text=False) as server:
        complete(server, ASKED[0])
        complete(server, ASKED[0], cache_salt="tenant")
        answer = the_map(server)
        assert {n["text"] for n in answer["nodes"]} == {None, "", "tenant"}
        _, (run,) = of_salt(answer, "tenant")
        assert server.http.get(f"/kv/map/{run['id']}").json()["text"] is None
