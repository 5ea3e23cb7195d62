"""The options of LMCache 0.5.6 that become none of kvkeep's, and why."""

from __future__ import annotations

from typing import Final

__all__ = ["EXTRA", "EXTRA_TAKEN", "FAMILIES", "NOT_NEEDED", "NO_COUNTERPART", "STATUS"]

STATUS: Final = "the status endpoint of the connector tells what is cached and why prompts missed"

NOT_NEEDED: Final[dict[str, str]] = {
    "chunk_size": "blocks are those of the engine; a larger --block-size makes larger records",
    "use_layerwise": "loads overlap with computing where the engine allows it",
    "save_unfull_chunk": "whole blocks are stored; in models with windows or states the rest, too",
    "pre_caching_hash_algorithm": "keys are the engine's block hashes, and what computes; "
    "they are the same in every process without PYTHONHASHSEED",
    "enable_async_loading": "loads are asynchronous",
    "local_cpu_use_hugepages": "the system's transparent huge pages are used",
    "py_enable_gc": "kvkeep does not change the garbage collector of the engine",
    "enable_lazy_memory_allocator": "memory is taken when it is used first",
    "lazy_memory_initial_ratio": "memory is taken when it is used first",
    "lazy_memory_expand_trigger_ratio": "memory is taken when it is used first",
    "lazy_memory_step_ratio": "memory is taken when it is used first",
    "lazy_memory_safe_size": "memory is taken when it is used first",
    "reserve_local_cpu_size": "memory:// takes its size and no more",
    "pin_timeout_sec": "blocks are held by reads alone, which end",
    "pin_check_interval_sec": "blocks are held by reads alone, which end",
    "enable_scheduler_bypass_lookup": "the scheduler looks up by itself where it can",
    "lookup_server_worker_ids": "the scheduler looks up by itself where it can",
    "hit_miss_ratio": "what is slower to load than to compute is computed (compare_costs)",
    "priority_limit": "what is not worth storing is told by what is read again",
    "numa_mode": "pages stay where the engine puts them",
    "use_gpu_connector_v3": "kvkeep knows the engine's layouts",
    "local_disk_path_sharding": "each path is a tier, below the one before; ranks may share it",
    "lmcache_instance_id": "an instance has no name of its own",
    "lmcache_worker_ports": "there is no controller",
    "lmcache_worker_ids": "there is no controller",
    "lmcache_worker_heartbeat_time": "there is no controller",
    "lmcache_worker_heartbeat_delay_time": "there is no controller",
    "enable_controller": "instances share tiers without a controller; kvkeep route finds who "
    "has a prompt by KV events",
    "controller_pull_url": "there is no controller",
    "controller_reply_url": "there is no controller",
    "enable_kv_events": "the engine publishes KV events (--kv-events-config); kvkeep route reads "
    "them",
    "enable_chunk_statistics": "statistics are always counted",
    "chunk_statistics_auto_start_statistics": "statistics are always counted",
    "blend_special_str": "blending has no counterpart",
    "use_experimental": "there is one connector",
    "use_native": "there is one connector",
    "lmcache_rpc_port": "the scheduler asks the workers through the engine",
    "discard_partial_chunks": "whole blocks are stored",
    "track_usage": "kvkeep sends nothing to anybody",
    "log_level": "VLLM_LOGGING_LEVEL, and the logger kvkeep",
}
"""What kvkeep does without an option, or another program decides."""

NO_COUNTERPART: Final[dict[str, str]] = {
    "enable_blending": "KV is reused behind equal prefixes alone, so answers are exact",
    "skip_save": 'the kv_role kv_consumer stores nothing; for one request "store": false',
    "enable_p2p": "instances share a tier instead: valkey:// or an object store",
    "enable_pd": "vLLM's own connectors move KV from prefill to decode; MultiConnector takes both",
    "storage_plugins": "other packages register tiers as entry points (kvkeep.backends)",
    "remote_storage_plugins": "other packages register tiers as entry points (kvkeep.backends)",
    "runtime_plugin_locations": "there are no plugins at run time",
    "gds_path": "give the directory as file://; it is read past the page cache, not into the GPU",
    "maru_path": "there is no tier on CXL memory; shm:// is shared by the processes of a machine",
    "enable_hidden_state_cache": "hidden states are not stored",
    "external_lookup_client": "lookups ask the tiers",
    "remote_config_url": "options are in a file or on the command line",
    "mp_host": "there is no server process: shm:// is shared by the processes of a machine",
    "run_script_api_enabled": "nothing runs code from outside",
    "script_allowed_imports": "nothing runs code from outside",
    "transfer_channel": "KV does not move between instances but through tiers",
    "nixl_backends": "KV does not move between instances but through tiers",
}
"""What kvkeep does not do, and what does."""

FAMILIES: Final[dict[str, str]] = {
    "blend_": "enable_blending",
    "p2p_": "enable_p2p",
    "pd_": "enable_pd",
    "nixl_": "nixl_backends",
    "gds_": "gds_path",
    "use_gds": "gds_path",
    "maru_": "maru_path",
    "hidden_state": "enable_hidden_state_cache",
    "max_hidden_state": "enable_hidden_state_cache",
    "mp_": "mp_host",
    "mp.": "mp_host",
    "ec_": "enable_hidden_state_cache",
    "chunk_statistics_": "chunk_statistics_auto_start_statistics",
    "audit_": "runtime_plugin_locations",
    "app_id": "remote_config_url",
    "internal_api_server_": "internal_api_server_enabled",
}
"""Beginnings of names → the option above that they belong to."""

_VALKEY: Final = ("valkey", "valkeys")
EXTRA_TAKEN: Final[dict[str, tuple[str, ...]]] = {
    "s3_region": ("s3",),
    "disable_tls": ("s3",),
    "valkey_username": _VALKEY,
    "valkey_password": _VALKEY,
    "valkey_database": _VALKEY,
    "valkey_mode": _VALKEY,
    "tls_enable": _VALKEY,
    "redis_mode": ("redis", "rediss"),
}
"""Names in ``extra_config`` that become parts of a URL → its schemes."""

_CREDENTIALS: Final = "object stores take credentials from the environment"
EXTRA: Final[dict[str, str]] = {
    "use_odirect": "io=auto reads past the page cache where the filesystem can",
    "save_only_first_rank": "below vLLM's offloading, ranks with the same KV store it once",
    "remote_enable_mla_worker_id_as0": "below vLLM's offloading, ranks with the same KV store it "
    "once",
    "save_chunk_meta": "records describe themselves",
    "force_store_wait": "a full memory drops KV and counts it; nothing waits",
    "lookup_backoff_time": "a tier that fails is left alone by its circuit breaker",
    "request_timeout": "timeout= of the tier",
    "connection_timeout": "timeout= of the tier",
    "valkey_num_workers": "connections=, readers= and writers= of the tier",
    "valkey_sync_num_workers": "connections=, readers= and writers= of the tier",
    "s3_num_io_threads": "readers= and writers= of the tier",
    "s3_part_size": "an object is read and written at once",
    "s3_max_inflight_reqs": "readers= and writers= of the tier",
    "s3_max_io_concurrency": "readers= and writers= of the tier",
    "s3_prefer_http2": "the library chooses",
    "s3_enable_s3express": "there is no option for directory buckets",
    "aws_access_key_id": _CREDENTIALS,
    "aws_secret_access_key": _CREDENTIALS,
    "azure_account_url": "AZURE_STORAGE_ACCOUNT_NAME in the environment, or endpoint=",
    "azure_account_key": _CREDENTIALS,
    "azure_connection_string": _CREDENTIALS,
    "azure_sas_token": _CREDENTIALS,
    "fs_connector_relative_tmp_dir": "temporary files are in the directory's own tmp",
}
"""Names in ``extra_config``, and what kvkeep has in their place."""
