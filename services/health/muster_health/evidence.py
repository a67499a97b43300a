"""Pure. Observations in words a person understands; each names who saw it."""

from typing import Final

from muster import vocabulary

_TEXT_MAX: Final = 500


def seen(source: str, text: str) -> vocabulary.Evidence:
    """Return one observation; a long text is cut, because a plugin may have written it."""
    cut = text if len(text) <= _TEXT_MAX else text[: _TEXT_MAX - 3] + "..."
    return vocabulary.Evidence(source=source, observed=cut)


def silent(silent_s: float, interval_s: float, *, ever_heard: bool) -> vocabulary.Evidence:
    """Say that no heartbeat came."""
    told = f"{silent_s:.1f} s, {silent_s / interval_s:.1f} beats of {interval_s:g} s"
    return seen("heartbeat", f"silent for {told}" if ever_heard else f"never heard; waited {told}")


def nobody_listens() -> vocabulary.Evidence:
    """Say that the server knew at once of no receiver for a probe."""
    return seen("probe", "nobody listens on the plugin's subject")


def no_answer(timeout_s: float) -> vocabulary.Evidence:
    """Say that a probe was delivered, and not answered."""
    return seen("probe", f"the plugin is connected and did not answer within {timeout_s:g} s")


def alive() -> vocabulary.Evidence:
    """Say that a first sign of life shows nothing wrong."""
    return seen("heartbeat", "alive, and reports nothing wrong")


def recovered(good_beats: int) -> vocabulary.Evidence:
    """Say that signs of life came back and stayed."""
    beats = "beat" if good_beats == 1 else "beats"
    return seen("heartbeat", f"{good_beats} good {beats} since it came back")


def goodbye(reason: vocabulary.StopReason, return_s: float, *, said: bool) -> vocabulary.Evidence:
    """Say that the plugin announced its end."""
    source = "" if said else ", by our setting"
    return seen("plugin", f"said goodbye ({reason}); expected back within {return_s:g} s{source}")


def overdue(return_s: float) -> vocabulary.Evidence:
    """Say that a planned end lasts too long."""
    return seen("clock", f"not back {return_s:g} s after its goodbye")
