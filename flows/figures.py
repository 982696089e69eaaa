"""Numbers as people read them: counts, times, rates, and the few final metrics that tell how a step went.

Pure functions of their arguments; nothing here reads a store or a clock.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

# What to show of a finished step, in this order: metric -> (format, label). A metric that a step lacks is left out, so
# one list serves every stage; a stage with none of these shows its first metrics as they are.
HEADLINES: dict[str, tuple[str, str]] = {
    "tokens": ("count", "tokens"),
    "rows": ("count", "rows"),
    "fill": ("percent", "full"),
    "dropped": ("count", "dropped"),
    "steps": ("count", "steps"),
    "loss": ("number", "loss"),
    "eval_loss": ("number", "validation loss"),
    "bits_per_byte": ("number", "bits/byte"),
    "exact_match": ("percent", "exact match"),
    "reward": ("number", "reward"),
    "rewards/accuracies": ("percent", "preferred"),
    "preference_accuracy": ("percent", "preferred"),
    "accuracy": ("percent", "accuracy"),
    "margin": ("number", "margin"),
    "kl": ("number", "KL"),
    "entropy": ("number", "entropy"),
    "pairs": ("count", "pairs"),
    "completions": ("count", "completions"),
    "models": ("count", "models"),
}
SHOWN = 4  # more than this many figures on one line are not read


def count(value: float) -> str:
    """1234 -> "1,234"; 1200000 -> "1.2M": exact while short, rounded to two or three digits when long."""
    if abs(value) < 100_000:
        return f"{value:,.0f}"
    for limit, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            scaled = value / limit
            return f"{scaled:.1f}{unit}" if abs(scaled) < 99.95 else f"{scaled:.0f}{unit}"
    raise AssertionError("unreachable: the value is at least 100,000")


def number(value: float) -> str:
    """Three significant digits where that is short: 2.41, 0.0832, 3.2e-05, 512; a whole number as it is: 12."""
    if isinstance(value, int):
        return f"{value:,}"
    if not math.isfinite(value):
        return str(value)
    if value == 0:
        return "0"
    if 0.001 <= abs(value) < 1000:
        digits = max(0, 2 - math.floor(math.log10(abs(value))))
        return f"{value:.{digits}f}"
    return f"{value:.2e}" if abs(value) < 1 else f"{value:,.0f}"


def counted(number: int, noun: str) -> str:
    """1 -> "1 step", 12 -> "12 steps"."""
    return f"{number:,} {noun}" + ("s" if number != 1 else "")


def percent(value: float) -> str:
    """0.422 -> "42.2%"."""
    return f"{100 * value:.1f}%"


def duration(seconds: float) -> str:
    """Seconds as "0.9 s", "28 s", "4m 02s", "3h 05m" or "2d 04h"."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60}m {whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h {whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d {whole % 86400 // 3600:02d}h"


def in_brackets(seconds: float) -> str:
    """A duration behind what took it, as " (1.1 s)"; "" below what `duration` can show."""
    return f" ({duration(seconds)})" if seconds >= 0.1 else ""


def about(seconds: float) -> str:
    """An estimate, no finer than it is known: "3 s", "50 s", "4 min", "2 h"."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    if seconds < 90 * 60:
        return f"{round(seconds / 60)} min"
    return f"{seconds / 3600:.1f} h"


def rate(value: float, unit: str) -> str:
    """14210 tokens a second -> "14.2k tok/s"."""
    if value >= 10_000_000:
        return f"{value / 1e6:.0f}M {unit}/s"
    if value >= 1_000_000:
        return f"{value / 1e6:.1f}M {unit}/s"
    if value >= 1000:
        return f"{value / 1000:.1f}k {unit}/s"
    return f"{number(value)} {unit}/s"


def size(bytes_: int) -> str:
    """Bytes as "812 B", "1.7 MB", "4.1 GB" (powers of 1000)."""
    if bytes_ < 1000:
        return f"{bytes_} B"
    value, unit = bytes_ / 1000, "kB"
    for larger in ("MB", "GB", "TB", "PB"):
        if value < 999.5:
            break
        value, unit = value / 1000, larger
    return f"{value:.1f} {unit}" if value < 99.5 else f"{value:.0f} {unit}"


def figure(name: str, value: float) -> str:
    """One live figure of a running step, with its name: "loss 2.41", "14.2k tok/s"."""
    if name.endswith("_per_second"):
        unit = {"tokens": "tok"}.get(name.removesuffix("_per_second"), name.removesuffix("_per_second"))
        return rate(value, unit)
    if name.endswith("_bytes"):
        return f"{name.removesuffix('_bytes').replace('_', ' ')} {number(value / 2**30)} GiB"
    if name == "mfu":
        return f"MFU {percent(value)}"
    return f"{name.replace('_', ' ')} {number(value)}"


def headline(metrics: Mapping[str, float]) -> str:
    """The final metrics of a step worth a line: "loss 2.17 · 98.2% full"; empty when it has none.

    Metrics of several models ("sft/exact_match") are for a table: here they only count the models.
    """
    shown = [_labelled(name, metrics[name]) for name in HEADLINES if name in metrics]
    models = {name.partition("/")[0] for name in metrics if "/" in name}
    if not shown and models:
        return f"{len(models)} model{'s' * (len(models) > 1)}"
    if not shown:
        shown = [f"{name.replace('_', ' ')} {number(value)}" for name, value in metrics.items() if _plain(value)]
    return " · ".join(shown[:SHOWN])


def _labelled(name: str, value: float) -> str:
    form, label = HEADLINES[name]
    if form == "count":
        return f"{count(value)} {label}"
    if form == "percent":
        return f"{percent(value)} {label}"
    return f"{label} {number(value)}"


def _plain(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def short(digest: str | None, digits: int = 12) -> str:
    """The first digits of a digest, without "sha256:": enough to name it on the command line."""
    return digest.removeprefix("sha256:")[:digits] if digest else ""


def listed(names: Iterable[str]) -> str:
    """ "a", "a and b", "a, b and c"."""
    items = list(names)
    if len(items) < 2:
        return "".join(items)
    return f"{', '.join(items[:-1])} and {items[-1]}"
