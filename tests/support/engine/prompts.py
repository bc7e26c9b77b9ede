"""Prompts of the engine's tests; pictures are (seed, width, height)."""

from __future__ import annotations

from support.engine.engine_cell import Prompt

CAT, DOG, TREE = (1, 96, 64), (2, 64, 96), (3, 64, 64)
TEXT = Prompt("Say something about the weather, and then about the sea.")
ONE = Prompt("What is this?", (CAT,))
THREE = Prompt("Compare these three.", (CAT, DOG, TREE))
TWICE = Prompt("Two of them.", (DOG, DOG))
MIXED = [TEXT, ONE, THREE, TWICE]
#: Six that do not fit a small KV cache together.
SIX = [
    ONE,
    TEXT,
    Prompt("And these?", (DOG, CAT)),
    Prompt("One more, and then another one."),
    Prompt("What is that?", ((4, 96, 96),)),
    Prompt("Who has seen the wind?"),
]
