"""Pure. What a played story amounts to: steps with times, as a timeline or as one JSON object."""

from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a story. `seconds` is how long it took; `detail` is what was seen."""

    name: str
    ok: bool
    seconds: float
    detail: str


def line(step: Step, *, at_s: float) -> str:
    """Return a step as one line of the timeline; `at_s` counts from the start of the story."""
    mark = "ok    " if step.ok else "FAILED"
    return f"{at_s:6.1f} s  {mark} {step.name:<22} {step.seconds:6.2f} s  {step.detail}"


def report(steps: list[Step]) -> dict[str, object]:
    """Return the story as one object: `ok`, `seconds` and an entry a step."""
    return {
        "ok": bool(steps) and all(step.ok for step in steps),
        "seconds": round(sum(step.seconds for step in steps), 3),
        "steps": [{**asdict(step), "seconds": round(step.seconds, 3)} for step in steps],
    }
