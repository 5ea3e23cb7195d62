"""Configurations of LMCache: every option is accounted for, and what is printed can be opened."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvkeep.cli import main
from kvkeep.core.errors import InvalidValue
from kvkeep.integrations.lmcache import translate
from kvkeep.integrations.lmcache_given import Given, from_environment, gather, read_yaml
from kvkeep.integrations.options import EngineOptions
from kvkeep.store.codecs import BlockShape
from kvkeep.store.tiers.opening import check_tiers

SHAPE = BlockShape("bfloat16", "NHD", ((8, 128), (8, 128)))  # a layer's K and V

# Every option of LMCache 0.5.6.
NAMES = [
    "chunk_size", "local_cpu", "max_local_cpu_size", "local_cpu_use_hugepages",
    "reserve_local_cpu_size", "local_disk", "local_disk_path_sharding", "max_local_disk_size",
    "remote_url", "remote_serde", "use_layerwise", "save_decode_cache",
    "pre_caching_hash_algorithm", "enable_blending", "blend_recompute_ratios", "blend_thresholds",
    "blend_check_layers", "blend_min_tokens", "blend_special_str", "retrieve_locations",
    "store_location", "enable_p2p", "p2p_host", "p2p_init_ports", "p2p_lookup_ports", "mp_host",
    "mp_port", "enable_controller", "lmcache_instance_id", "controller_pull_url",
    "controller_reply_url", "lmcache_worker_ports", "lmcache_worker_ids",
    "lmcache_worker_heartbeat_delay_time", "lmcache_worker_heartbeat_time", "enable_pd",
    "pd_role", "pd_buffer_size", "pd_buffer_device", "pd_peer_host", "pd_peer_init_port",
    "pd_peer_alloc_port", "pd_peer_query_port", "pd_proxy_host", "pd_proxy_port",
    "pd_allocation_timeout_sec", "pd_shutdown_timeout_sec", "pd_condition_poll_interval_sec",
    "pd_max_prefill_len", "pd_backend_mode", "pd_skip_proxy_notification", "pd_bidirectional",
    "transfer_channel", "nixl_backends", "nixl_buffer_size", "nixl_buffer_device", "gds_path",
    "gds_path_sharding", "gds_buffer_size", "maru_path", "maru_pool_size", "use_gds",
    "gds_backend", "audit_actual_remote_url", "internal_api_server_host", "extra_config",
    "save_unfull_chunk", "blocking_timeout_secs", "external_lookup_client", "py_enable_gc",
    "cache_policy", "numa_mode", "enable_async_loading", "internal_api_server_enabled",
    "internal_api_server_port_start", "priority_limit", "internal_api_server_include_index_list",
    "internal_api_server_socket_path_prefix", "runtime_plugin_locations", "storage_plugins",
    "remote_storage_plugins", "lookup_timeout_ms", "min_retrieve_tokens", "hit_miss_ratio",
    "lookup_server_worker_ids", "enable_scheduler_bypass_lookup", "script_allowed_imports",
    "run_script_api_enabled", "enable_lazy_memory_allocator", "lazy_memory_initial_ratio",
    "lazy_memory_expand_trigger_ratio", "lazy_memory_step_ratio", "lazy_memory_safe_size",
    "enable_chunk_statistics", "chunk_statistics_auto_start_statistics",
    "chunk_statistics_auto_exit_timeout_hours", "chunk_statistics_auto_exit_target_unique_chunks",
    "chunk_statistics_strategy", "enable_kv_events", "use_gpu_connector_v3", "pin_timeout_sec",
    "pin_check_interval_sec", "remote_config_url", "app_id", "enable_hidden_state_cache",
    "max_hidden_state_cpu_size", "hidden_state_layers", "hidden_states_retrieve_mode",
]  # fmt: skip

VALUES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text("ab:/@=?,1."),
    st.sampled_from(["LRU", "cachegen", "file:///a,/b", "redis://u:SECRET@h:1", "s3://b.host/x"]),
    st.lists(st.integers()), st.dictionaries(st.text("abc"), st.text("abc")),
)  # fmt: skip


def test_each_option_of_lmcache_is_known():
    found = translate(dict.fromkeys(NAMES))
    assert len(found.rows) == len(NAMES) > 100
    assert [row.option for row in found.rows if row.fate == "unknown"] == []


@pytest.mark.parametrize(
    ("given", "tiers"),
    [
        ({}, ["memory://5GiB"]),
        ({"max_local_cpu_size": 20}, ["memory://20GiB"]),
        ({"max_local_cpu_size": "1.5"}, ["memory://1536MiB"]),
        ({"local_cpu": False, "max_local_cpu_size": 20}, ["memory://1GiB"]),
        (
            {"local_cpu": "false", "local_disk": "file:///mnt/a/,/mnt/b", "max_local_disk_size": 9},
            ["file:///mnt/a?size=4608MiB", "file:///mnt/b?size=4608MiB"],
        ),
        (
            {"local_cpu": False, "local_disk": "/a b/c", "cache_policy": "LFU",
             "max_local_disk_size": 3},
            ["file:///a%20b/c?size=3GiB&policy=lfu"],
        ),
        ({"local_cpu": False, "local_disk": "/mnt"}, ["file:///mnt"]),
        ({"local_disk": "/mnt", "max_local_cpu_size": 0, "cache_policy": "FIFO"},
         ["file:///mnt?policy=fifo"]),
        ({"remote_url": "file:///mnt/nfs"}, ["memory://5GiB", "file:///mnt/nfs"]),
        ({"remote_url": " redis://h:6379 "}, ["memory://5GiB", "redis://h:6379"]),
        ({"cache_policy": "MRU"}, ["memory://5GiB"]),
        ({"remote_url": "rediss://u:p@h:6379"}, ["memory://5GiB", "rediss://u:p@h:6379"]),
        (
            {"remote_url": "valkey://h:6379", "remote_serde": "cachegen"},
            ["memory://5GiB", "valkey://h:6379?codec=int8"],
        ),
        ({"remote_url": "fs://any:0/mnt/nfs"}, ["memory://5GiB", "file:///mnt/nfs"]),
        (
            {"remote_url": "s3://b.s3.eu-west-1.amazonaws.com/x"},
            ["memory://5GiB", "s3://b/x?region=eu-west-1"],
        ),
        (
            {"remote_url": "s3://b.minio.test:9000", "extra_config": {"disable_tls": True},
             "remote_serde": "cachegen"},
            ["memory://5GiB", "s3://b?endpoint=http://minio.test:9000&codec=int8"],
        ),
        ({"remote_url": "mooncakestore://h:1"}, ["memory://5GiB"]),
        (  # as it is in a variable
            {"remote_url": "s3://b.minio.test:9000",
             "extra_config": '{"disable_tls": true, "s3_region": "eu"}'},
            ["memory://5GiB", "s3://b?endpoint=http://minio.test:9000&region=eu"],
        ),
        ({"remote_url": "redis://u:p@h1:1,h2:2"}, ["memory://5GiB", "redis://u:p@h1:1"]),
        (
            {"remote_url": "redis-cluster://u:p@h1:1,h2:2", "remote_serde": "cachegen"},
            ["memory://5GiB", "redis://u:p@h1:1?cluster=yes&codec=int8"],
        ),
        (
            {"remote_url": "fs://any:0/mnt/a,/mnt/b"},
            ["memory://5GiB", "file:///mnt/a", "file:///mnt/b"],
        ),
        (
            {"remote_url": "valkey://h:6379", "extra_config": {
                "valkey_username": "me", "valkey_password": "SE:CR@ET", "valkey_database": 3,
                "tls_enable": True}},
            ["memory://5GiB", "valkeys://me:SE%3ACR%40ET@h:6379/3"],
        ),
        (
            {"remote_url": "valkey://h1:1,h2:2", "extra_config": {
                "valkey_mode": "cluster", "valkey_database": 3}},
            ["memory://5GiB", "valkey://h1:1?cluster=yes"],
        ),
        (
            {"remote_url": "redis://h1:1", "extra_config": {"redis_mode": "cluster"}},
            ["memory://5GiB", "redis://h1:1?cluster=yes"],
        ),
        ({"local_cpu": "yes"}, ["memory://1GiB"]),  # "true" and "1" are true
        ({"local_cpu": "1", "max_local_cpu_size": 2}, ["memory://2GiB"]),
        ({"local_cpu": 1}, ["memory://5GiB"]),
        ({"local_cpu": " True "}, ["memory://5GiB"]),
        ({"local_cpu": 1.0}, ["memory://1GiB"]),
        ({"local_cpu": 2}, ["memory://1GiB"]),
    ],
)  # fmt: skip
def test_tiers(given, tiers):
    found = translate(given)
    assert found.options["tiers"] == tiers
    EngineOptions.from_json(found.options, "it")
    check_tiers(found.options["tiers"], SHAPE)


def test_times_and_tokens():
    given = {"blocking_timeout_secs": "7", "lookup_timeout_ms": 250, "min_retrieve_tokens": 300,
             "save_decode_cache": False}  # fmt: skip
    made = translate(given).options
    del made["tiers"]
    assert made == {
        "load_timeout": 7, "lookup_timeout": 0.25, "min_tokens": 300, "answers": False,
    }  # fmt: skip


@pytest.mark.parametrize(
    "given",
    [
        {"max_local_cpu_size": "much"},
        {"max_local_cpu_size": -1},
        {"max_local_cpu_size": True},
        {"local_disk": "relative/path", "max_local_disk_size": 1},
        {"local_disk": "~/kv"},
        {"local_disk": "file:///"},
        {"local_disk": 7},
        {"remote_url": "host:6379"},
        {"blocking_timeout_secs": float("nan")},
    ],
)
def test_what_lmcache_would_not_take(given):
    with pytest.raises(InvalidValue) as raised:
        translate(given)
    assert next(iter(given)) in str(raised.value)
    assert "://" not in str(raised.value) or "remote_url" in given


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("redis-sentinel://u:SECRET@h1:26379/mymaster", "sentinels are not asked"),
        ("redis://:SECRET@h:6379?db=2", "has no option db"),
        ("s3://minio:9000/bucket", "?endpoint="),
        ("fs://host:0", "names no directory"),
        ("mooncakestore://h:1", "there is no tier for mooncakestore://"),
        ("lm://h:1", "share valkey://"),
        ("hf3fs://h:1", "there is no tier for hf3fs://"),
    ],
)
def test_a_remote_tier_that_could_not_be_opened_is_not_printed(url, says):
    found = translate({"remote_url": url, "remote_serde": "cachegen"})
    fates = {row.option: row for row in found.rows}
    assert fates["remote_url"].fate == "no counterpart"
    assert says in fates["remote_url"].note
    assert fates["remote_serde"].fate == "not needed"
    assert found.options["tiers"] == ["memory://5GiB"]
    assert "SECRET" not in str(found.rows)


def test_what_is_said_is_what_is_given():
    rows = {row.option: row.note for row in translate({"local_cpu": False}).rows}
    assert rows["local_cpu"].startswith("memory://1GiB: ")
    rows = {row.option: row.note for row in translate({"min_retrieve_tokens": 7.5}).rows}
    assert rows["min_retrieve_tokens"] == "min_tokens: 7"


def test_the_nearest_name_is_suggested():
    (row,) = translate({"saev_unfull_chunk": True}).rows
    assert row.fate == "unknown"
    assert row.note.endswith("did you mean 'save_unfull_chunk'?")


@given(st.dictionaries(st.one_of(st.sampled_from(NAMES), st.text("abc_")), VALUES, max_size=8))
def test_every_option_has_one_row_and_no_row_a_password(given):
    try:
        found = translate(given)
    except InvalidValue as error:
        told = str(error)
    else:
        told = str(found.rows)
        assert len(found.rows) == len(given)
        EngineOptions.from_json({"tiers": found.options["tiers"]}, "it")
        check_tiers(found.options["tiers"], SHAPE)
    assert "SECRET" not in told


def test_aliases_and_environment():
    found = translate({"enable_xpyd": True})
    assert [(row.option, row.fate) for row in found.rows] == [("enable_xpyd", "no counterpart")]
    for alias in ("nixl_role", "controller_url", "lmcache_worker_port", "external_backends"):
        assert translate({alias: "x"}).rows[0].fate != "unknown"
    given = {"LMCACHE_LOCAL_CPU": "False", "LMCACHE_CONFIG_FILE": "x", "PATH": "/bin"}
    assert from_environment(given) == {"local_cpu": "False"}
    quoted = {"LMCACHE_REMOTE_URL": '"redis://h:1"', "LMCACHE_CACHE_POLICY": " 'LFU' "}
    assert from_environment(quoted) == {"remote_url": "redis://h:1", "cache_policy": "LFU"}


def test_the_disk_of_each_rank():
    given = {"local_cpu": False, "local_disk": "/mnt/a,/mnt/b", "max_local_disk_size": 100}
    found = translate(given, ranks=8)
    assert found.options["tiers"] == ["file:///mnt/a?size=400GiB", "file:///mnt/b?size=400GiB"]
    assert "8 ranks" in {row.option: row.note for row in found.rows}["max_local_disk_size"]
    notes = {row.option: row.note for row in translate(given).rows}
    assert notes["max_local_disk_size"].endswith("with several ranks on a machine, --tp")
    notes = {row.option: row.note for row in translate({"local_disk": "/mnt/a"}).rows}
    assert "give size=" in notes["local_disk"]


def test_each_name_of_the_extra_config_has_a_word():
    extra = {"valkey_password": "SECRET", "use_odirect": True, "odd": 1, "save_chunk_meta": False}
    given = {"remote_url": "valkey://h:1", "extra_config": extra}
    row = {row.option: row for row in translate(given).rows}["extra_config"]
    assert row.fate == "translated"
    assert row.note.startswith("valkey_password: in the URL of the remote tier; use_odirect: io=")
    assert row.note.endswith("look at each: odd")
    assert "SECRET" not in str(translate(given).rows)
    (row,) = translate({"extra_config": {"valkey_password": "SECRET"}}).rows
    assert row.fate == "no counterpart"
    assert row.note == "look at each: valkey_password"
    (row,) = translate({"extra_config": "no JSON"}).rows
    assert row.fate == "unknown"


def test_a_network_filesystem_is_warned_of():
    (row,) = translate({"remote_url": "fs://any:0/mnt/nfs"}).rows
    assert "over a network filesystem" in row.note


TRANSFER = {
    "kv_connector": "LMCacheConnectorV1", "kv_role": "kv_consumer",
    "kv_connector_extra_config": {"lmcache.local_cpu": True, "lmcache.max_local_cpu_size": 20,
                                  "discard_partial_chunks": False},
}  # fmt: skip


def test_what_replaces_what(tmp_path):
    path = tmp_path / "lmcache.yaml"
    path.write_text("max_local_cpu_size: 1\nchunk_size: 1\nlocal_disk: /mnt/a\n")
    environment = {"LMCACHE_CONFIG_FILE": str(path), "LMCACHE_CHUNK_SIZE": "2",
                   "LMCACHE_MAX_LOCAL_CPU_SIZE": "2"}  # fmt: skip
    expected = {"max_local_cpu_size": "2", "chunk_size": "2", "local_disk": "/mnt/a"}
    assert gather(None, environment) == Given(expected)
    assert gather(str(path), {"LMCACHE_CHUNK_SIZE": "2"}).options["chunk_size"] == "2"
    found = gather(json.dumps(TRANSFER), environment)
    assert found.role == "kv_consumer"
    assert not found.inside
    assert found.options == {
        "kv_connector": "LMCacheConnectorV1", "max_local_cpu_size": 20, "chunk_size": "2",
        "local_disk": "/mnt/a", "local_cpu": True, "discard_partial_chunks": False,
    }  # fmt: skip
    assert all(row.fate != "unknown" for row in translate(found.options).rows)
    path.write_text(json.dumps(TRANSFER))
    assert gather(str(path), {}).options["max_local_cpu_size"] == 20


def test_a_connector_of_the_server_inside_another_one(capsys):
    place = {"lmcache.mp.host": "tcp://h", "lmcache.mp.port": 5555}
    mp = {"kv_connector": "LMCacheMPConnector", "kv_connector_extra_config": place}
    extra = {"connectors": [mp, {"kv_connector": "Other"}]}
    outer = {"kv_connector": "MultiConnector", "kv_connector_extra_config": extra}
    found = gather(json.dumps(outer), {})
    assert found.inside
    rows = {row.option: row for row in translate(found.options).rows}
    assert "--l1-size-gb is shm://" in rows["kv_connector"].note
    assert rows["mp.host"].fate == rows["mp.port"].fate == "no counterpart"
    assert main(["translate", json.dumps(outer)]) == 0
    assert "in place of LMCache's entry in MultiConnector" in capsys.readouterr().out


def test_the_page_shows_what_is_printed(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    page = Path(__file__).parents[2] / "docs" / "how-to" / "from-lmcache.md"
    (shown,) = re.findall(r"^```text\n(.*?)^```", page.read_text("utf-8"), re.M | re.DOTALL)
    extra = {
        "lmcache.remote_url": "redis-cluster://u:p@h1:6379,h2:6379",
        "lmcache.local_disk": "/mnt/kv",
        "lmcache.max_local_disk_size": 100,
        "lmcache.chunk_size": 256,
    }
    given = {"kv_connector": "LMCacheConnectorV1", "kv_connector_extra_config": extra}
    assert main(["translate", json.dumps(given), "--tp", "8"]) == 0
    assert capsys.readouterr().out.startswith(shown)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"kv_connector": "NixlConnector"}', "LMCacheConnectorV1 is translated"),
        ('{"kv_connector": ', "no JSON"),
        (json.dumps({**TRANSFER, "kv_role": "both"}), "kv_both, kv_producer or kv_consumer"),
        (json.dumps({**TRANSFER, "kv_connector_extra_config": [1]}), "an object is needed"),
    ],
)
def test_a_wrong_configuration_of_vllm_is_one_line(text, says, capsys):
    assert main(["translate", text]) == 2
    err = capsys.readouterr().err
    assert says in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("- a\n- b\n", "options are needed"),
        ("chunk_size: [1\n", "line 2 is no YAML"),
        ("!!python/object/apply:os.system ['true']\n", "is no YAML"),
        ("[" * 5000, "is no YAML"),
        ("a: " + "x" * (1 << 20), "larger than 1 MiB"),
        ("a: \xff".encode("latin-1"), "is no YAML"),
        ("", "no options of LMCache"),
    ],
)
def test_a_file_that_is_none_is_one_line(text, says, tmp_path, capsys):
    path = tmp_path / "lmcache.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    assert main(["translate", str(path)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert says in err
    assert err.count("\n") == 1


def test_what_is_printed(tmp_path, capsys, monkeypatch):
    path = tmp_path / "lmcache.yaml"
    path.write_text("chunk_size: 256\nmax_local_cpu_size: 20\nmin_retrieve_tokens: 9\nodd: 1\n")
    assert read_yaml(str(path))["chunk_size"] == 256
    assert main(["translate", str(path)]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert out.index("translated:") < out.index("unknown:\n  odd: 1") < out.index("not needed:")
    line = next(line for line in out.splitlines() if line.startswith("  '{"))
    given = json.loads(line.strip()[1:-1])
    assert given["kv_connector_extra_config"] == {"tiers": ["memory://20GiB"], "min_tokens": 9}
    assert given["kv_role"] == "kv_both"

    monkeypatch.setenv("LMCACHE_CONFIG_FILE", str(path))
    assert main(["translate", "--engine", "sglang", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["config"]["tiers"] == ["memory://20GiB"]
    assert said["left_out"] == ["min_tokens"]
    assert {row["option"]: row["fate"] for row in said["options"]}["odd"] == "unknown"

    assert main(["translate", str(tmp_path / "none")]) == 2
    assert capsys.readouterr().err.count("\n") == 1


HOSTILE = {  # what a small file can become → what is said of it
    "a: &a [x,x]\n" + "".join(f"b{i}: &{'bcdefghij'[i]} [*{'abcdefghi'[i]},*{'abcdefghi'[i]}]\n"
                              for i in range(9)): "is no YAML",
    "chunk_size: 0x" + "f" * 5000: "is no YAML",
    "extra_config: {s3_region: 0b" + "1" * 300 + "}": "is no YAML",
    'local_disk: "/mnt/\\ud800"': "'\\ud800' in a path or URL",
    'remote_url: "fs://h:0/\\ud800"': "'\\ud800' in a path or URL",
    'remote_url: valkey://h:1\nextra_config: {valkey_password: "\\udfff"}': "no character of UTF-8",
}  # fmt: skip


@pytest.mark.parametrize("text", HOSTILE)
def test_a_small_file_stays_small(text, tmp_path, capsys):
    path = tmp_path / "lmcache.yaml"
    path.write_text(text)
    assert main(["translate", str(path)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert HOSTILE[text] in err
    assert err.count("\n") == 1


def test_an_alias_is_read(tmp_path):
    path = tmp_path / "lmcache.yaml"
    path.write_text("local_disk: &place /mnt/a\ngds_path: *place\n")
    assert read_yaml(str(path)) == {"local_disk": "/mnt/a", "gds_path": "/mnt/a"}


@pytest.mark.parametrize(
    ("given", "tiers"),
    [
        ({"local_disk": "/a,/b,/a/,/x/../a"}, ["memory://5GiB", "file:///a", "file:///b"]),
        ({"remote_url": "fs://h:1/a,/a/,/b"}, ["memory://5GiB", "file:///a", "file:///b"]),
        ({"local_disk": "/a", "remote_url": "fs://h:1/a/"}, ["memory://5GiB", "file:///a"]),
        ({"remote_url": "azure://box/kv"}, ["memory://5GiB", "az://box/kv"]),
        ({"remote_url": "azure://box/kv?y=1"}, ["memory://5GiB"]),
        ({"local_disk": "/a\0b"}, []),
    ],
)
def test_a_tier_that_the_engine_would_refuse_is_not_printed(given, tiers, monkeypatch):
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME", raising=False)
    if not tiers:
        with pytest.raises(InvalidValue):
            translate(given)
        return
    found = translate(given)
    assert found.options["tiers"] == tiers
    EngineOptions.from_json(found.options, "it")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "me")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "bWU=")
    check_tiers(tiers, SHAPE)


def test_longer_than_a_thread_can_wait():
    made = translate({"blocking_timeout_secs": 1e14, "lookup_timeout_ms": 1e14}).options
    EngineOptions.from_json(made, "it")


def test_no_control_characters_and_no_secrets_of_unknown_options(tmp_path, capsys):
    path = tmp_path / "lmcache.yaml"
    path.write_text('"\\e[2Jx": 3\ncache_policy: "\\e]0;x\\a\\nlru"\nhf_token: SECRET\n'
                    "storage_key: SECRET\nAUTH: SECRET\n")  # fmt: skip
    assert main(["translate", str(path)]) == 0
    out = capsys.readouterr().out
    assert "SECRET" not in out
    assert out.replace("\n", "").isprintable()
