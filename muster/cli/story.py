"""Pure: What a played story amounts to: steps with times, as a timeline or as one JSON object."""

import msgspec


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """One step of a story. `seconds` is how long it took; `detail` is what was seen."""

    name: str
    ok: bool
    seconds: float
    detail: str


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """A story as far as it was played; `ok` if every step came out."""

    ok: bool
    seconds: float
    steps: tuple[Step, ...]


def report(steps: list[Step], *, complete: bool) -> Report:
    """Return what the steps amount to; a story that was not played to its end is not ok."""
    return Report(
        ok=complete and all(step.ok for step in steps),
        seconds=round(sum(step.seconds for step in steps), 3),
        steps=tuple(msgspec.structs.replace(s, seconds=round(s.seconds, 3)) for s in steps),
    )


def line(step: Step, *, at_s: float) -> str:
    """Return a step as one line of the timeline; `at_s` counts from the start of the story."""
    mark = "ok    " if step.ok else "FAILED"
    return f"{at_s:6.1f} s  {mark} {step.name:<20} {step.seconds:5.2f} s  {step.detail}"
