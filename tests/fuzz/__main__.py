"""Fuzz the parsers of untrusted bytes with atheris: `python -m tests.fuzz [TARGET...]`.

Each target runs in its own process, because the first defect ends the process. The corpus is in the
tree; new inputs are stored in build/fuzz, and `--keep` adds some short ones to the tree.
"""

import argparse
import importlib
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
BUILD: Final = ROOT / "build" / "fuzz"
PARTS: Final = ("bus", "cluster", "configuration", "gate", "node", "pods", "receivers", "stored")
INSTRUMENTED: Final = (
    *(
        "muster",
        "muster_fuse",
        "muster_gate",
        "muster_health",
        "muster_labeler",
        "muster_notifier",
        "muster_plugin",
    ),
    *("nats.protocol", "aiosmtplib"),
)
RUN_S: Final = 10
"""The time limit of one run of a target; on an idle machine it takes a thousandth of that."""
MEMORY_MIB: Final = 1_024
KEPT_BYTES_MAX: Final = 200
KEPT_MAX: Final = 12
_DONE: Final = re.compile(r"stat::number_of_executed_units:\s*(\d+)")
_COVERED: Final = re.compile(r"cov: (\d+)")


def main() -> int:
    """Run the given targets, or all, one after the other; return 1 if any has a defect."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("targets", nargs="*", help="their names; without any, all")
    parser.add_argument("--seconds", type=int, default=60, help="how long each target runs")
    parser.add_argument("--keep", action="store_true", help="add new inputs to the tree's corpus")
    parser.add_argument("--one", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.one:
        return _run_here(*chosen.one)
    import_targets()
    from tests.fuzz.target import TARGETS

    unknown = sorted(set(chosen.targets) - TARGETS.keys())
    if unknown:
        parser.error(f"no target {', '.join(unknown)}; there are: {', '.join(sorted(TARGETS))}")
    names = chosen.targets or sorted(TARGETS)
    return max(_run(name, seconds=chosen.seconds, keep=chosen.keep) for name in names)


def import_targets() -> None:
    """Import every module with targets."""
    for part in PARTS:
        importlib.import_module(f"tests.fuzz.{part}")


def _run(name: str, *, seconds: int, keep: bool) -> int:
    """Run one target in its own process, and print the result; return 1 if it has a defect."""
    from tests.fuzz.target import TARGETS, to_line

    target, place = TARGETS[name], BUILD / name
    for folder in ("seeds", "new", "defects"):
        (place / folder).mkdir(parents=True, exist_ok=True)
    for number, data in enumerate(target.corpus()):
        (place / "seeds" / f"{number:03}").write_bytes(data)
    words = "".join(f'"{_word(word)}"\n' for word in target.words)
    (place / "words").write_text(words, "utf-8")
    options = [
        f"-max_total_time={seconds}",
        f"-timeout={RUN_S}",
        f"-rss_limit_mb={MEMORY_MIB}",
        f"-artifact_prefix={place / 'defects'}/",
        *([f"-dict={place / 'words'}"] if words else []),
        "-print_final_stats=1",
        "-max_len=16384",
    ]
    command = [sys.executable, "-m", "tests.fuzz", "--one", name, *options]
    began = time.monotonic()
    with (place / "log").open("w+") as log:
        code = subprocess.run(
            [*command, place / "new", place / "seeds"],
            cwd=ROOT,
            stdout=log,
            stderr=log,
            check=False,
        ).returncode
        log.seek(0)
        text = log.read()
    runs, covered = _DONE.search(text), _COVERED.findall(text)
    print(
        f"{name:24} {time.monotonic() - began:5.0f} s  {int(runs[1]) if runs else 0:9,} runs"
        f"  {covered[-1] if covered else '-':>5} branches  {'DEFECT' if code else 'ok'}",
        flush=True,
    )
    if code:
        print(f"  see {place / 'log'}; again: {sys.executable} -m tests.fuzz --one {name} FILE")
    if keep:
        new = sorted((file.read_bytes() for file in (place / "new").iterdir()), key=len)
        short = [data for data in new if 0 < len(data) <= KEPT_BYTES_MAX]
        step = max(1, len(short) // KEPT_MAX)
        file = ROOT / "tests" / "fuzz" / "corpus" / f"{name}.txt"
        lines = file.read_text("ascii").splitlines() if file.exists() else []
        kept = dict.fromkeys([*lines, *map(to_line, short[::step][:KEPT_MAX])])
        if kept:
            file.write_text("".join(f"{line}\n" for line in kept), "ascii")
    return int(code != 0)


def _word(word: str) -> str:
    """Return a word as libFuzzer's dictionaries write it; `\\xNN` stays as it is."""
    plain = re.sub(r'(?<!\\)"', r'\\"', word)
    return re.sub(r"\\(?!x[0-9a-f]{2}|\")", r"\\\\", plain)


def _run_here(name: str, *options: str) -> int:
    """Run one target in this process, as libFuzzer does."""
    import atheris
    import structlog

    structlog.configure(logger_factory=structlog.ReturnLoggerFactory())
    with atheris.instrument_imports(include=list(INSTRUMENTED), enable_loader_override=False):
        import_targets()
    from tests.fuzz import mutation
    from tests.fuzz.target import TARGETS

    def mutate(data: bytes, size_max: int, seed: int) -> bytes:
        changed = mutation.mutated(data, seed) if seed % 2 else None
        if changed is None or len(changed) > size_max:
            return bytes(atheris.Mutate(data, len(data)))
        return changed

    run = TARGETS[name].run
    atheris.Setup([sys.argv[0], *options], run, custom_mutator=mutate)
    atheris.Fuzz()
    return 0


if __name__ == "__main__":
    sys.exit(main())
