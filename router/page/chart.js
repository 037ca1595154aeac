// The one chart: prompt tokens by source, a stacked bar per moment, in plain SVG.

import { count, minuteOfDay, rate, sum, timeOfDay } from "./format.js";

export const SOURCES = [
  { key: "cached", name: "Prefill engine’s cache", short: "cached" },
  { key: "pulled", name: "Pulled from decode engine", short: "pulled" },
  { key: "decode_cached", name: "Decode engine’s cache", short: "cached on decode" },
  { key: "decode_computed", name: "Computed on decode engine", short: "computed on decode" },
  { key: "computed", name: "Computed on prefill engine", short: "computed" },
  { key: "unknown", name: "Not told", short: "not told" },
];

const SVG = "http://www.w3.org/2000/svg";
const MINUTES = 15;
const MARGIN = { left: 44, right: 4, top: 10, bottom: 22 };

export function svg(name, attributes = {}, ...children) {
  const node = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...children);
  return node;
}

/** What fills the bars: two of them are hatched, so that colour is not all that tells them apart. */
function patterns() {
  const hatched = (id, key) =>
    svg(
      "pattern",
      { id, width: 5, height: 5, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" },
      svg("rect", { width: 5, height: 5, class: `soft ${key}` }),
      svg("rect", { width: 2.5, height: 5, class: `fill ${key}` }),
    );
  return svg("defs", {}, hatched("hatch-cached", "cached"), hatched("hatch-computed", "computed"));
}

const nice = (top) => {
  const unit = 10 ** Math.floor(Math.log10(top));
  return unit * [1, 2, 2.5, 5, 10].find((step) => step * unit >= top);
};

export class Chart {
  constructor(box, readout) {
    this.box = box;
    this.readout = readout;
    this.at = null; // of the moment that is read out
    this.columns = [];
    box.addEventListener("pointermove", (event) => this.point(event));
    box.addEventListener("pointerleave", () => this.choose(null));
    box.addEventListener("blur", () => this.choose(null));
    box.addEventListener("keydown", (event) => this.key(event));
    new ResizeObserver(() => this.draw()).observe(box);
  }

  /** Buckets of the router, and its time. */
  show(recent, now) {
    this.recent = recent;
    this.now = now;
    this.draw();
  }

  /** Buckets put together, as many as there is room for. */
  gather(width) {
    const { buckets, bucket_seconds: seconds } = this.recent;
    const perColumn = [1, 2, 3, 6, 12].find((n) => (MINUTES * 60) / (n * seconds) <= width / 5) ?? 12;
    const step = perColumn * seconds;
    const end = (Math.floor(this.now / step) + 1) * step;
    const columns = Array.from({ length: (MINUTES * 60) / step }, (_, n, at = end - MINUTES * 60 + n * step) => ({
      at,
      turns: 0,
      tokens: {},
    }));
    for (const bucket of buckets) {
      const column = columns[Math.floor((bucket.at - columns[0].at) / step)];
      if (!column) continue;
      column.turns += bucket.turns ?? 0;
      for (const [key, value] of Object.entries(bucket.tokens)) column.tokens[key] = (column.tokens[key] ?? 0) + value;
    }
    this.step = step;
    this.columns = columns;
  }

  draw() {
    if (!this.recent) return;
    const width = this.box.clientWidth, height = this.box.clientHeight;
    const inner = { width: width - MARGIN.left - MARGIN.right, height: height - MARGIN.top - MARGIN.bottom };
    if (inner.width <= 0 || inner.height <= 0) return;
    this.gather(inner.width);
    this.inner = inner;
    const rates = this.columns.map((column) => sum(Object.values(column.tokens)) / this.step);
    const top = nice(Math.max(1, ...rates));
    const y = (value) => MARGIN.top + inner.height * (1 - value / top);
    const slot = inner.width / this.columns.length;
    const picture = svg("svg", { width, height, viewBox: `0 0 ${width} ${height}`, "aria-hidden": "true" }, patterns());
    for (const part of [0, 0.25, 0.5, 0.75, 1]) {
      const at = Math.round(y(part * top)) + 0.5;
      picture.append(svg("line", { x1: MARGIN.left, x2: width - MARGIN.right, y1: at, y2: at, class: part ? "grid" : "axis" }));
      if (part * 2 === Math.round(part * 2)) {
        picture.append(svg("text", { x: MARGIN.left - 8, y: at + 4, class: "tick end" }, rate(part * top)));
      }
    }
    const every = inner.width < 420 ? 300 : 180;
    for (const [n, column] of this.columns.entries()) {
      if (column.at % every === 0 && n * slot > 12 && n * slot < inner.width - 18) {
        const x = MARGIN.left + n * slot;
        picture.append(svg("text", { x, y: height - 5, class: "tick middle" }, minuteOfDay(column.at)));
      }
      let base = 0;
      for (const { key } of SOURCES) {
        const value = (column.tokens[key] ?? 0) / this.step;
        if (!value) continue;
        const low = y(base), high = y(base + value);
        const rect = { x: MARGIN.left + n * slot + 0.5, y: high, width: Math.max(1, slot - 1) };
        picture.append(svg("rect", { ...rect, height: Math.max(0.75, low - high), class: `bar ${key}` }));
        base += value;
      }
    }
    this.cursor = svg("rect", { y: MARGIN.top, width: slot, height: inner.height, class: "cursor", visibility: "hidden" });
    picture.append(this.cursor);
    this.box.replaceChildren(picture);
    this.choose(this.at);
  }

  point(event) {
    const x = event.clientX - this.box.getBoundingClientRect().left - MARGIN.left;
    const n = Math.floor((x / this.inner.width) * this.columns.length);
    this.choose(this.columns[n]?.at ?? null);
  }

  key(event) {
    const last = this.columns.length - 1;
    const n = this.columns.findIndex((column) => column.at === this.at);
    const to = {
      ArrowLeft: n < 0 ? last : Math.max(0, n - 1),
      ArrowRight: n < 0 ? last : Math.min(last, n + 1),
      Home: 0,
      End: last,
    }[event.key];
    if (event.key === "Escape") this.choose(null);
    if (to === undefined) return;
    event.preventDefault();
    this.choose(this.columns[to].at);
  }

  choose(at) {
    const n = this.columns.findIndex((column) => column.at === at);
    this.at = n < 0 ? null : at;
    if (n < 0) {
      this.cursor?.setAttribute("visibility", "hidden");
      this.readout.textContent = "";
      return;
    }
    const column = this.columns[n];
    this.cursor.setAttribute("x", MARGIN.left + (n * this.inner.width) / this.columns.length);
    this.cursor.setAttribute("visibility", "visible");
    const parts = SOURCES.filter(({ key }) => column.tokens[key]).map(({ key, short }) => `${count(column.tokens[key])} ${short}`);
    const text = `${timeOfDay(column.at)}, ${this.step} s: ${column.turns} turns, ${parts.join(", ") || "no prompt tokens"}`;
    if (this.readout.textContent !== text) this.readout.textContent = text;
  }
}
