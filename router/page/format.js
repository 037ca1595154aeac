// How numbers and times are written.

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const short = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 3 });

export const count = (value) => (value < 10_000 ? whole.format(value) : short.format(value));

export const rate = (value) => (value === 0 ? "0" : value < 10 ? value.toFixed(1) : count(value));

export const percent = (share) =>
  share === 0 || share >= 0.995 ? `${Math.round(100 * share)} %` : `${(100 * share).toFixed(share < 0.1 ? 1 : 0)} %`;

/** A name that fits its place; whoever needs all of a long one asks the API. */
export const brief = (text) => (text && text.length > 40 ? `${text.slice(0, 39)}…` : text);

/** Milliseconds in the unit that suits them. */
export function ms(value) {
  if (value === undefined || value === null) return "–";
  if (value < 1) return `${value.toFixed(2)} ms`;
  if (value < 10) return `${value.toFixed(1)} ms`;
  if (value < 1000) return `${Math.round(value)} ms`;
  return `${(value / 1000).toFixed(value < 10_000 ? 2 : 1)} s`;
}

/** How long ago, or for how long, roughly. */
export function span(seconds) {
  const s = Math.max(0, Math.round(seconds));
  if (s < 90) return `${s} s`;
  if (s < 90 * 60) return `${Math.round(s / 60)} min`;
  if (s < 36 * 3600) return `${Math.round(s / 3600)} h`;
  return `${Math.round(s / 86_400)} d`;
}

const clock = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit", second: "2-digit" });
const hours = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit" });

export const timeOfDay = (seconds) => clock.format(new Date(1000 * seconds));
export const minuteOfDay = (seconds) => hours.format(new Date(1000 * seconds));

/** The value below which a share of the values are. */
export function quantile(values, share) {
  const sorted = [...values].sort((a, b) => a - b);
  return sorted.length ? sorted[Math.floor(share * (sorted.length - 1))] : undefined;
}

export const sum = (values) => values.reduce((total, value) => total + value, 0);
