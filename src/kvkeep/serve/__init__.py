"""Serving: an engine over the cache and the store, and what stands in front of it.

engine/     a small engine on Transformers models
server/     its OpenAI-compatible HTTP face
router/     `kvkeep route`: sends prompts to the instance that holds their prefix
kv_events/  KV events on the wire, for routers
http/       what the server and the router stand on: limits for hostile clients
models/     the tiny model that is shipped
"""
