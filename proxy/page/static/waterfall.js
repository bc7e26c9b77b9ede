// Where one request's time went: a lane for the request, one for each item, and all spans in numbers.

import { h } from "./dom.js";
import { count, percent, seconds } from "./format.js";

const WORDS = {
  fetch: "Fetch", queue: "Queue", preprocess: "Preprocess", encode: "Encode", save: "Save", load: "Load", prefill: "Prefill", decode: "Decode", wait: "Wait",
};
/** What is shown of a request of many items; the table's rows end there too. */
const MAX_LANES = 8;
const MAX_ROWS = 80;

const isItem = (span) => span.item !== null && span.item !== undefined;
/** The one span of all items that are not told apart. */
const isSummed = (span) => isItem(span) && /further items, summed/.test(span.note ?? "");
const word = (name) => (Object.hasOwn(WORDS, name) ? WORDS[name] : String(name));

/** A class name that is one of ours, whatever the server calls a span. */
export function stage(name) {
  return Object.hasOwn(WORDS, name) ? name : "wait";
}

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
  return /in the store|held by|cache|another request/i.test(note ?? "");
}

/** The seconds of each stage of the request itself, in the order in which they come. */
export function stageSums(spans) {
  const sums = new Map();
  for (const span of spans) if (!isItem(span)) sums.set(span.name, (sums.get(span.name) ?? 0) + span.end - span.start);
  return sums;
}

/** By time; of those that begin together, the request's stage before the items in it. */
function byStart(a, b) {
  return a.start - b.start || isItem(a) - isItem(b) || (a.item ?? 0) - (b.item ?? 0) || b.end - a.end;
}

/** The figure of a record, which may still grow. */
export function waterfall(record) {
  const known = record.spans.filter((span) => Number.isFinite(span.start));
  const total = record.seconds ?? Math.max(0.001, ...known.map((span) => span.end ?? span.start));
  const spans = known.map((span) => ({ ...span, end: span.end ?? total })).sort(byStart);
  return h("div", { class: "waterfall" }, facts(record, spans, total), lanes(spans, total), legend(spans), allSpans(spans, total), footer(record, spans, total));
}

function facts(record, spans, total) {
  const hits = new Set(spans.filter((span) => isItem(span) && isHit(span.note)).map((span) => span.item)).size;
  const shown = new Set(spans.filter((span) => isItem(span) && !isSummed(span)).map((span) => span.item)).size;
  const items = Math.max(shown, record.items ?? 0);
  // Of a request with very many items the first ones alone are told apart.
  const of = items > shown ? `${hits} of the first ${shown}, of ${count(items)}` : `${hits} of ${items}`;
  const pairs = [
    ["Total", record.seconds === null ? `${seconds(total)} …` : seconds(total)],
    ["Prompt", `${count(record.prompt_tokens)} tokens`],
    ["Answer", `${count(record.completion_tokens)} tokens`],
    ["From the KV cache", `${count(record.cached_tokens)} tokens`],
    ["Items reused", items ? of : "none sent"],
  ];
  return h("dl", { class: "facts" }, pairs.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))));
}

/** The drawing; the table below says the same to those who do not see it. */
function lanes(spans, total) {
  const items = [...new Set(spans.filter(isItem).map((span) => span.item))].sort((a, b) => a - b);
  const rows = items.slice(0, MAX_LANES).map((item) => {
    const own = spans.filter((span) => span.item === item);
    const hit = own.some((span) => isHit(span.note));
    const time = seconds(Math.max(...own.map((span) => span.end)) - Math.min(...own.map((span) => span.start)));
    return lane(own.some(isSummed) ? "Others" : `Item ${item + 1}`, own, total, hit ? h("span", { class: "good" }, "✓ reused") : time);
  });
  const left = items.length - rows.length;
  return h(
    "div", { class: "lanes", "aria-hidden": "true" },
    lane("Request", spans.filter((span) => !isItem(span)), total, seconds(total)), rows,
    left > 0 ? h("span", { class: "more soft small" }, `and ${left} more`) : null,
    h("span"), h("div", { class: "axis" }, [0, 0.25, 0.5, 0.75, 1].map((part) => h("span", {}, seconds(total * part)))), h("span"),
  );
}

function lane(name, spans, total, time) {
  return [h("span", { class: "lane-name" }, name), h("div", { class: "lane" }, spans.map((span) => bar(span, total))), h("span", { class: "lane-time" }, time)];
}

function bar(span, total) {
  const left = Math.min(100, (100 * span.start) / total);
  const width = Math.max(0, Math.min(100 - left, (100 * (span.end - span.start)) / total));
  const words = [word(span.name), span.where, span.note, seconds(span.end - span.start)].filter(Boolean).join(" · ");
  return h("span", { class: `span stage-${stage(span.name)}${isHit(span.note) ? " hit" : ""}`, title: words, style: { left: `${left}%`, width: `${width}%` } });
}

function legend(spans) {
  const shown = new Map([...stageSums(spans)].map(([name, sum]) => [name, seconds(sum)]));
  for (const span of spans) if (!shown.has(span.name)) shown.set(span.name, "");
  return h("ul", { class: "legend", "aria-label": "Stages" }, [...shown].map(([name, sum]) =>
    h("li", {}, h("span", { class: `swatch stage-${stage(name)}` }), `${word(name)} `, sum ? h("strong", {}, sum) : null)));
}

function allSpans(spans, total) {
  const open = matchMedia("(min-width: 641px)").matches;
  return h("details", { open }, h("summary", { class: "soft small" }, `All ${spans.length} spans`), table(spans, total));
}

function table(spans, total) {
  const heads = [["Stage", ""], ["Where", "where"], ["Start", "number"], ["Time", "number"]];
  return h(
    "table", { class: "spans" },
    h("caption", { class: "offscreen" }, `${spans.length} spans of a request of ${seconds(total)}`),
    h("thead", {}, h("tr", {}, heads.map(([name, extra]) => h("th", { scope: "col", class: extra }, name)))),
    h("tbody", {}, spans.slice(0, MAX_ROWS).map(spanRow)),
  );
}

function itemWord(span) {
  if (!isItem(span)) return "";
  return isSummed(span) ? " (others)" : ` ${span.item + 1}`;
}

function spanRow(span) {
  const where = (span.where ?? "") + (span.attempt > 1 ? ` (attempt ${span.attempt})` : "");
  const item = isItem(span);
  return h(
    "tr", { class: item ? "item" : "" },
    h("th", { scope: "row" },
      h("span", { class: `swatch stage-${stage(span.name)}` }), word(span.name) + itemWord(span),
      span.note ? h("span", { class: isHit(span.note) ? "note good" : "note" }, span.note) : null,
      h("span", { class: "narrow-only", "aria-hidden": "true" }, where)),
    h("td", { class: "where" }, where),
    h("td", { class: "number soft" }, seconds(span.start)),
    h("td", { class: "number" }, seconds(span.end - span.start)),
  );
}

function footer(record, spans, total) {
  if (record.seconds === null) return h("p", { class: "soft small" }, "Still running …");
  const share = Math.min(1, covered(spans) / total);
  const left = spans.length > MAX_ROWS ? ` ${spans.length - MAX_ROWS} more spans are not listed.` : "";
  return h("p", { class: "soft small" }, `The spans cover ${percent(share)} of ${seconds(total)}, from the request's arrival at the proxy to the end of its reply.${left}`);
}
