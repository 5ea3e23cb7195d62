"""Serving: an engine over the cache and the store, its HTTP server, and a router for several.

engine/     a small engine on Transformers models
server/     its OpenAI-compatible HTTP face
router/     `kvkeep route`: sends prompts to the instance that holds their prefix
kv_events/  KV events on the wire, for routers
http/       shared by server and router: HTTP with limits against hostile clients
models/     the tiny model that ships with kvkeep
"""
