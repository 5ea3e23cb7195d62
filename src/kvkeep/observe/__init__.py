"""Observation: one record per request, usage, explanations, metrics, spans and logs.

usage/      the events of each request, emitted once, and the usage table made from them
explain/    why each token of a prompt was computed
telemetry/  spans, labels of metrics, logs
"""
