// What is shown of each part of the router's status.

import { SOURCES, svg } from "./chart.js";
import { brief, count, minuteOfDay, ms, percent, quantile, rate, span, sum, timeOfDay } from "./format.js";

const FEW_TURNS = matchMedia("(max-width: 860px)").matches ? 8 : 20;
const PHASES = ["read", "queue", "recall", "tokenize", "encode", "prefill", "decode", "remember"];
const ROLES = ["prefill", "decode", "encode"];
const BAD = new Set(["failed", "cut"]);

const OUTCOMES = { ok: "ok", rejected: "rejected", failed: "failed", cut: "cut off", client_gone: "client left" };
const STATES = {
  joining: "joining",
  ready: "ready",
  suspect: "suspect",
  ejected: "ejected",
  probing: "on probation",
  draining: "draining",
};
const RESULTS = {
  ok: "done",
  hit: "found, with an offer",
  hit_without_offer: "found",
  miss: "not found",
};

/** An element, its attributes and children; text stays text. */
export function el(name, attributes = {}, ...children) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) if (value !== undefined) node.setAttribute(key, value);
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

const words = (name) => name.replaceAll("_", " ");

/** Replace what has changed only: what has the focus, or is being read, stays. */
function fill(node, signature, ...children) {
  if (node.dataset.is === signature) return;
  node.dataset.is = signature;
  node.replaceChildren(...children);
}

/** Rows by key, in order; `cells` gives for each [signature, how to make its content, class]. */
function rows(body, items, keyOf, cells, labels) {
  const known = new Map([...body.children].map((row) => [row.dataset.key, row]));
  const wanted = items.map((item) => {
    const key = keyOf(item);
    const row = known.get(key) ?? el("tr", { role: "row", "data-key": key });
    for (const [n, [signature, make, kind]] of cells(item).entries()) {
      const cell =
        row.children[n] ??
        row.appendChild(n ? el("td", { role: "cell", class: kind, "data-label": labels[n] }) : el("th", { role: "rowheader", scope: "row", class: kind }));
      if (cell.dataset.is !== signature) fill(cell, signature, ...[make()].flat());
    }
    return row;
  });
  for (const [n, row] of wanted.entries()) if (body.children[n] !== row) body.insertBefore(row, body.children[n] ?? null);
  while (body.children.length > wanted.length) body.lastElementChild.remove();
}

const inMinute = (status, field) => {
  const buckets = status.recent.buckets.filter((one) => one.at > status.at - 60);
  return sum(buckets.map((one) => one[field] ?? 0)) / 60;
};

export function tokensBySource(buckets) {
  const total = {};
  for (const { tokens } of buckets) for (const [key, value] of Object.entries(tokens)) total[key] = (total[key] ?? 0) + value;
  return total;
}

export function figures(node, status) {
  const tokens = tokensBySource(status.recent.buckets);
  const prompt = sum(Object.values(tokens));
  const reused = sum(["cached", "pulled", "decode_cached"].map((key) => tokens[key] ?? 0));
  const firsts = status.recent.turns.map((turn) => turn.first_byte_ms).filter((value) => value !== null);
  const waiting = sum(Object.values(status.turns_waiting));
  const faults = sum(status.recent.buckets.map((one) => one.faults ?? 0));
  const told = [
    ["Prompt tokens reused", prompt ? percent(reused / prompt) : "–", prompt ? `of ${count(prompt)} in 15 min` : "no prompts yet", "lead"],
    ["Time to first token", ms(quantile(firsts, 0.5)), firsts.length ? `95 % within ${ms(quantile(firsts, 0.95))}` : "no streams yet"],
    ["Turns in flight", count(status.turns_in_flight), waiting ? `${count(waiting)} waiting` : "none waiting"],
    ["Turns per second", rate(inMinute(status, "turns")), faults ? `${count(faults)} failed in 15 min` : "none failed in 15 min", faults ? "bad" : ""],
    ["Output tokens per second", rate(inMinute(status, "completion")), "last minute"],
  ];
  fill(
    node,
    JSON.stringify(told),
    ...told.map(([name, value, more, kind]) =>
      el("div", { class: kind || undefined }, el("dt", {}, name), el("dd", {}, el("strong", {}, value), el("span", { class: "more" }, more))),
    ),
  );
}

export function legend(node, status) {
  const tokens = tokensBySource(status.recent.buckets);
  const total = sum(Object.values(tokens)) || 1;
  const shown = SOURCES.filter(({ key }) => tokens[key] || key === "cached" || key === "pulled" || key === "computed");
  fill(
    node,
    JSON.stringify([tokens, total]),
    ...shown.map(({ key, name }) =>
      el(
        "li",
        {},
        swatch(key),
        el("span", {}, name),
        el("strong", {}, percent((tokens[key] ?? 0) / total)),
        el("span", { class: "quiet" }, count(tokens[key] ?? 0)),
      ),
    ),
  );
}

const swatch = (key) => {
  const picture = svg("svg", { width: 14, height: 14, "aria-hidden": "true", class: "swatch" });
  picture.append(svg("rect", { width: 14, height: 14, rx: 3, class: `bar ${key}` }));
  return picture;
};

export function minutes(table, status) {
  const by = new Map();
  for (const bucket of status.recent.buckets) {
    const at = Math.floor(bucket.at / 60) * 60;
    by.set(at, [...(by.get(at) ?? []), bucket]);
  }
  const used = SOURCES.filter(({ key }) => status.recent.buckets.some(({ tokens }) => tokens[key]));
  const head = ["Minute", "Turns", ...used.map(({ name }) => name)];
  fill(table.tHead, JSON.stringify(head), el("tr", {}, ...head.map((name, n) => el("th", { scope: "col", class: n ? "number" : undefined }, name))));
  const lines = [...by].reverse().map(([at, buckets]) => {
    const tokens = tokensBySource(buckets);
    return [minuteOfDay(at), count(sum(buckets.map((one) => one.turns ?? 0))), ...used.map(({ key }) => count(tokens[key] ?? 0))];
  });
  fill(
    table.tBodies[0],
    JSON.stringify(lines),
    ...lines.map(([at, ...values]) => el("tr", {}, el("th", { scope: "row" }, at), ...values.map((value) => el("td", { class: "number" }, value)))),
  );
}

const bar = (share, kind, label) => {
  const meter = svg("svg", { class: `meter ${kind}`, width: 72, height: 8, viewBox: "0 0 72 8", preserveAspectRatio: "none", "aria-hidden": "true" });
  meter.append(svg("rect", { width: 72, height: 8, rx: 2, class: "track" }), svg("rect", { width: 72 * Math.min(1, share), height: 8, rx: 2, class: "value" }));
  return el("span", { class: "with-meter" }, meter, el("span", { class: "figure" }, label));
};

export function engines(table, summary, status) {
  const labels = [...table.tHead.rows[0].cells].map((cell) => cell.textContent);
  const all = [...status.engines].sort((a, b) => ROLES.indexOf(a.role) - ROLES.indexOf(b.role) || a.url.localeCompare(b.url, "en", { numeric: true }));
  rows(table.tBodies[0], all, ({ role, url }) => `${role} ${url}`, (engine) => engineCells(engine, status.at), labels);
  const ready = ROLES.map((role) => [role, all.filter((one) => one.role === role)]).filter(([, those]) => those.length);
  summary.textContent = ready.map(([role, those]) => `${those.filter((one) => one.state === "ready").length} of ${those.length} ${role} ready`).join(", ");
}

function engineCells(engine, now) {
  const { role, url, state } = engine;
  const load = state === "ejected" || state === "joining" ? null : engine.load; // what it said before means nothing now
  const fact = (name) => engine.capabilities[name]?.value;
  const version = [fact("kind") === "vllm" ? "vLLM" : fact("kind"), fact("version")].filter(Boolean).join(" ");
  const models = engine.models.length > 1 ? `${brief(engine.models[0])} and ${engine.num_models - 1} more` : (brief(engine.models[0]) ?? "no model");
  const since = span(now - engine.since);
  const others = engine.states ? Object.entries(engine.states).map(([name, n]) => `${n} see it ${STATES[name] ?? name}`).join(", ") : "";
  const blocks = fact("num_blocks");
  const kept = load?.blocks_idle ?? engine.idle_kv_blocks;
  const held = load?.leases ? `${count(load.leases)} offers held` : "";
  return [
    [
      `${role} ${url} ${models} ${version}`,
      () => [el("span", { class: `role ${role}` }, role), el("span", { class: "url" }, url.replace(/^https?:\/\//, "")), el("span", { class: "more" }, [models, version].filter(Boolean).join(" · "))],
    ],
    [
      `${state} ${since} ${engine.why} ${others}`,
      () => [el("span", { class: "state", "data-state": state }, STATES[state] ?? state), el("span", { class: "more" }, `for ${since}${state === "ready" ? "" : `: ${brief(engine.why)}`}`), others ? el("span", { class: "more" }, others) : null].filter(Boolean),
    ],
    [`${engine.in_flight}/${engine.limit}`, () => [count(engine.in_flight), engine.limit ? el("span", { class: "more" }, `of ${engine.limit}`) : null].filter(Boolean), "number"],
    [JSON.stringify([load?.running, load?.waiting]), () => (load ? [`${count(load.running)}, ${count(load.waiting)}`] : ["–"]), "number"],
    [
      JSON.stringify([load?.kv_use, blocks]),
      () => (load ? [bar(load.kv_use, load.kv_use > 0.9 ? "full" : "", percent(load.kv_use)), blocks ? el("span", { class: "more" }, `of ${count(blocks)} blocks`) : null].filter(Boolean) : ["–"]),
    ],
    [JSON.stringify([kept, held]), () => [kept === null || kept === undefined ? "–" : `${count(kept)} blocks`, held ? el("span", { class: "more" }, held) : null].filter(Boolean), "number"],
    [
      JSON.stringify(engine.lowers),
      () => {
        if (!engine.lowers.length) return [el("span", { class: "quiet" }, "nothing")];
        const names = engine.lowers.map((one) => words(one.capability)).join(", ");
        const list = el("dl", {}, ...engine.lowers.flatMap((one) => [el("dt", {}, words(one.capability)), el("dd", {}, one.words)]));
        return [el("details", {}, el("summary", {}, names), list)];
      },
    ],
  ];
}

export function turns(table, parts, status, { onlyProblems, all }) {
  const labels = [...table.tHead.rows[0].cells].map((cell) => cell.textContent);
  const isProblem = (turn) => turn.outcome !== "ok" || turn.attempts > 1;
  const those = status.recent.turns.filter((turn) => !onlyProblems || isProblem(turn));
  const shown = all ? those : those.slice(0, FEW_TURNS);
  const longest = Math.max(1, ...shown.map((turn) => turn.ms));
  const largest = Math.max(1, ...shown.map((turn) => turn.tokens.prompt ?? 0));
  const seen = new Map();
  const keyOf = (turn) => {
    const key = `${turn.at} ${turn.ms} ${turn.decode}`;
    seen.set(key, (seen.get(key) ?? 0) + 1);
    return `${key} ${seen.get(key)}`;
  };
  rows(table.tBodies[0], shown, keyOf, (turn) => turnCells(turn, longest, largest), labels);
  table.hidden = !shown.length;
  parts.none.hidden = shown.length > 0;
  parts.none.textContent = onlyProblems && status.recent.turns.length ? "None of the recent turns had problems." : "No turn has ended yet.";
  parts.more.hidden = all || those.length <= FEW_TURNS;
  parts.more.textContent = `Show all ${those.length}`;
  parts.summary.textContent = those.length > shown.length ? `the last ${shown.length}` : "";
}

function turnCells(turn, longest, largest) {
  const { tokens, phases_ms: phases } = turn;
  const host = (url) => (url ? url.replace(/^https?:\/\//, "") : null);
  const tries = turn.attempts > 1 ? `${turn.attempts} attempts` : "";
  return [
    [String(turn.at), () => [timeOfDay(turn.at)]],
    [
      `${turn.outcome} ${turn.status} ${tries}`,
      () => [el("span", { class: "outcome", "data-outcome": turn.outcome }, OUTCOMES[turn.outcome] ?? turn.outcome), el("span", { class: "more" }, [turn.status === 200 ? "" : turn.status, tries].filter(Boolean).join(", "))],
    ],
    [`${turn.endpoint} ${turn.turn}`, () => [words(turn.endpoint), el("span", { class: "more" }, [brief(turn.model), `turn ${turn.turn}`].filter(Boolean).join(", "))]],
    [`${turn.plan} ${turn.kv}`, () => (turn.plan ? [words(turn.plan), el("span", { class: "more" }, words(turn.kv ?? ""))] : ["–"])],
    [
      `${turn.prefill} ${turn.decode}`,
      () => (turn.decode ? [el("span", { class: "url" }, host(turn.prefill) ?? "alone"), el("span", { class: "more url" }, `→ ${host(turn.decode)}`)] : ["–"]),
    ],
    [
      JSON.stringify([tokens, largest]),
      () => {
        if (!tokens.prompt) return ["–"];
        const source = turn.prefill ? ["cached", "pulled", "computed"] : ["decode_cached", null, "decode_computed"];
        const parts = [tokens.cached, tokens.pulled, tokens.computed].map((value, n) => [source[n], value ?? 0]).filter(([key, value]) => key && value);
        const told = [["cached", tokens.cached], ["pulled", tokens.pulled], ["computed", tokens.computed]];
        return [
          el("span", { class: "with-meter" }, stack(parts.length ? parts : [["unknown", tokens.prompt]], largest), el("span", { class: "figure" }, count(tokens.prompt))),
          el("span", { class: "more" }, told.filter(([, value]) => value).map(([name, value]) => `${count(value)} ${name}`).join(", ")),
        ];
      },
    ],
    [String(turn.first_byte_ms), () => [ms(turn.first_byte_ms)], "number"],
    [
      JSON.stringify([turn.ms, longest]),
      () => {
        const spans = PHASES.filter((phase) => phases[phase]).map((phase) => [phase, phases[phase]]);
        const longestPhases = [...spans].sort((a, b) => b[1] - a[1]).slice(0, 2);
        return [
          el("span", { class: "with-meter" }, stack(spans, longest), el("span", { class: "figure" }, ms(turn.ms))),
          el("span", { class: "more" }, longestPhases.map(([phase, value]) => `${phase} ${ms(value)}`).join(", ")),
        ];
      },
    ],
  ];
}

/** A bar of parts, as long as their sum is of the most there is. */
function stack(parts, most) {
  const picture = svg("svg", { class: "stack", width: 96, height: 8, viewBox: "0 0 96 8", preserveAspectRatio: "none", "aria-hidden": "true" });
  picture.append(svg("rect", { width: 96, height: 8, rx: 2, class: "track" }));
  let x = 0;
  for (const [key, value] of parts) {
    const width = (96 * value) / most;
    picture.append(svg("rect", { x, width: Math.max(0.5, width - 0.5), height: 8, class: `bar ${key}` }));
    x += width;
  }
  return picture;
}

export function redis(node, status) {
  const { redis: it, offers_watched: watched } = status;
  const state = { ok: "answers", refuses: "refuses commands", silent: "does not answer" }[it.state] ?? it.state;
  const { p50, p99 } = it.latency_ms;
  const told = [
    ["State", state, it.why, it.state === "ok" ? "ready" : "ejected"],
    ["Answers within", ms(p50), p99 === undefined ? "" : `99 % within ${ms(p99)}`],
    ["Under way", count(it.pending), ""],
    ...(watched ? [["Offers to give back", count(watched), "of vLLM, before they expire"]] : []),
  ];
  const operations = Object.entries(it.operations).filter(([, n]) => n).sort((a, b) => b[1] - a[1]);
  fill(
    node,
    JSON.stringify([told, operations]),
    ...told.map(([name, value, more, kind]) =>
      el("div", {}, el("dt", {}, name), el("dd", {}, el("span", kind ? { class: "state", "data-state": kind } : {}, value), more ? el("span", { class: "more" }, more) : null)),
    ),
    ...operations.map(([name, n]) => el("div", {}, el("dt", {}, `Operations: ${RESULTS[name] ?? words(name)}`), el("dd", {}, count(n)))),
  );
}

export function bars(node, counts, { names = {}, bad = BAD } = {}) {
  const told = Object.entries(counts).filter(([, n]) => n).sort((a, b) => b[1] - a[1]);
  const total = sum(told.map(([, n]) => n));
  const lines = told.map(([name, n]) =>
    el("div", { class: bad.has(name) ? "bad" : undefined }, el("dt", {}, names[name] ?? words(name)), el("dd", {}, bar(n / total, "", count(n)))),
  );
  fill(node, JSON.stringify(told), ...(lines.length ? lines : [el("div", {}, el("dt", { class: "quiet" }, "nothing yet"), el("dd", {}))]));
}

export function totals(nodes, status) {
  bars(nodes.outcomes, status.turns, { names: OUTCOMES });
  bars(nodes.plans, status.plans);
  bars(nodes.kv, status.last_kv);
  bars(nodes.given, status.releases, { names: { ok: "given back", waits_for_ttl: "wait for their lease" } });
  bars(nodes.lowered, Object.fromEntries(status.lowered.map(({ what, why, count: n }) => [`${what}: ${words(why)}`, n])));
}
