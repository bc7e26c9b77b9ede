"""Texts of a load: common English words by chance."""

from __future__ import annotations

import random

_LIST = (
    "the of and to in is was for on that with as by at from his her they this be are not have had which "
    "or one you were all their there been many some time very when much new write would like so these "
    "long make thing see him two has look more day could go come did number sound no most people my over "
    "know water than call first who may down side now find any work part take get place made live where "
    "after back little only round man year came show every good me give our under name very through just "
    "form sentence great think say help low line differ turn cause same mean move right boy old too does "
    "tell set three want air well also play small end put home read hand port large spell add even land "
    "here must big high such follow act why ask men change went light kind off need house picture try us "
    "again animal point "
)
WORDS = tuple(_LIST.split())


def text(tokens: int, seed: int, words_per_token: float = 1.0) -> str:
    """Words by chance: every seed begins another prefix, so that no prefix cache answers."""
    rng = random.Random(f"text-{seed}")
    return " ".join(rng.choices(WORDS, k=max(1, round(tokens * words_per_token))))
