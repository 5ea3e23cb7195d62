"""What the documentation site is made of, besides its pages.

api.py         the public names of a room, for mkdocstrings
commands.py    the command line, from the parsers
http.py        the endpoints, from the OpenAPI document
links.py       links named after what they lead to
drawings.py    drawings that take the colours of the page
docstrings.py  what our docstrings say in a way that is no Markdown
"""
