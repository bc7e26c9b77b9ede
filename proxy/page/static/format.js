// Numbers as people read them.

const NONE = "–";

const known = (value) => typeof value === "number" && Number.isFinite(value);

export function count(value) {
  if (!known(value)) return NONE;
  if (value >= 1e6) return `${(value / 1e6).toFixed(1)} M`;
  if (value >= 1e4) return `${(value / 1e3).toFixed(1)} k`;
  return String(Math.round(value));
}

/** A rate: one decimal below ten. */
export function rate(value) {
  if (!known(value)) return NONE;
  return value > 0 && value < 10 ? value.toFixed(1) : count(value);
}

export function percent(value) {
  return known(value) ? `${Math.round(value * 100)} %` : NONE;
}

export function seconds(value) {
  if (!known(value)) return NONE;
  if (value === 0) return "0";
  if (value < 0.00005) return "<0.1 ms";
  if (value < 0.01) return `${(value * 1000).toFixed(1)} ms`;
  if (value < 1) return `${Math.round(value * 1000)} ms`;
  return value < 100 ? `${value.toFixed(value < 10 ? 2 : 1)} s` : `${Math.round(value)} s`;
}

export function duration(value) {
  if (!known(value)) return NONE;
  const whole = Math.floor(value);
  if (whole < 60) return `${whole} s`;
  if (whole < 3600) return `${Math.floor(whole / 60)} min`;
  if (whole < 172800) return `${Math.floor(whole / 3600)} h ${Math.floor((whole % 3600) / 60)} min`;
  return `${Math.floor(whole / 86400)} days`;
}

export function bytes(value) {
  if (!known(value)) return NONE;
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let at = 0;
  while (value >= 1024 && at < units.length - 1) {
    value /= 1024;
    at += 1;
  }
  return `${at && value < 10 ? value.toFixed(1) : Math.round(value)} ${units[at]}`;
}

/** "3 workers", "1 worker". */
export function plural(number, word) {
  return `${number} ${word}${number === 1 ? "" : "s"}`;
}
