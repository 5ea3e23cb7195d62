"""kvkeep beside other systems in one run: cases, one worker process a system, and the table.

`beside_peers.py` starts the workers, each in the environment of its system, and asks them by turns.
What runs in a worker imports nothing of kvkeep unless it measures kvkeep.
"""
