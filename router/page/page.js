// Fetches the router's status every other second while somebody looks, and shows it.

import { Chart } from "./chart.js";
import { span, timeOfDay } from "./format.js";
import * as views from "./views.js";

const INTERVAL = 2000;
const MOST = 15_000; // between two tries while there is no answer
const PATIENCE = 5000;

const get = (id) => document.getElementById(id);
const chart = new Chart(get("chart"), get("readout"));
const filter = { onlyProblems: false, all: false };

let status = null;
let heard = 0; // of which time what is shown is, by this machine's clock
let failures = 0;
let paused = false;
let timer = 0;

function show() {
  if (!status) return;
  const state = status.draining ? "draining" : status.ready ? "ready" : "ejected";
  const word = { draining: "Draining", ready: "Ready", ejected: "Not ready" }[state];
  get("state").dataset.state = state;
  get("state").textContent = word;
  document.title = `${word} – Backhaul router`;
  get("version").textContent = status.processes > 1 ? `${status.version}, ${status.processes} processes` : status.version;
  views.figures(get("figures"), status);
  chart.show(status.recent, status.at);
  views.legend(get("legend"), status);
  views.minutes(get("minutes"), status);
  views.engines(get("engines"), get("engines-summary"), status);
  const parts = { none: get("no-turns"), more: get("more"), summary: get("turns-summary") };
  views.turns(get("turns"), parts, status, filter);
  views.redis(get("redis"), status);
  views.totals(Object.fromEntries(["outcomes", "plans", "kv", "given", "lowered"].map((id) => [id, get(id)])), status);
}

/** Said once when it changes, so that nothing is read out every second. */
function notice(text) {
  const node = get("notice");
  if (node.textContent !== text) node.textContent = text;
  node.classList.toggle("shown", Boolean(text));
  document.body.classList.toggle("stale", Boolean(text));
}

function tick() {
  if (!heard) return;
  const age = span((performance.now() - heard) / 1000);
  get("freshness").textContent = paused ? `Paused ${age} ago` : `Updated ${age} ago`;
}

async function refresh() {
  clearTimeout(timer);
  try {
    const answer = await fetch("admin/status", { cache: "no-store", signal: AbortSignal.timeout(PATIENCE) });
    if (!answer.ok) throw new Error(`status ${answer.status}`);
    status = await answer.json();
    heard = performance.now();
    failures = 0;
    notice("");
    show();
  } catch (error) {
    failures += 1;
    const why = error.name === "TimeoutError" ? "it takes too long" : error.message;
    const since = status ? ` What is shown is of ${timeOfDay(status.at)}.` : "";
    notice(`The router does not answer: ${why}.${since}`);
  }
  tick();
  plan();
}

function plan() {
  clearTimeout(timer);
  if (!paused && !document.hidden) timer = setTimeout(refresh, Math.min(MOST, INTERVAL * 2 ** Math.min(failures, 3)));
}

document.addEventListener("visibilitychange", () => (document.hidden || paused ? clearTimeout(timer) : refresh()));
get("pause").addEventListener("click", () => {
  paused = !paused;
  get("pause").setAttribute("aria-pressed", String(paused));
  tick();
  if (paused) plan();
  else refresh();
});
get("problems").addEventListener("change", (event) => {
  filter.onlyProblems = event.target.checked;
  show();
});
get("more").addEventListener("click", () => {
  filter.all = true;
  show();
  get("turns").tabIndex = -1; // the button is gone, and the focus must not be lost with it
  get("turns").focus({ preventScroll: true });
});
setInterval(tick, 1000);
refresh();
