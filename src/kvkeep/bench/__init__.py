"""The bench: real traces, replayed through the code that serves.

traces/  requests with their times: readers, generators, capture
codecs/  what codecs do to a model: bytes, speed, and the change of what it says
replay/  a trace through the cache and the tiers; bounds, plans, reports
"""
