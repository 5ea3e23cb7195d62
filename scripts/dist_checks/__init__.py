"""Parts of ``scripts/dist.py``: what a release contains, and how it works where it is installed.

contents.py  what is in the wheel and in the source distribution, and what is missing
bare.py      an environment for each Python, with the wheel and nothing else
inside.py    a program that runs in such an environment, with the standard library alone
"""
