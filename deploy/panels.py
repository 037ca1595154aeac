"""What each panel of the chart's dashboards asks Prometheus.

Every query is over all pods, so that it is right whatever number of routers serves. The tests ask each of them of a
real Prometheus.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

ROUTERS: Final = 'namespace=~"$namespace",job=~"$job"'
ENGINES: Final = 'namespace=~"$namespace"'


@dataclass(frozen=True, slots=True)
class Panel:
    title: str
    help: str
    queries: Mapping[str, str]
    """By legend."""
    unit: str = "short"
    kind: Literal["timeseries", "stat"] = "timeseries"
    stacked: bool = False
    width: int = 8


@dataclass(frozen=True, slots=True)
class Row:
    title: str
    panels: Sequence[Panel]


def rate(name: str, by: str, matching: str = "", of: str = ROUTERS) -> str:
    return f"sum by ({by}) (rate({name}{{{of}{',' if matching else ''}{matching}}}[$__rate_interval]))"


def quantile(share: float, name: str, by: str, of: str = ROUTERS) -> str:
    return f"histogram_quantile({share}, sum by ({by}, le) (rate({name}_bucket{{{of}}}[$__rate_interval])))"


def share(name: str, part: str, whole: str) -> str:
    return f"{rate(name, 'job', part)} / {rate(name, 'job', whole)}"


def total(name: str, by: str, of: str = ROUTERS) -> str:
    return f"sum by ({by}) ({name}{{{of}}})"


R: Final = "backhaul_router_"
TURNS_OPS: Final = 'op=~"claim|save"'
"""Of Redis operations, those that turns begin and end with."""
E: Final = "backhaul_engine_"

OVERVIEW: Final = (
    Row(
        "Clients",
        (
            Panel(
                "Turns",
                "By how they ended.",
                {"{{outcome}}": rate(f"{R}turns_total", "outcome")},
                "reqps",
                stacked=True,
            ),
            Panel(
                "Turns that failed",
                "Of those that clients did not end or get refused: an error before the first byte, or after it.",
                {"{{job}}": share(f"{R}turns_total", 'outcome=~"failed|cut"', 'outcome=~"ok|failed|cut"')},
                "percentunit",
            ),
            Panel(
                "In flight, and waiting",
                "Turns being served, and those of them that wait for room in a pool.",
                {
                    "in flight": f"sum({R}turns_in_flight{{{ROUTERS}}})",
                    "wait for {{pool}}": total(f"{R}turns_waiting", "pool"),
                },
            ),
            Panel(
                "Time to first token",
                "What clients of streams wait for, prefill included.",
                {
                    "{{model}} half": quantile(0.5, f"{R}time_to_first_token_seconds", "model"),
                    "{{model}} 95 %": quantile(0.95, f"{R}time_to_first_token_seconds", "model"),
                },
                "s",
            ),
            Panel(
                "Between tokens",
                "Between two pieces of a stream, as engines send them.",
                {
                    "{{model}} half": quantile(0.5, f"{R}inter_token_seconds", "model"),
                    "{{model}} 95 %": quantile(0.95, f"{R}inter_token_seconds", "model"),
                },
                "s",
            ),
            Panel(
                "Where turns spend their time",
                "Seconds of each second, over all turns.",
                {"{{phase}}": rate(f"{R}turn_phase_seconds_sum", "phase")},
                "s",
                stacked=True,
            ),
        ),
    ),
    Row(
        "Engines, as routers see them",
        (
            Panel(
                "Ready",
                "Engines that may be given turns, on average over routers.",
                {"{{role}}": f"avg by (role) ({R}pool_ready_engines{{{ROUTERS}}})"},
            ),
            Panel(
                "States",
                "Engines by state, on average over routers.",
                {
                    "{{role}} {{state}}": "sum by (role, state) "
                    f"(avg by (role, engine, state) ({R}engine_state{{{ROUTERS}}}))"
                },
                stacked=True,
            ),
            Panel(
                "Load",
                "Requests that each engine works on, those of others included.",
                {"{{role}} {{engine}}": f"avg by (role, engine) ({R}engine_load{{{ROUTERS}}})"},
            ),
            Panel(
                "Legs, 95 %",
                "One request to an engine: prefill until its answer, decode until its end.",
                {"{{leg}}": quantile(0.95, f"{R}leg_seconds", "leg")},
                "s",
            ),
            Panel(
                "Faults of engines",
                "Requests that failed before anything had reached the client.",
                {"{{leg}} {{kind}}": rate(f"{R}leg_failures_total", "leg, kind")},
                "reqps",
            ),
            Panel(
                "Tried again",
                "On other engines; and refused to be, because too many were.",
                {
                    "{{leg}}": rate(f"{R}retries_total", "leg"),
                    "{{leg}} refused": rate(f"{R}retries_refused_total", "leg"),
                },
                "reqps",
            ),
        ),
    ),
    Row(
        "Redis",
        (
            Panel(
                "Operations",
                "By result; hit, miss and ok are good.",
                {"{{op}} {{result}}": rate(f"{R}store_operations_total", "op, result")},
                "ops",
            ),
            Panel(
                "That failed",
                "Of finding and filing records: turns go on without.",
                {
                    "{{job}}": share(
                        f"{R}store_operations_total", f'{TURNS_OPS},result=~"timeout|error|refused|skipped"', TURNS_OPS
                    )
                },
                "percentunit",
            ),
            Panel(
                "How long they take, 99 %",
                "An exchange may take redis_timeout.",
                {"{{op}}": quantile(0.99, f"{R}store_operation_seconds", "op")},
                "s",
            ),
        ),
    ),
    Row(
        "Processes",
        (
            Panel(
                "Routers",
                "Processes that serve, and those that were started in place of dead ones.",
                {
                    "processes": f"sum({R}processes{{{ROUTERS}}})",
                    "started anew": f"sum(increase({R}process_restarts_total{{{ROUTERS}}}[$__rate_interval]))",
                },
            ),
            Panel(
                "CPU of routers",
                "Cores; a process is full at one.",
                {"{{instance}}": rate("process_cpu_seconds_total", "instance")},
            ),
            Panel(
                "Memory of routers",
                "Of all processes of a pod.",
                {"{{instance}}": total("process_resident_memory_bytes", "instance")},
                "bytes",
            ),
        ),
    ),
    Row(
        "Inside the engines",
        (
            Panel(
                "KV cache in use",
                "From 0 to 1. Near 1, requests wait or are preempted.",
                {"{{instance}}": f"max by (instance) (vllm:kv_cache_usage_perc{{{ENGINES}}})"},
                "percentunit",
            ),
            Panel(
                "Requests",
                "Running, and waiting for room or for KV from elsewhere.",
                {
                    "running": f"sum(vllm:num_requests_running{{{ENGINES}}})",
                    "waiting": f"sum(vllm:num_requests_waiting{{{ENGINES}}})",
                },
            ),
            Panel(
                "Preempted",
                "Requests that lost their blocks to others, and began anew.",
                {"{{instance}}": rate("vllm:num_preemptions_total", "instance", of=ENGINES)},
                "ops",
            ),
        ),
    ),
)

REUSE: Final = (
    Row(
        "Where each prompt token came from",
        (
            Panel(
                "Prompt tokens",
                "cached: in the prefill engine's own cache, or the decode engine's if that was left alone; pulled: "
                "from the decode engine of the last turn; computed: everything else.",
                {"{{kind}}": rate(f"{R}tokens_total", "kind", 'kind=~"cached|pulled|computed"')},
                stacked=True,
                width=12,
            ),
            Panel(
                "Not computed",
                "Share of prompt tokens that were cached or pulled.",
                {"{{job}}": share(f"{R}tokens_total", 'kind=~"cached|pulled"', 'kind="prompt"')},
                "percentunit",
                width=6,
            ),
            Panel(
                "Tokens saved",
                "Prompt tokens in the time shown that nobody had to compute.",
                {"": f'sum(increase({R}tokens_total{{{ROUTERS},kind=~"cached|pulled"}}[$__range]))'},
                kind="stat",
                width=6,
            ),
        ),
    ),
    Row(
        "What routers planned",
        (
            Panel(
                "The last turn's KV",
                "offered: pulled if the engines agree; no_record: a first turn, or nothing is remembered. The others "
                "say why not.",
                {"{{kv}}": rate(f"{R}plans_total", "kv")},
                "reqps",
                stacked=True,
            ),
            Panel(
                "Why these engines",
                "",
                {"{{reason}}": rate(f"{R}plans_total", "reason")},
                "reqps",
                stacked=True,
            ),
            Panel(
                "Records found",
                "hit: with an offer of KV, or without. A miss is a first turn, or a record that is gone.",
                {"{{result}}": rate(f"{R}store_operations_total", "result", 'op="claim"')},
                "ops",
                stacked=True,
            ),
            Panel(
                "Prompts compared",
                "Prompts whose ids were asked for, to be compared with the last turn's.",
                {"{{result}}": rate(f"{R}tokenizations_total", "result")},
                "reqps",
            ),
            Panel(
                "Spliced",
                "Prompt tokens put in place of others that spell the same: KV was computed for these.",
                {"tokens": f'sum(rate({R}tokens_total{{{ROUTERS},kind="spliced"}}[$__rate_interval]))'},
            ),
            Panel(
                "Pictures, sound and film",
                "encoded: by an encoder; local: left to the engine that prefills; known: their KV is there already.",
                {"{{result}}": rate(f"{R}media_total", "result")},
                stacked=True,
            ),
            Panel(
                "Break-even",
                "New tokens up to which a decode engine that has the rest computes them itself.",
                {"tokens": f"avg({R}break_even_tokens{{{ROUTERS}}})"},
            ),
        ),
    ),
    Row(
        "Transfers between engines",
        (
            Panel(
                "Tokens pulled",
                "By which engine had computed them.",
                {"{{source}}": rate(f"{E}kv_tokens_pulled_total", "source", of=ENGINES)},
                stacked=True,
            ),
            Panel(
                "On offer, and not pulled",
                "Tokens, by reason; cached ones were there already.",
                {"{{reason}}": rate(f"{E}kv_tokens_not_pulled_total", "reason", of=ENGINES)},
                stacked=True,
            ),
            Panel(
                "Pulls that failed",
                "By reason, as engines tell; their tokens were computed.",
                {"{{reason}}": rate(f"{E}kv_pulls_failed_total", "reason", of=ENGINES)},
                "ops",
            ),
            Panel(
                "How long a pull takes",
                "",
                {
                    "{{job}} half": quantile(0.5, "vllm:nixl_xfer_time_seconds", "job", of=ENGINES),
                    "{{job}} 95 %": quantile(0.95, "vllm:nixl_xfer_time_seconds", "job", of=ENGINES),
                },
                "s",
            ),
            Panel(
                "Bytes pulled",
                "",
                {"{{job}}": rate("vllm:nixl_bytes_transferred_sum", "job", of=ENGINES)},
                "Bps",
            ),
            Panel(
                "Legs that failed at blocks",
                "They had been given blocks to pull, and the prompt was computed anew.",
                {"{{leg}} {{reason}}": rate(f"{R}kv_transfer_failures_total", "leg, reason")},
                "reqps",
            ),
        ),
    ),
    Row(
        "Blocks held for others",
        (
            Panel(
                "Held now",
                "pinned: for somebody who may be reading; idle: for a next turn, unless a request needs the room.",
                {
                    "pinned": f"sum({E}blocks_pinned{{{ENGINES}}})",
                    "idle": f"sum({E}blocks_idle{{{ENGINES}}})",
                },
            ),
            Panel(
                "Leases ended",
                "By what ended them; expired ones were waited for in vain.",
                {"{{by}}": rate(f"{E}leases_ended_total", "by", of=ENGINES)},
                "ops",
            ),
            Panel(
                "Given back unread",
                "By routers; waits_for_ttl: the engine cannot be told.",
                {"{{result}}": rate(f"{R}kv_releases_total", "result")},
                "ops",
            ),
        ),
    ),
)
