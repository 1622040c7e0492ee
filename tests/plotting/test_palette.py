"""The colors of pictures: distinguishable with common color blindness, and, with their patterns, in print."""

from __future__ import annotations

import re
from itertools import combinations, pairwise

import numpy as np
import pytest
from matplotlib.colors import to_rgb
from numpy.typing import NDArray

import flexmask as fm
from flexmask.plotting.categories import Category
from flexmask.plotting.html import style
from flexmask.plotting.mpl.drawing import scale_marks
from flexmask.plotting.palette import HIDDEN, IN_PARTIAL, LOOKS, SHARDS, TERMS, UNDECIDED, VISIBLE, WASTED, Look
from flexmask.plotting.raster import FULL, PARTIAL, UNKNOWN, Scores
from flexmask.plotting.terminal import drawing as signs

Color = NDArray[np.float64]

#: Machado, Oliveira and Fernandes (2009), severity 1, on linear RGB.
VISION = {
    "common": [[1, 0, 0], [0, 1, 0], [0, 0, 1]],
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}
SRGB = np.array([[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.0721750], [0.0193339, 0.1191920, 0.9503041]])
WHITE = np.array([0.95047, 1.0, 1.08883])


def lab(color: str, vision: str = "common") -> Color:
    """CIE L*a*b* of a color as it is seen."""
    rgb = np.array(to_rgb(color))
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    xyz = SRGB @ (np.array(VISION[vision]) @ linear).clip(0, 1) / WHITE
    f = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def apart(one: str, other: str, vision: str) -> float:
    return float(np.linalg.norm(lab(one, vision) - lab(other, vision)))


#: Colors next to each other in one picture.
TOGETHER = {
    "cells": [Look(VISIBLE), LOOKS["hidden"]],
    "blocks": [Look(VISIBLE), Look(IN_PARTIAL), Look(WASTED), Look(HIDDEN)],
    "terms": [Look(VISIBLE), Look(IN_PARTIAL), *TERMS],
    "shards": [*SHARDS, LOOKS["hidden"]],
    "difference": [LOOKS[role] for role in ("both", "only_a", "only_b", "neither")],
}


@pytest.mark.parametrize("vision", VISION)
@pytest.mark.parametrize("name", TOGETHER)
def test_kinds_differ(name: str, vision: str) -> None:
    for one, other in combinations(TOGETHER[name], 2):
        wanted = 10 if one.hatch == other.hatch else 6  # by area there are no patterns
        assert apart(one.color, other.color, vision) >= wanted, (one, other)


@pytest.mark.parametrize("name", TOGETHER)
def test_kinds_differ_in_print(name: str) -> None:
    for one, other in combinations(TOGETHER[name], 2):
        lightness = abs(lab(one.color)[0] - lab(other.color)[0])
        assert one.hatch != other.hatch or lightness >= 3, (one, other)


def test_a_color_has_one_meaning() -> None:
    cells = {"visible": VISIBLE, "in partial": IN_PARTIAL, "wasted": WASTED, "hidden": HIDDEN, "unknown": UNDECIDED}
    strong = {role: LOOKS[role].color for role in ("both", "only_a", "only_b")}
    many = {f"term {place}": look.color for place, look in enumerate(TERMS)}
    many |= {f"shard {place}": look.color for place, look in enumerate(SHARDS)}
    named = {**cells, **strong, **many}
    assert LOOKS["hidden"].color == LOOKS["neither"].color == HIDDEN
    assert LOOKS["visible"].color == VISIBLE
    for (one, color), (other, another) in combinations(named.items(), 2):
        assert apart(color, another, "common") >= 8, (one, other)


def test_a_terminal_color_has_one_meaning() -> None:
    hides = [Category("hidden", f"term {place}", fm.full(), fm.full()) for place in range(6)]
    visible = {signs.IN_FULL.style, signs.IN_PARTIAL.style, *(sign.style for sign in signs.SHADES[1:])}
    terms = [sign.style for sign in signs.signs_of(hides)]
    others = [signs.WASTED, signs.EITHER, signs.BLOCKS[UNKNOWN], *(signs.ROLES[role] for role in ("both", "only_a", "only_b"))]
    apart_from_visible = [*terms, *(sign.style for sign in others)]
    assert len({*apart_from_visible} | visible) == len(apart_from_visible) + len(visible)
    assert {signs.BLOCKS[FULL].style, signs.BLOCKS[PARTIAL].style} <= visible


def test_the_page_has_the_same_colors() -> None:
    named = {"visible": VISIBLE, "in-partial": IN_PARTIAL, "wasted": WASTED, "hidden": HIDDEN, "unknown": UNDECIDED}
    named |= {role.replace("_", "-"): LOOKS[role].color for role in ("both", "only_a", "only_b", "neither")}
    css = dict(re.findall(r"--flexmask-([\w-]+): (?:light-dark\()?(#\w+)", style()))
    assert {name: css[name] for name in named} == {name: color.lower() for name, color in named.items()}
    assert [css[f"term-{place}"] for place in range(6)] == [look.ink.lower() for look in TERMS]


def test_weights_grow_darker_steadily() -> None:
    shades = scale_marks(Scores(np.zeros((1, 1), dtype=np.float32), 1.0, None))
    lightness = [lab(color)[0] for color, _ in shades]
    assert all(lighter - darker > 12 for lighter, darker in pairwise(lightness))
    assert [weight for _, weight in shades] == ["0", "0.25", "0.5", "0.75", "1"]
