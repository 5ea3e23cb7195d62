"""The bench: real traces, replayed through the code that serves.

traces/  requests with their times: readers, generators, capture
replay/  a trace through the cache and the tiers; bounds, plans, reports
"""
