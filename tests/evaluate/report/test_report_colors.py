"""The four hues that carry meaning stay apart for readers who see colours differently."""

import re
from importlib import resources
from itertools import combinations

import numpy as np
import pytest

ROLES = ("agent", "market", "third", "fourth")
# Machado, Oliveira and Fernandes 2009, severity 1, on linear RGB.
SIGHT = {
    "usual": np.eye(3),
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}
# A CIE 1976 distance of 2 can just be seen between large patches; lines of two pixels need several times that.
APART = 15.0


def palettes():
    css = resources.files("tailguard.evaluate.report").joinpath("assets", "tokens.css").read_text(encoding="utf-8")
    light, dark = css.split("@media", 1)
    return {name: dict(re.findall(r"--(\w+): (#[0-9a-f]{6});", part)) for name, part in (("light", light), ("dark", dark))}


def lab(color, sight):
    values = np.array([int(color[i : i + 2], 16) for i in (1, 3, 5)]) / 255.0
    linear = np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)
    seen = np.clip(np.asarray(sight) @ linear, 0.0, 1.0)
    to_xyz = np.array([[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.0721750], [0.0193339, 0.1191920, 0.9503041]])
    scaled = to_xyz @ seen / (to_xyz @ np.ones(3))
    root = np.where(scaled > (6 / 29) ** 3, np.cbrt(scaled), scaled / (3 * (6 / 29) ** 2) + 4 / 29)
    return np.array([116 * root[1] - 16, 500 * (root[0] - root[1]), 200 * (root[1] - root[2])])


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("sight", SIGHT)
def test_roles_can_be_told_apart(scheme, sight):
    palette = palettes()[scheme]
    places = {role: lab(palette[role], SIGHT[sight]) for role in ROLES}
    near = {
        (one, other): round(float(np.linalg.norm(places[one] - places[other])), 1)
        for one, other in combinations(ROLES, 2)
        if np.linalg.norm(places[one] - places[other]) < APART
    }
    assert not near


def test_the_yardstick_sees_what_a_red_green_pair_loses():
    pair = ("#c04000", "#6f8000")
    usual, protanope = (np.linalg.norm(lab(pair[0], SIGHT[s]) - lab(pair[1], SIGHT[s])) for s in ("usual", "deuteranopia"))
    assert protanope < usual / 3.0
