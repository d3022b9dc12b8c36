"""How files of models of older versions become files of this one. `tests/fixtures` holds one of each."""

from typing import Any

from tailguard.io.checkpoint import Migrations


def _to_version_2(tree: dict[str, Any]) -> dict[str, Any]:
    """Version 1 knew no adversary, and kept a ``VecNormalize`` only together with environments that know their state."""
    settings, run = tree["settings"] | {"adversary": None}, tree["run"] | {"adversary": None}
    return tree | {"settings": settings, "run": run, "vec_normalize": None}


def _to_version_3(tree: dict[str, Any]) -> dict[str, Any]:
    """Version 2 knew no search for the best cap: nothing has been found yet."""
    objective = tree["agent"]["objective"]
    n, nothing = len(objective["returns"]), float("-inf")
    found = {"recent": [[nothing] * 2] * n, "best": [[nothing] * 2] * n}
    return tree | {"agent": tree["agent"] | {"objective": objective | found}}


def _to_version_4(tree: dict[str, Any]) -> dict[str, Any]:
    """Version 3 kept returns one by one, as a list of one number or of all atoms each: they are one rollout now."""
    objective = tree["agent"]["objective"]
    rollouts = [
        [[[one[0] for one in level if len(one) == 1], [one for one in level if len(one) > 1]]] for level in objective["returns"]
    ]
    return tree | {"agent": tree["agent"] | {"objective": objective | {"returns": rollouts}}}


def _to_version_5(tree: dict[str, Any]) -> dict[str, Any]:
    """Version 4 could let exploration last for several steps, which never paid: files of version 3 lack the traces of it."""
    settings, run = ({**tree[part]} for part in ("settings", "run"))
    settings.pop("exploration_memory", None)
    run.pop("lasting_noise", None)
    return tree | {"settings": settings, "run": run}


MIGRATIONS: Migrations = {1: _to_version_2, 2: _to_version_3, 3: _to_version_4, 4: _to_version_5}
