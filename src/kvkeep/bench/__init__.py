"""The bench: real traces through the very same code.

traces/  requests with their times: readers, generators, capture
replay/  a trace through the cache and the tiers, bounds, plans, reports
"""
