"""The modules of a Transformers model that keep something: found, wrapped, proved.

survey.py   which modules touch a cache, how far layers attend, the maps of latents
states.py   the running states of the sequences of one pass
wrapped.py  modules that get what they keep from our memory
"""
