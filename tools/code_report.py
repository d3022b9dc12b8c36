"""Measure the code: size, what one update enters, long functions, repeated names, and words that are not the field's.

``python tools/code_report.py`` prints everything, with every finding. ``--check`` prints only the private terms and the
docstrings that are riddles, and exits with 1 when there is one. ``--skip-train`` leaves out the training (a few seconds).
"""

import argparse
import ast
import io
import re
import sys
import tokenize
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "tailguard"
LONG = 60  # lines; a longer function does not fit on a screen
GOALS = {"modules": 15, "functions": 80}
RIDDLES = re.compile(r"(What|Where|Whether|Who|Whose|Which|How|When|Of|As|The same|Like|Not|Also|And|All that)\b")
# Same name, same meaning: entry points, one `section` per part of the report, the settings of each package, and the CVaR of
# a sample (arrays) and of a prediction (tensors).
SHARED_NAMES = frozenset({"main", "section", "module config", "cvar"})


@dataclass(frozen=True)
class Term:
    """A word that is private to this project, and the word that the field uses.

    :param pattern: regular expression that finds it; case is ignored.
    :param field: what to write instead.
    :param within: parts of the path to which it applies; empty is everywhere.
    :param legal: regular expressions of ordinary uses; a match that lies inside such a use is no finding.
    """

    pattern: str
    field: str
    within: tuple[str, ...] = ()
    legal: tuple[str, ...] = ()


def _word(*words: str) -> str:
    """Match whole words, also as parts of snake_case and CamelCase names."""
    camel = "|".join(word.capitalize() for word in words)
    return rf"(?<![a-zA-Z])(?:{'|'.join(words)})(?![a-zA-Z])|(?<=[a-z])(?-i:{camel})(?![a-z])"


ENGINE = ("tailguard/ppo", "tailguard/optim", "tailguard/robust")
AGENTS = (
    *("tailguard/ppo", "tailguard/robust", "tailguard/evaluate", "tailguard/experiments", "tailguard/population"),
    *("tailguard/cli", "tailguard/config", "tailguard/envs", "docs/", "README", "CONTRIBUTING", "SECURITY"),
)
COMPUTER_MEMORY = (
    r"(flat|same|such|working|float32|shared|in|into|O\(1\)|less|more|much|own|into their) memory",
    r"memory (of|on|in) (the|a|an|another|every|all) (CPU|GPU|machine|process|training|run|environments)",
    r"memory (layout|format|map|that|allocated|is allocated|per|use|leak|beside)",
    r"(keeps|saves|reuses?|use up|bounds?|out of|bytes of|free|disk,|machine,) (the |its |their |new )?memory",
    r"[Mm]emory: .*",
)
MEMORY_KEY = (
    r"config\.memory\b",
    r":param memory:",
    r"memory: Literal",
    r"""["'`]memory(["'`]| must be)""",
    "memory=",
    "memory ==",
)
STATISTICAL_SLOPE = (
    ".*[Pp]lateau.*",
    ".*[Ll]east.squares.*",
    r"def slope\(self\) -> float.*",
    r"slope = self\.slope",
    ".*no slope.*",
)
TRACK_ON_DISK = (
    r"track[- _]record\w*",
    r"(keeps?|kept) track",
    r"tracks?\.(csv|json)",
    r"\.track\(items",
    r"""["'`]tracks?["'`]""",
    ".*<track.*",
)
LAW_ON_DISK = (r"square-root law", r"""["'`]law["'`]""", r".*\balias.*", r"critic\.law\b")
REPORTS = (
    r"\b(the|five) seeds? (say|says|ask|asks|name|names|call|calls|want|wants|documents?)\b",
    r"\b[Tt]he seeds' (names?|order|keys?|reading|number|alpha|floor|mixed|own|words?|call|option|0|[35])\b",
    r"\bnames of the seeds\b|\bThe seeds' and\b|\bno seed (copies|reports|says|names)\b",
)
# The table of the design document, section 6. Names in YAML files and in files on disk stay, and are legal here.
TERMS = (
    Term(_word("laws?"), "return distribution", legal=LAW_ON_DISK),
    Term(_word("slopes?"), "gradient, grad_*", ENGINE, STATISTICAL_SLOPE),
    Term(r"\binto_(?!account\b)\w+", "grad_*", ENGINE),
    Term(_word("strips"), "sequences, sequence layout"),
    Term(_word("blanks?"), "reset steps", legal=(r"blank (line|cell|page)s?", ".*target=.?_blank.*")),
    Term(_word("wish", "wishes"), "target, adversarial objective"),
    Term(_word("wanted", "unwanted"), "target, needed, expected"),
    Term(_word("dials?"), "alpha-conditioned; tunable hyperparameter"),
    Term(_word("watched", "watches"), "return-augmented"),
    Term(_word("venues?"), "backtest window"),
    Term(_word("tracks?"), "account history", legal=TRACK_ON_DISK),
    Term(r"\b(def|window\.|BacktestWindow\.) ?follow\b", "trade"),
    Term(_word("seats?", "crews?", "desks?"), "worker, executor, process handle", legal=(r"\bdesk_\w+",)),
    Term(_word("relay", "relays"), "log forwarding"),
    Term(_word("herds?"), "population"),
    Term(_word("blueprints?", "durable", "durably"), "serialization, atomic files"),
    Term(
        r"(import|tailguard[\w.]*\.)\s?(health|controls|thin|words|judging|fused_\w+)\b",
        "diagnostics, schedules, downsample ...",
    ),
    Term(r"\bjudging\b", "evaluation"),
    Term(r"\brooms?\b", "package", legal=(r"(hardly|more|no|some|leaves?|much|little) room", r"room (for|to)\b")),
    Term(r"\bhouse\b", "architecture"),
    Term(r"what (it|they|he) offers?\b", "public API"),
    Term(r"\bin force\b", "active"),
    Term(r"\b(go|goes|going|went|gone) on\b", "resume, continue"),
    Term(r"\bwip(e|es|ed|ing)\b", "reset"),
    Term(r"\bcrown(s|ed|ing)?\b", "select the winner"),
    Term(r"\bspoi(l|ls|lt|ling)\b", "perturbed, damaged"),
    Term(r"\bagents? for (a|the|every|each|this|two|another) tails?\b|\bagents? for tails\b", "risk-averse (CVaR) agent"),
    Term("|".join(REPORTS), "the audit reports"),
    Term(_word("pieces?"), "per-range step scaling", ("tailguard/optim",), (r"\b(in|into) (one )?pieces?\b",)),
    Term(_word("anchors?"), "fallback of the step scaling", ("tailguard/optim", "docs/concepts")),
    Term(r"\b(action|into)_outputs\b|\b(policy|rollout|batch)\.outputs\b", "distribution parameters, dist_params"),
    Term(r"\bmemor(y|ies)\b", "hidden state, recurrent state", AGENTS, COMPUTER_MEMORY + MEMORY_KEY),
    Term(r"beta\w*: (the )?memory\b|: the memory of the signal", "decay rate; autocorrelation", ("tailguard/",)),
    Term(r"\bfused\b", "compiled", ("tailguard/ppo",), (".*([Tt]orch|Adam).*",)),
)
TEXTS = (
    "README.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "docs/**/*.md",
    "configs/*.yaml",
    "src/**/*.py",
    "src/**/*.js",
    "benchmarks/*.py",
    "tools/*.py",
)
NOT_READ = ("tools/code_report.py",)  # the list of the words itself
ONE = "`one` as a variable: the thing's name"


@dataclass(frozen=True, order=True)
class Finding:
    """A line that should change.

    :param path: of the file, from the root of the repository.
    :param line: its number.
    :param text: what was found, and what to write instead.
    """

    path: str
    line: int
    text: str

    def __str__(self) -> str:
        """Return path, line and text as compilers print them."""
        return f"{self.path}:{self.line}: {self.text}"


def texts() -> list[Path]:
    """Return every file that a user or a contributor reads."""
    found = {path for pattern in TEXTS for path in ROOT.glob(pattern)}
    return sorted(path for path in found if path.relative_to(ROOT).as_posix() not in NOT_READ)


def private_terms(text: str, path: str) -> Iterator[Finding]:
    """Find the private terms of a text.

    :param text: the whole file.
    :param path: its name, from the root of the repository; terms may apply to parts of the tree only.
    """
    terms = [term for term in TERMS if not term.within or any(part in path for part in term.within)]
    for number, line in enumerate(text.splitlines(), start=1):
        for term in terms:
            legal = [match.span() for pattern in term.legal for match in re.finditer(pattern, line)]
            for match in re.finditer(term.pattern, line, re.IGNORECASE):
                if not any(start <= match.start() and match.end() <= end for start, end in legal):
                    yield Finding(path, number, f"{match.group().strip()!r}: {term.field}")


def variables_named_one(text: str, path: str) -> Iterator[Finding]:
    """Find variables whose name is `one` and that are not the number 1.

    :param text: Python source.
    :param path: its name.
    """
    if re.search(r"\bone = .*\(1\.0\)$", text, re.MULTILINE):  # the number 1 in the precision at hand, beside zero and half
        return
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.NAME and token.string == "one":
            yield Finding(path, token.start[0], ONE)


def riddles(text: str, path: str) -> Iterator[Finding]:
    """Find docstrings that open like a question instead of saying what the thing does or is.

    :param text: Python source.
    :param path: its name.
    """
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = (ast.get_docstring(node) or "").partition("\n")[0]
            if RIDDLES.match(first):
                line = node.body[0].lineno
                yield Finding(path, line, f"docstring: {first}")


def findings() -> dict[str, list[Finding]]:
    """Return what ``--check`` refuses, by kind."""
    found: dict[str, list[Finding]] = {"private terms": [], "docstrings that are riddles": []}
    for path in texts():
        text, name = path.read_text(encoding="utf-8"), path.relative_to(ROOT).as_posix()
        found["private terms"] += private_terms(text, name)
        if name.startswith("src/") and path.suffix == ".py":
            found["private terms"] += variables_named_one(text, name)
            found["docstrings that are riddles"] += riddles(text, name)
    return found


def definitions(tree: ast.Module) -> Iterator[str]:
    """Name the classes and the public functions at the top of a module."""
    for node in tree.body:
        if isinstance(node, ast.ClassDef) or (isinstance(node, ast.FunctionDef) and not node.name.startswith("_")):
            yield node.name.removeprefix("_")


def repeated_names() -> dict[str, list[str]]:
    """Return the names of modules, classes and public functions that more than one module defines, with those modules."""
    places = defaultdict(list)
    for path in sorted(SOURCE.rglob("*.py")):
        module = path.relative_to(SOURCE).with_suffix("").as_posix()
        # ppo/compiled/update.py is ppo/update.py, written a second time for speed.
        if path.stem not in ("__init__", "__main__") and path.parent.name != "compiled":
            places[f"module {path.stem}"].append(module)
        for name in definitions(ast.parse(path.read_text(encoding="utf-8"))):
            places[name].append(module)
    return {name: where for name, where in sorted(places.items()) if len(where) > 1 and name not in SHARED_NAMES}


def long_functions() -> list[Finding]:
    """Return the functions of more than 60 lines, signature and docstring included."""
    found = []
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                if length > LONG:
                    found.append(Finding(path.relative_to(ROOT).as_posix(), node.lineno, f"{node.name}: {length} lines"))
    return sorted(found)


def entered(call: Callable[[], Any]) -> dict[str, set[str]]:
    """Return the functions of Tailguard that a call enters, by module; comprehensions count as part of their function.

    :param call: takes no argument. Compiled code is entered once, where Python calls it.
    """
    seen: set[CodeType] = set()

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            seen.add(frame.f_code)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(before)
    found = defaultdict(set)
    for code in seen:
        path = Path(code.co_filename)
        if path.is_relative_to(SOURCE) and not code.co_name.startswith("<"):
            found[path.relative_to(SOURCE).as_posix()].add(code.co_qualname)
    return dict(found)


def train_entered() -> dict[str, set[str]]:
    """Return what one ``train()`` of a default recurrent agent enters, its second one: the first compiles and imports."""
    from stable_baselines3.common.env_util import make_vec_env

    from tailguard import DistributionalPPO

    calls = []

    class Counted(DistributionalPPO):
        def train(self) -> None:
            calls.append(entered(super().train))

    model = Counted("MlpLstmPolicy", make_vec_env("CartPole-v1", n_envs=8, seed=0), n_steps=64, seed=0)
    model.learn(2 * 8 * 64)
    return calls[-1]


def print_report(train: bool) -> None:
    """Print everything but what ``--check`` prints.

    :param train: include what one update enters.
    """
    sources = sorted(SOURCE.rglob("*.py"))
    lines = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in sources)
    print(f"src: {len(sources)} files, {lines:,} lines")
    if train:
        modules = train_entered()
        functions = sum(len(names) for names in modules.values())
        print(
            f"one train() of a default recurrent agent: {len(modules)} modules (goal {GOALS['modules']}), "
            f"{functions} functions (goal {GOALS['functions']})"
        )
        for module, names in sorted(modules.items()):
            print(f"  {module}: {', '.join(sorted(names))}")
    functions_found = long_functions()
    print(f"functions over {LONG} lines: {len(functions_found)}")
    print("".join(f"  {finding}\n" for finding in functions_found), end="")
    repeated = repeated_names()
    print(f"names of more than one thing: {len(repeated)}")
    print("".join(f"  {name}: {', '.join(where)}\n" for name, where in repeated.items()), end="")


def main() -> int:
    """Print the report, or check the language."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="language only; exit code 1 when something is left")
    parser.add_argument("--skip-train", action="store_true", help="do not train an agent")
    parser.add_argument("--only", default="", metavar="PATH", help="findings of files whose path contains this")
    arguments = parser.parse_args()
    if not arguments.check:
        print_report(not arguments.skip_train)
    left = {kind: [f for f in found if arguments.only in f.path] for kind, found in findings().items()}
    for kind, found in left.items():
        print(f"{kind}: {len(found)}")
        print("".join(f"  {finding}\n" for finding in found), end="")
    return 1 if arguments.check and any(left.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
