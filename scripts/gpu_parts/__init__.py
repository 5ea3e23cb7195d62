"""The parts of `gpu_proof.py`, each of which runs in a process of its own, and the page.

`figures.py` has what all parts use. `page.py` needs no torch, since it runs in the process that
outlives all others.
"""
