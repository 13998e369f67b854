"""Advice on which room fits. It is recognized by its attributes: `advisor` and `report` do not import each other."""

from typing import Any

from penstock.report._model import MOST_TEXT, Code, Headline, Section, clipped
from penstock.report._part import Part, table
from penstock.units import format_bytes

_MOST_CODES = 12


def part_of_advice(advice: Any) -> Part:  # any: an advisor.Advice, or what has `options` and `best`
    """Return the part for an advice: the options, and the code of each that works."""
    options, best = list(advice.options), _best_of(advice)
    works = [option for option in options if not option.is_refused]
    verdict = f"the best is {clipped(best.name)}" if best is not None else "none of them is recommended"
    text = (
        f"{len(works)} of {len(options)} options work; {verdict}." if works else "No option works; the table says why."
    )
    section = Section(
        kind="advice",
        title="Which room fits",
        text=clipped(" ".join([text, *getattr(advice, "notes", ())]), MOST_TEXT),
        headline=Headline(
            what=clipped(f"advice: {'none' if best is None else best.name}", 80),
            peak_bytes=None if best is None else best.peak_bytes,
            is_peak_predicted=not getattr(best, "is_measured", False),
            budget_bytes=getattr(advice, "budget_bytes", None),
        ),
        tables=(
            table(
                "Options",
                ("option", "verdict", "peak", "step time over plain", "how known", "why"),
                [
                    (
                        option.name,
                        "refused" if option.is_refused else "best" if option is best else "works",
                        "-" if option.peak_bytes is None else format_bytes(option.peak_bytes),
                        "-" if option.ratio is None else f"{option.ratio:.2f}",
                        _how_known(option),
                        option.reason or "",
                    )
                    for option in options
                ],
                note="A step time of 1.10 is 10% longer than in plain training.",
            ),
        ),
        codes=tuple(
            Code(title=clipped(option.name), text=clipped(option.code, 10 * MOST_TEXT))
            for option in sorted(works, key=lambda option: option is not best)[:_MOST_CODES]  # a stable sort
            if option.code
        ),
    )
    return Part(section=section)


def _best_of(advice: Any) -> Any:  # any: an Option
    try:
        return advice.best
    except ValueError:  # nothing keeps the budget
        return None


def _how_known(option: Any) -> str:  # any: an Option
    if option.peak_bytes is None and option.ratio is None:
        return "-"
    return "measured" if getattr(option, "is_measured", False) else "predicted"
