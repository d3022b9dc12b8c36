"""Damaged and forged files: none may load wrong, hang, or take more memory or time than a file can be worth.

    python benchmarks/forge.py --damaged 2000 --forged 500

A damaged file has bytes changed, cut, repeated or lost. A forged one has the right checksums and content that Tailguard does
not write: keys missing or unknown, types, shapes and sizes changed, numbers that are not finite, other kinds and versions. Each
must be refused in one line, or load exactly as the original does, or, where the change makes a legal file (another learning
rate), exactly as the file says. Prints a table, and every case that was none of these.
"""

import argparse
import copy
import hashlib
import json
import os
import resource
import signal
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
from safetensors.torch import load as safetensors_from_bytes
from safetensors.torch import save as safetensors_bytes

from tailguard import DistributionalPPO, TradingVecEnv
from tailguard.io import checkpoint
from tailguard.io.checkpoint import CheckpointError
from tailguard.market.synthetic import random_walk

SECONDS, MEGABYTES = 5.0, 1000.0
N_ENVS, N_STEPS = 2, 8
SUBJECTS: dict[str, dict[str, Any]] = {
    "MLP": {"policy": "MlpPolicy"},
    "LSTM, everything on": {
        "policy": "MlpLstmPolicy",
        "risk": {"objective": "cvar", "alpha": (0.1, 1.0)},
        "optimizer": {"name": "adaptive_upgd", "sigma": 0.01},
        "vgs": {"warmup_steps": 2},
        "kl": {"mode": "penalty"},
        "adversary": {"epsilon": 0.1},
        "normalize_obs": True,
    },
}


def market() -> TradingVecEnv:
    return TradingVecEnv(random_walk(600, seed=1), n_envs=N_ENVS, seed=3, episode_length=30, fee=0.001)


def trained(subject: str) -> bytes:
    """Return the file of a small agent after two updates."""
    settings = dict(SUBJECTS[subject])
    network = {"net_arch": [4]} | ({"lstm_hidden_size": 4} if "Lstm" in settings["policy"] else {})
    model = DistributionalPPO(
        settings.pop("policy"), market(), n_steps=N_STEPS, n_epochs=1, seed=0, policy_kwargs=network, **settings
    )
    model.learn(2 * N_STEPS * N_ENVS)
    return checkpoint.to_bytes(model.state_tree(), kind="model")


def resumed(path: Path) -> bytes:
    """Return the state of a model that continues in the middle of its episodes, as bytes."""
    model = DistributionalPPO.load(path, env=market(), force_reset=False)
    return checkpoint.to_bytes(model.state_tree(), kind="model")


# ------------------------------------------------------------------------------------------------------------ damaged files


def damaged(data: bytes, rng: np.random.Generator) -> tuple[str, bytes]:
    """Return the name of a kind of damage, and the file after it."""
    broken, place = bytearray(data), int(rng.integers(len(data)))
    kind = str(rng.choice(["cut", "bits", "zeros", "lost", "repeated", "noise", "appended"]))
    length = int(rng.integers(1, 4096))
    if kind == "cut":
        del broken[place:]
    elif kind == "bits":
        for where in rng.integers(len(broken), size=rng.integers(1, 6)):
            broken[where] ^= 1 << rng.integers(8)
    elif kind == "zeros":
        broken[place : place + length] = bytes(len(broken[place : place + length]))
    elif kind == "lost":
        del broken[place : place + length]
    elif kind == "repeated":
        broken[place:place] = broken[place : place + length]
    elif kind == "noise":
        broken[place : place + length] = rng.bytes(len(broken[place : place + length]))
    else:
        broken += rng.bytes(length)
    return kind, bytes(broken)


# ------------------------------------------------------------------------------------------------------------- forged files


@dataclass
class Forgery:
    """The content of a file, to be changed: the manifest, and the tensors by name."""

    manifest: dict[str, Any]
    tensors: dict[str, torch.Tensor]

    @classmethod
    def of(cls, data: bytes) -> "Forgery":
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        text = header["__metadata__"][checkpoint.FORMAT].partition(" ")[2]
        return cls(json.loads(text), dict(safetensors_from_bytes(data)))

    def signed(self) -> bytes:
        """Return the file, with checksums that fit."""
        tensors = {name: tensor.contiguous() for name, tensor in self.tensors.items()}
        described = {name: checkpoint._description(tensor) for name, tensor in tensors.items()}
        text = json.dumps(self.manifest | {"tensors": described})
        return bytes(safetensors_bytes(tensors, {checkpoint.FORMAT: f"{hashlib.sha256(text.encode()).hexdigest()} {text}"}))


Path_ = tuple[Any, ...]


def places(node: Any, above: Path_ = ()) -> Iterator[Path_]:
    """Yield the path of every value of a tree in JSON."""
    entries = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, value in entries:
        yield (*above, key)
        yield from places(value, (*above, key))


def at(tree: Any, path: Path_) -> Any:
    for key in path:
        tree = tree[key]
    return tree


# What a value is replaced with: never a value of the same type, or one that is never legal.
REPLACEMENTS: dict[str, Callable[[Any], Any]] = {
    "text": lambda value: "no number" if not isinstance(value, str) else 7,
    "list": lambda value: [[value]],
    "mapping": lambda value: {"a": value},
    "NaN": lambda value: {"$number": "nan"},
    "negative": lambda value: -(10**6),
    "huge": lambda value: 10**15,
    "digits": lambda value: 10**400,
    "flag": lambda value: not isinstance(value, bool) or "true",
    "fraction": lambda value: 0.123456789,
    "foreign tensor": lambda value: {"$tensor": "agent.policy.log_std"},
    "missing tensor": lambda value: {"$tensor": "nowhere"},
    "objects": lambda value: {"$array": ["agent.policy.log_std", "|O"]},
    "deep": lambda value: _nested(500),
}
TENSOR_CHANGES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "NaN": lambda tensor: torch.full_like(tensor, float("nan")) if tensor.is_floating_point() else tensor.double() / 0.0,
    "longer": lambda tensor: torch.cat([tensor.reshape(-1), tensor.reshape(-1)[:1]]),
    "transposed": lambda tensor: tensor.reshape(1, *tensor.shape),
    "doubles": lambda tensor: tensor.to(torch.float64 if tensor.dtype != torch.float64 else torch.float32),
    "empty": lambda tensor: tensor.reshape(-1)[:0],
    "whole": lambda tensor: tensor.to(torch.int64 if tensor.dtype != torch.int64 else torch.int32),
}
SIZES = [
    ("settings", "policy_kwargs", "lstm_hidden_size"),
    ("settings", "policy_kwargs", "net_arch"),
    ("settings", "policy_kwargs", "n_lstm_layers"),
    ("settings", "n_steps"),
    ("settings", "critic", "num_quantiles"),
    ("settings", "risk", "levels"),
    ("settings", "stats_window_size"),
    ("run", "n_envs"),
    ("spaces", "action"),
]


# Tensors that safetensors reads and that torch, or torch's part of safetensors, does not know: type, shape, bytes.
ENTRIES: list[tuple[str, list[int], int]] = [
    ("F4", [2], 1),
    ("F6_E2M3", [4], 3),
    ("F6_E3M2", [4], 3),
    ("F8_E8M0", [1], 1),
    ("F32", [0, 2**63], 0),
    ("F32", [0, 2**62, 8], 0),
]


def with_entry(data: bytes, dtype: str, shape: list[int], length: int) -> bytes:
    """Return a file with one more tensor, which its manifest does not know: its header has no checksum."""
    start = 8 + int.from_bytes(data[:8], "little")
    header, body = json.loads(data[8:start]), data[start:]
    header["more"] = {"dtype": dtype, "shape": shape, "data_offsets": [len(body), len(body) + length]}
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + body + bytes(length)


def _nested(depth: int) -> Any:
    return [] if depth == 0 else [_nested(depth - 1)]


def forged(data: bytes, rng: np.random.Generator) -> tuple[str, bytes]:
    """Return the name of a kind of forgery, and the file after it."""
    forgery = Forgery.of(data)
    tree, manifest = forgery.manifest["tree"], forgery.manifest
    kind = str(
        rng.choice(
            ["delete", "add", "replace", "tensor", "size", "manifest", "move", "entry"],
            p=[0.2, 0.05, 0.35, 0.15, 0.1, 0.05, 0.05, 0.05],
        )
    )
    every = list(places(tree))
    path = every[rng.integers(len(every))]
    parent = at(tree, path[:-1])
    name = ".".join(map(str, path))
    if kind == "delete":
        del parent[path[-1]]
    elif kind == "add":
        target = [tree, *(at(tree, p) for p in every if isinstance(at(tree, p), dict))][rng.integers(1, 40)]
        target["__class__"] = "os.system"
        name = "__class__"
    elif kind == "replace":
        what = str(rng.choice(list(REPLACEMENTS)))
        parent[path[-1]] = REPLACEMENTS[what](parent[path[-1]])
        kind = f"replace: {what}"
    elif kind == "tensor":
        name, what = str(rng.choice(list(forgery.tensors))), str(rng.choice(list(TENSOR_CHANGES)))
        forgery.tensors[name] = TENSOR_CHANGES[what](forgery.tensors[name])
        kind = f"tensor: {what}"
    elif kind == "size":
        *above, last = SIZES[rng.integers(len(SIZES))]
        name = ".".join([*above, last])
        size = int(rng.choice([30_000, 10**7, 10**9, 2**40]))
        huge: Any = {"net_arch": [size] * 3, "action": {"class": "Discrete", "n": size, "start": 0}}.get(last, size)
        at(tree, tuple(above))[last] = huge
    elif kind == "manifest":
        changes = [
            ("kind", "policy"),
            ("kind", None),
            ("version", 99),
            ("version", "6"),
            ("version", -1),
            ("version", 1),
            ("tree", []),
        ]
        key, value = changes[rng.integers(len(changes))]
        manifest[key], name = value, f"{key} {value}"
    elif kind == "entry":
        entry = ENTRIES[rng.integers(len(ENTRIES))]
        return f"entry {entry}", with_entry(forgery.signed(), *entry)
    else:
        other = every[rng.integers(len(every))]
        parent[path[-1]] = copy.deepcopy(at(tree, other)) if other[: len(path)] != path else None
        name += f" <- {'.'.join(map(str, other))}"
    return f"{kind} ({name})", forgery.signed()


# ----------------------------------------------------------------------------------------------------------------- outcomes


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raise a :class:`TimeoutError` after some seconds."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


def outcome(path: Path, expected: bytes) -> tuple[str, str]:
    """Return what became of a file (refused, identical, or what is wrong with it) and the words that were said."""
    try:
        with limited(60.0 * SECONDS), warnings.catch_warnings():  # judged by CPU time; this only ends what hangs
            warnings.simplefilter("ignore")
            began = time.process_time()
            state = resumed(path)
    except ValueError as error:
        text = str(error)
        named = not isinstance(error, CheckpointError) or text.startswith(str(path))  # else it is about the environments
        return ("refused" if named and "\n" not in text else "refused in other words"), text
    except TimeoutError:
        return "hangs", ""
    except BaseException as error:  # noqa: BLE001 (this is what the script looks for)
        return "raw error", f"{type(error).__name__}: {error}"
    if time.process_time() - began > SECONDS:
        return "slow", ""
    if state == expected:
        return "identical", ""
    return ("legal" if says_so(path, state) else "loads another model"), ""


def says_so(path: Path, state: bytes) -> bool:
    """Return True if a model is exactly what its file says: other numbers than the original, all of them legal.

    Settings that a file does not name have their defaults: ``save(exclude=...)`` and earlier versions write such files.
    """
    file = Forgery.of(path.read_bytes())
    loaded = checkpoint.from_bytes(state, kind="model", name="loaded")
    told = checkpoint._decode(file.manifest["tree"], file.tensors)
    if "adversary" not in told["settings"]:
        told["run"]["adversary"] = loaded["run"]["adversary"]
    told["settings"] = _named(loaded["settings"], told["settings"])
    return same(told, loaded)


def same(told: Any, loaded: Any) -> bool:
    """Compare trees; numbers may have been rounded to single precision."""
    if isinstance(told, dict):
        return isinstance(loaded, dict) and told.keys() == loaded.keys() and all(same(told[key], loaded[key]) for key in told)
    if isinstance(told, list | tuple):
        return isinstance(loaded, list | tuple) and len(told) == len(loaded) and all(map(same, told, loaded))
    if isinstance(told, torch.Tensor | np.ndarray):
        return type(told) is type(loaded) and told.dtype == loaded.dtype and np.array_equal(told, loaded, equal_nan=True)
    if isinstance(told, float | int) and not isinstance(told, bool) and isinstance(loaded, float | int):
        return bool(np.isclose(float(told), float(loaded), rtol=1e-6, atol=0.0, equal_nan=True))
    return type(told) is type(loaded) and told == loaded


def _named(every: Any, told: Any) -> Any:
    if not isinstance(every, dict) or not isinstance(told, dict):
        return told
    return {key: _named(value, told[key]) if key in told else value for key, value in every.items()}


def peak_megabytes() -> float:
    """Return the most memory that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3


def special_files(folder: Path) -> list[tuple[str, Path]]:
    """Return files that are none: what must not be waited for, and what claims to be large."""
    pipe, device, link, sparse, empty = (folder / name for name in ("pipe", "device", "folder", "sparse", "empty"))
    os.mkfifo(pipe)
    device.symlink_to("/dev/zero")
    link.mkdir()
    with sparse.open("wb") as file:
        file.truncate(2**40)
    empty.touch()
    manifest = folder / "manifest"
    manifest.write_bytes((2**60).to_bytes(8, "little") + b"{}")
    lists = folder / "lists"
    text = b"[" * 10**6
    lists.write_bytes(len(text).to_bytes(8, "little") + text)
    return [(path.name, path) for path in (pipe, device, link, sparse, empty, manifest, lists)]


def examine(n_damaged: int, n_forged: int, seed: int, show: bool = True) -> Counter[tuple[str, str]]:
    """Make the files, load each, and count what happened."""
    rng, counts = np.random.default_rng(seed), Counter[tuple[str, str]]()
    with tempfile.TemporaryDirectory() as name:
        folder, path = Path(name), Path(name) / "case.safetensors"
        originals = {subject: trained(subject) for subject in SUBJECTS}
        states = {}
        for subject, data in originals.items():
            path.write_bytes(data)
            states[subject] = resumed(path)
        cases = [("damaged", damaged)] * n_damaged + [("forged", forged)] * n_forged
        for number, (group, make) in enumerate(cases):
            subject = list(SUBJECTS)[number % len(SUBJECTS)]
            what, data = make(originals[subject], rng)
            path.write_bytes(data)
            memory = peak_megabytes()
            found, words = outcome(path, states[subject])
            if peak_megabytes() > memory + 0.5 * MEGABYTES:
                found = "takes too much memory"
            counts[group, found] += 1
            if show and found not in ("refused", "identical", "legal"):
                print(f"  {group} {number}, {subject}, {what}: {found} {words[:200]}")
        for what, special in special_files(folder):
            found, words = outcome(special, b"")
            counts["special", found] += 1
            if show and found != "refused":
                print(f"  {what}: {found} {words[:200]}")
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--damaged", type=int, default=2000)
    parser.add_argument("--forged", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    trained("MLP")
    before = peak_megabytes()
    counts = examine(arguments.damaged, arguments.forged, arguments.seed)
    most = peak_megabytes() - before
    print("| files | outcome | number |\n|---|---|---|")
    for (group, found), number in sorted(counts.items()):
        print(f"| {group} | {found} | {number} |")
    print(f"\nMost memory that any of them took: {most:.0f} MB (of {MEGABYTES:.0f}); seed {arguments.seed}.")
    bad = sum(number for (_, found), number in counts.items() if found not in ("refused", "identical", "legal"))
    raise SystemExit(1 if bad or most > MEGABYTES else 0)


if __name__ == "__main__":
    main()
