"""Hostile text made showable: nothing of it acts, all of it is told apart."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvkeep.serve.server.text import showable, showable_at

# Code points that say nothing about how others are shown: what showable lets through of these.
JOINERS = {"\u200c", "\u200d"}
ACTING = {"Cc", "Cs", "Zl", "Zp"}


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain <b>&amp;</b> Ünïcode 日本 👩‍💻", "plain <b>&amp;</b> Ünïcode 日本 👩‍💻"),
        ("a\x00b\x1b[31mc\x7f", "a␀b␛[31mc␡"),
        ("a\r\nb\tc", "a␍␊b␉c"),
        ("\x85\x9b", "\\u0085\\u009b"),
        ("user\u202egnp.exe\u202c", "user\\u202egnp.exe\\u202c"),
        ("\u2066a\u2067\u2068b\u2069", "\\u2066a\\u2067\\u2068b\\u2069"),
        ("\u200ea\u200f\u061c", "\\u200ea\\u200f\\u061c"),
        ("\ufeffa\u200bb\xadc", "\\ufeffa\\u200bb\\u00adc"),
        ("\u2028\u2029", "\\u2028\\u2029"),
        ("\ud83d!\udc69", "\\ud83d!\\udc69"),
        ("\U000e0041", "\\U000e0041"),
        ("", ""),
    ],
)  # fmt: skip
def test_signs_in_place_of_what_acts(text, shown):
    assert showable(text) == shown


def test_lines_may_stay():
    assert showable("a\n\tb\r\x00", lines=True) == "a\n\tb␍␀"


@given(st.text(st.characters(codec=None)))
def test_nothing_acts_and_all_can_be_encoded(text):
    shown = showable(text)
    shown.encode()
    assert not {unicodedata.category(one) for one in shown} & ACTING
    # Of what changes the direction of text around it, nothing is left.
    assert not [one for one in shown if unicodedata.bidirectional(one) in
                {"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"}]  # fmt: skip
    assert showable(shown) == shown


@given(st.text(st.characters(codec=None)), st.integers(0, 60))
def test_places_are_those_of_the_same_characters(text, at):
    at = min(at, len(text))
    shown, there = showable_at(text, at)
    assert shown == showable(text)
    assert shown[:there] == showable(text[:at])
