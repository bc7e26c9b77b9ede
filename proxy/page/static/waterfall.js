// Where one request's time went: a table of its spans with a bar for each.

import { h } from "./dom.js";
import { count, percent, seconds } from "./format.js";

const WORDS = {
  fetch: "Fetch", queue: "Queue", encode: "Encode", save: "Save", load: "Load", prefill: "Prefill", decode: "Decode", wait: "Wait",
};
/** Spans that are shown; a request of many pictures has the rest in one line. */
const MOST_ROWS = 60;

/** Seconds that at least one span covers. */
export function covered(spans) {
  let total = 0;
  let until = -Infinity;
  for (const { start, end } of [...spans].sort((a, b) => a.start - b.start)) {
    if (end <= until) continue;
    total += end - Math.max(start, until);
    until = end;
  }
  return total;
}

/** Whether a note says that work was saved. */
export function isHit(note) {
  return /in the store|cache|another request|shared|already/i.test(note ?? "");
}

/** The figure of a record; `live`: the request still runs. */
export function waterfall(record) {
  const spans = record.spans.filter((span) => Number.isFinite(span.start)).sort(byStart);
  const ends = spans.map((span) => span.end ?? span.start);
  const total = record.seconds ?? Math.max(0.001, ...ends);
  const rows = spans.slice(0, MOST_ROWS).map((span) => spanRow(span, total));
  const left = spans.length - rows.length;
  return h(
    "div", { class: "waterfall" },
    facts(record, total),
    overview(spans.filter((span) => !isItem(span)), total),
    h("table", { class: "spans" },
      h("caption", { class: "offscreen" }, `${spans.length} spans of a request of ${seconds(total)}`),
      h("thead", {}, h("tr", {}, ...["Stage", "Where", null, "Start", "Time"].map((name) => (name ? th(name) : h("th", { class: "track" }, axis(total)))))),
      h("tbody", {}, rows),
    ),
    left > 0 ? h("p", { class: "soft small" }, `${left} more spans are not shown.`) : null,
    footer(record, spans, total),
  );
}

const isItem = (span) => span.item !== null && span.item !== undefined;

/** By time; of those that begin together, the request's stage before the items in it. */
function byStart(a, b) {
  return a.start - b.start || isItem(a) - isItem(b) || (a.item ?? 0) - (b.item ?? 0) || b.end - a.end;
}

/** The request's stages in one bar. */
function overview(stages, total) {
  return h("div", { class: "lane overview", "aria-hidden": "true" }, stages.map((span) => bar(span, total)));
}

function bar(span, total) {
  const left = Math.min(100, (100 * span.start) / total);
  const width = Math.max(0, Math.min(100 - left, (100 * ((span.end ?? total) - span.start)) / total));
  return h("span", { class: `span stage-${stage(span.name)}${isHit(span.note) ? " hit" : ""}`, style: { left: `${left}%`, width: `${width}%` } });
}

function th(name) {
  return h("th", { scope: "col", class: name === "Start" || name === "Time" ? "number" : "" }, name);
}

function facts(record, total) {
  const hits = new Set(spansWithHits(record).map((span) => span.item ?? span.note)).size;
  const pairs = [
    ["Total", record.seconds === null ? `${seconds(total)} …` : seconds(total)],
    ["Prompt", `${count(record.prompt_tokens)} tokens`],
    ["Answer", `${count(record.completion_tokens)} tokens`],
    ["Cached", record.cached_tokens ? `${count(record.cached_tokens)} tokens` : hits ? `${hits} of the items` : "nothing"],
  ];
  return h("dl", { class: "facts" }, pairs.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))));
}

function spansWithHits(record) {
  return record.spans.filter((span) => isHit(span.note));
}

function axis(total) {
  return h("div", { class: "axis", "aria-hidden": "true" }, [0, 0.5, 1].map((part) => h("span", {}, seconds(total * part))));
}

function spanRow(span, total) {
  const end = span.end ?? total;
  const name = (WORDS[span.name] ?? String(span.name)) + (isItem(span) ? ` ${span.item + 1}` : "");
  const where = (span.where ?? "") + (span.attempt > 1 ? ` (attempt ${span.attempt})` : "");
  return h(
    "tr", { class: isItem(span) ? "item" : "" },
    h("th", { scope: "row" }, h("span", { class: `swatch stage-${stage(span.name)}` }), name, h("span", { class: "narrow-only", "aria-hidden": "true" }, where)),
    h("td", { class: "where" }, where),
    h("td", { class: "track" },
      h("div", { class: "lane", "aria-hidden": "true" }, bar(span, total)),
      span.note ? h("span", { class: isHit(span.note) ? "note good" : "note" }, span.note) : null),
    h("td", { class: "number soft" }, seconds(span.start)),
    h("td", { class: "number" }, seconds(Math.max(0, end - span.start))),
  );
}

/** A class name that is one of ours, whatever the server calls a span. */
export function stage(name) {
  return name in WORDS ? name : "wait";
}

function footer(record, spans, total) {
  if (record.seconds === null) return h("p", { class: "soft small" }, "Still running …");
  const share = Math.min(1, covered(spans) / total);
  return h("p", { class: "soft small" },
    `The spans cover ${percent(share)} of ${seconds(total)}; what they leave is the proxy's own work and the network.`);
}
