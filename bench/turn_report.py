"""The tables of `bench.turn`, and the goals they are held to."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from bench.stack import provenance
from engine.config import EngineConfig

BLOCK_SIZE: int = EngineConfig.model_fields["block_size"].default
SPEEDUP_GOAL = 3.0
COLUMNS = (
    *("prompt_tokens", "new_tokens", "computed_prefill", "computed_decode"),
    *("pulled_back", "handed_over", "hits_prefill", "hits_decode"),
)


@dataclass(frozen=True, slots=True)
class Sample:
    """One turn, served in one way. All but the first few fields are prompt tokens, by the engines' own counters."""

    arm: str
    turn: int
    prompt_tokens: int
    known_tokens: int
    """Those whose KV the last turn left behind."""
    ttft: float
    """Seconds."""
    plan: str
    """The router's reason, if it gives one."""
    computed_prefill: int
    computed_decode: int
    num_computing: int
    """Engines that computed any."""
    pulled_back: int
    """Pulled by prefill engines from decode engines."""
    handed_over: int
    """Pulled by decode engines from prefill engines."""
    hits_prefill: int
    """Found by prefill engines in their own prefix caches."""
    hits_decode: int

    @property
    def new_tokens(self) -> int:
        return self.prompt_tokens - self.known_tokens

    @property
    def computed(self) -> int:
        return self.computed_prefill + self.computed_decode

    @property
    def beyond_bound(self) -> int:
        """Tokens computed beyond the new ones and one block per engine that worked; at most 0 if none was wasted."""
        return self.computed - self.new_tokens - BLOCK_SIZE * self.num_computing


def print_report(samples: Sequence[Sample], settings: Mapping[str, Any]) -> None:
    print(
        f"TTFT of a growing chat: {settings['model']}, {settings['prefill']} prefill and {settings['decode']} decode "
        f"engine(s), {settings['repeat']} chat(s), answers of {settings['answer']} tokens"
    )
    print(provenance())
    _print_turns(samples)
    _print_summary(summary(samples), last=max(s.turn for s in samples))


def to_json(samples: Sequence[Sample], settings: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "provenance": provenance(),
        "settings": dict(settings),
        "block_size": BLOCK_SIZE,
        "summary": summary(samples),
        "samples": [asdict(sample) for sample in samples],
    }


def summary(samples: Sequence[Sample]) -> dict[str, dict[str, Any]]:
    """Per arm, over the turns after the first."""
    later = [sample for sample in samples if sample.turn > 1]
    ttft = {arm: statistics.median(s.ttft for s in later if s.arm == arm) for arm in _arms(later)}
    return {
        arm: {
            "ttft_seconds": ttft[arm],
            "ttft_over_ours": ttft[arm] / ttft["ours"],
            "history_tokens": round(statistics.median(s.known_tokens for s in own)),
            "new_tokens": sum(s.new_tokens for s in own),
            "computed_tokens": sum(s.computed for s in own),
            "worst_beyond_bound": max(s.beyond_bound for s in own),
            "worst_turn": max(own, key=lambda s: s.beyond_bound).turn,
        }
        for arm in ttft
        for own in [[s for s in later if s.arm == arm]]
    }


def _print_turns(samples: Sequence[Sample]) -> None:
    print(f"{'':34}|{'computed':^13}|{'pulled':^13}|{'own cache':^13}|")
    print(
        f"{'turn':>4} {'':<10}{'prompt':>6} {'new':>4} {'TTFT ms':>7} "
        f"|{'on P':>6} {'on D':>6}|{'D→P':>6} {'P→D':>6}|{'P':>6} {'D':>6}| plan"
    )
    for turn in sorted({sample.turn for sample in samples}):
        for arm in _arms(samples):
            own = [sample for sample in samples if (sample.turn, sample.arm) == (turn, arm)]
            prompt, new, *sources = (round(statistics.median(getattr(s, name) for s in own)) for name in COLUMNS)
            ttft = 1e3 * statistics.median(s.ttft for s in own)
            plans = ", ".join(sorted({s.plan for s in own if s.plan}))
            print(
                f"{turn if arm == 'ours' else '':>4} {arm:<10}{prompt:>6} {new:>4} {ttft:>7.0f} "
                + "".join(f"|{a:>6} {b:>6}" for a, b in zip(sources[::2], sources[1::2], strict=True))
                + f"| {plans}".rstrip()
            )


def _print_summary(arms: Mapping[str, Mapping[str, Any]], last: int) -> None:
    print(f"\nTurns 2 to {last}:")
    print(f"{'':<10} {'TTFT ms':>8} {'of ours':>8} {'new':>7} {'computed':>9} {'per new':>8}")
    for arm, row in arms.items():
        share = row["computed_tokens"] / row["new_tokens"]
        print(
            f"{arm:<10} {1e3 * row['ttft_seconds']:>8.0f} {row['ttft_over_ours']:>7.1f}x {row['new_tokens']:>7} "
            f"{row['computed_tokens']:>9} {share:>7.2f}x"
        )
    ours, recompute = arms["ours"], arms["recompute"]
    ratio = recompute["ttft_over_ours"]
    print(
        f"Median history {ours['history_tokens']} tokens; recompute takes {ratio:.1f}x of ours, "
        f"goal at least {SPEEDUP_GOAL:.0f}x: {_verdict(ratio >= SPEEDUP_GOAL)}"
    )
    worst = ours["worst_beyond_bound"]
    where = (
        f"the worst turn of ours, {ours['worst_turn']}, computed {abs(worst)} tokens {'over' if worst > 0 else 'under'}"
    )
    print(f"Bound on computing: new tokens + one block of {BLOCK_SIZE} per engine and turn; {where} it: "
          f"{_verdict(worst <= 0)}")  # fmt: skip


def _verdict(good: bool) -> str:
    return "met" if good else "missed"


def _arms(samples: Iterable[Sample]) -> list[str]:
    order = ("ours", "reference", "recompute")
    return sorted({sample.arm for sample in samples}, key=order.index)
