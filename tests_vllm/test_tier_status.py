"""The status of kvkeep below vLLM's own offloading: its tiers, and what it cannot tell."""

from __future__ import annotations

import json
import socket
import urllib.error
from typing import TYPE_CHECKING

import pytest
from engines import prompt
from tiered import tiered
from watched import KEY, eventually, fetch

from ports import free_port

if TYPE_CHECKING:
    from pathlib import Path


def test_tiers_are_told_and_requests_are_not(llama: str, tmp_path: Path) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    options = {"status": f"127.0.0.1:{port}", "status_key": KEY}
    with tiered(llama, f"file://{tmp_path}/kv?size=64MiB", options=options) as one:
        one.ask([prompt(300, seed=1)])
        eventually(lambda: fetch(f"{url}/health"))
        file = eventually(
            lambda: [
                tier
                for tier in fetch(f"{url}/kv/live")["tiers"]
                if tier["name"] == "file" and tier["blocks"]
            ]
        )
        assert file[0]["used_bytes"] > 0
        live = fetch(f"{url}/kv/live")
        assert (live["engine"].split()[0], live["explain"], live["map"]) == ("vLLM", False, False)
        assert not {"pages", "ttft", "history", "tenants"} & live.keys()
        with pytest.raises(urllib.error.HTTPError) as refused:
            fetch(f"{url}/kv/requests")
        said = json.loads(refused.value.read())["error"]
        assert refused.value.code == 404
        assert "no request is explained" in said["message"]
        assert 'kvkeep_store_blocks{tier="file"}' in fetch(f"{url}/metrics")
        names = {name.partition(" ")[2].rpartition(" ")[0] for name in one.counted if "now" in name}
        assert "used_bytes 0" in names
    with socket.create_server(("127.0.0.1", port)):
        pass
