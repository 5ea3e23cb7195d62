"""The modules of a Transformers model that keep something: found, wrapped, proved.

survey.py   which modules touch a cache, how far layers attend, the maps of latents
wrapped.py  modules that get what they keep from our memory; the running states of one pass
"""
