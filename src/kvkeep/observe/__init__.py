"""Looking on: why prompts missed, and what happened, as numbers and spans.

explain/    why each token of a prompt was computed
telemetry/  evictions, reuse and shares for metrics; spans; logs
"""
