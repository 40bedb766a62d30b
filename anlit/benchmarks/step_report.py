"""What the timings of `anlit benchmark step` say: spread, rates, share of the peak, paired ratios, targets."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from scipy.stats import binom

BASE = "GPT"
CONFIDENCE = 0.95
PEER_NAMES = {"litgpt": "litgpt's GPT", "transformers": "transformers' Qwen3"}
FASTER_THAN_PEERS = {"cpu": 1.15, "gpu": 1.2}
TIME_BESIDE_BASE = {"cpu": {"nGPT": 1.12, "anGPT": 1.05}, "gpu": {"nGPT": 1.03, "anGPT": 1.01}}
MFU = {"0.5B": 0.55, "1B": 0.60}

Row = dict[str, Any]


def quartiles(values: Sequence[float]) -> dict[str, Any]:
    """Median, quartiles and the values themselves."""
    low, middle, high = np.percentile(values, (25, 50, 75))
    return {"median": float(middle), "quartiles": [float(low), float(high)], "values": list(values)}


def median_with_interval(values: Sequence[float]) -> dict[str, float]:
    """The median and between which two of the sorted values the true one lies with at least 95 % confidence.

    The interval rests on no distribution: the number of values below the true median is binomial. With fewer than six
    values no two of them are far enough apart, and it reaches from the least to the greatest.
    """
    ordered = np.sort(np.asarray(values, dtype=float))
    n = len(ordered)
    below = max(0, int(binom.ppf((1 - CONFIDENCE) / 2, n, 0.5)) - 1)  # so many may lie outside at each end
    return {"median": float(np.median(ordered)), "low": float(ordered[below]), "high": float(ordered[n - 1 - below])}


def paired_ratio(row: Mapping[str, Any], other: Mapping[str, Any], kind: str = "train") -> dict[str, float]:
    """How many times the other's time a row took, round by round."""
    pairs = zip(row["seconds"][kind], other["seconds"][kind], strict=True)
    return median_with_interval([mine / its for mine, its in pairs])


def mode(row: Mapping[str, Any]) -> str:
    return {"no": "eager", "float8": "float8"}.get(row["compiled"], "compiled")


def finish(rows: Iterable[Row], tokens: int, peak: float) -> None:
    """Add to every row that was timed its spread, rate, share of the peak, and its time beside GPT+'s in its mode.

    For float8 that is GPT+ compiled without it.
    """
    timed = [row for row in rows if row["reason"] is None]
    for row in timed:
        row["spread"] = {kind: quartiles(values) for kind, values in row["seconds"].items()}
        row["tokens_per_second"] = tokens / row["spread"]["train"]["median"]
        row["mfu"] = row["tokens_per_second"] * row["flops_per_token"] / peak
        like = "compiled" if mode(row) == "float8" else mode(row)
        base = next((other for other in timed if _is_base(other) and mode(other) == like), None)
        kinds = [] if base is None else [kind for kind in row["seconds"] if kind in base["seconds"]]
        row["beside_base"] = {kind: paired_ratio(row, base, kind) for kind in kinds} if base is not None else {}


def targets(rows: Iterable[Row], aims: str, size: str) -> list[dict[str, Any]]:
    """Each target of the preset for which both sides were timed."""
    timed = [row for row in rows if row["reason"] is None]
    found: list[dict[str, Any]] = []
    for how in ("eager", "compiled"):
        ours = {row["model"]: row for row in reversed(timed) if not row["peer"] and _is_plain(row) and mode(row) == how}
        for name, most in TIME_BESIDE_BASE.get(aims, {}).items():
            if name in ours and "train" in ours[name]["beside_base"]:
                found.append(_at_most(f"{how}: time of {name} beside GPT+", most, ours[name]["beside_base"]["train"]))
        folded = ours.get("anGPT", {}).get("beside_base", {}).get("infer")
        if aims == "gpu" and folded:
            found.append(_at_most(f"{how}: inference of folded anGPT beside GPT+", 1.0, folded))
        for name, least in ((name, MFU[size]) for name in ("GPT", "anGPT") if size in MFU and name in ours):
            found.append(_target(f"{how}: MFU of {name}", f"≥ {least:.0%}", f"{ours[name]['mfu']:.1%}",
                                 ours[name]["mfu"] >= least))  # fmt: skip
        if BASE in ours and aims in FASTER_THAN_PEERS:
            found += _beside_peers([row for row in timed if row["peer"] and mode(row) == how], ours[BASE], aims, how)
    return found


def _beside_peers(peers: list[Row], ours: Row, aims: str, how: str) -> list[dict[str, Any]]:
    """Against the fastest way to run each peer in this mode."""
    found = []
    for name in dict.fromkeys(row["model"] for row in peers):
        best = min((row for row in peers if row["model"] == name), key=lambda row: row["spread"]["train"]["median"])
        ratio, least = paired_ratio(best, ours), FASTER_THAN_PEERS[aims]
        text = _interval(ratio)
        found.append(_target(f"{how}: GPT+'s speed beside {PEER_NAMES.get(name, name)}", f"≥ {least:g} ×", text,
                             ratio["median"] >= least))  # fmt: skip
        if aims == "gpu" and best["peak_bytes"] and ours["peak_bytes"]:
            measured = f"{ours['peak_bytes'] / best['peak_bytes']:.2f} ×"
            found.append(_target(f"{how}: GPT+'s memory beside {PEER_NAMES.get(name, name)}", "≤ 1 ×", measured,
                                 ours["peak_bytes"] <= best["peak_bytes"]))  # fmt: skip
    return found


def _is_plain(row: Mapping[str, Any]) -> bool:
    return row["mechanism"] == "plain"


def _is_base(row: Mapping[str, Any]) -> bool:
    return row["model"] == BASE and _is_plain(row)


def _at_most(what: str, most: float, ratio: Mapping[str, float]) -> dict[str, Any]:
    return _target(what, f"≤ {most:g} ×", _interval(ratio), ratio["median"] <= most)


def _interval(ratio: Mapping[str, float]) -> str:
    return f"{ratio['median']:.3f} × ({ratio['low']:.3f} – {ratio['high']:.3f})"


def _target(what: str, wanted: str, measured: str, met: bool) -> dict[str, Any]:
    return {"what": what, "wanted": wanted, "measured": measured, "met": met}
