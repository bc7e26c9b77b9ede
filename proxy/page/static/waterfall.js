// Where one request's time went: a lane for the request, one for each item, and all spans in numbers.

import { h } from "./dom.js";
import { count, percent, seconds } from "./format.js";

const TITLES = {
  fetch: "Fetch", queue: "Queue", preprocess: "Preprocess", encode: "Encode", save: "Save", load: "Load", prefill: "Prefill", decode: "Decode", wait: "Wait",
};
/** What is drawn of a request of many items; the table's rows end there too. */
const MAX_LANES = 8;
const MAX_ROWS = 80;

const isItem = (span) => span.item !== null && span.item !== undefined;
/** The one span of all items that are not told apart. */
const isSummed = (span) => isItem(span) && /further items, summed/.test(span.note ?? "");
const title = (name) => (Object.hasOwn(TITLES, name) ? TITLES[name] : String(name));

/** A class name that is one of ours, whatever the server calls a span. */
export function stage(name) {
  return Object.hasOwn(TITLES, name) ? name : "wait";
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

/** The seconds of each stage, in the order in which they come: at least one of the spans is in it. */
export function stageTimes(spans) {
  const byName = new Map();
  for (const span of spans) byName.set(span.name, [...(byName.get(span.name) ?? []), span]);
  return [...byName].map(([name, own]) => [name, covered(own)]);
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
  const titles = record.titles ?? [];
  return h("div", { class: "waterfall" }, facts(record, spans, total), lanes(spans, total, titles), legend(spans), allSpans(spans, total, titles), footer(record, spans, total));
}

function facts(record, spans, total) {
  const hits = new Set(spans.filter((span) => isItem(span) && isHit(span.note)).map((span) => span.item)).size;
  const single = new Set(spans.filter((span) => isItem(span) && !isSummed(span)).map((span) => span.item)).size;
  const items = Math.max(single, record.items ?? 0);
  // Of a request with very many items the first ones alone are told apart.
  const of = items > single ? `${hits} of the first ${single}, of ${count(items)}` : `${hits} of ${items}`;
  const pairs = [
    ["Total", record.seconds === null ? `${seconds(total)} …` : seconds(total)],
    ["Prompt", `${count(record.prompt_tokens)} tokens${record.media_tokens ? `, ${count(record.media_tokens)} of media` : ""}`],
    ["Answer", `${count(record.completion_tokens)} tokens`],
    ["From the KV cache", `${count(record.cached_tokens)} tokens`],
    ["Items reused", items ? of : "none sent"],
  ];
  return h("dl", { class: "facts" }, pairs.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))));
}

/** The drawing; the table below says the same to those who do not see it. */
function lanes(spans, total, titles) {
  const items = [...new Set(spans.filter(isItem).map((span) => span.item))].sort((a, b) => a - b);
  const rows = items.slice(0, MAX_LANES).map((item) => {
    const own = spans.filter((span) => span.item === item);
    const hit = own.some((span) => isHit(span.note));
    const time = seconds(Math.max(...own.map((span) => span.end)) - Math.min(...own.map((span) => span.start)));
    return lane(own.some(isSummed) ? "Others" : titles[item] || `Item ${item + 1}`, own, total, hit ? h("span", { class: "good" }, "✓ reused") : time);
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
  const tip = [title(span.name), span.where, span.note, seconds(span.end - span.start)].filter(Boolean).join(" · ");
  // A wait has the colour of the stage that it waits for, hatched.
  const kind = span.awaits ? `stage-${stage(span.awaits)} awaits` : `stage-${stage(span.name)}`;
  return h("span", { class: `span ${kind}${isHit(span.note) ? " hit" : ""}`, title: tip, style: { left: `${left}%`, width: `${width}%` } });
}

/** The stages of the request, which add up to its time, and those of its items, which run beside each other. */
function legend(spans) {
  const rows = [["Request", spans.filter((span) => !isItem(span))], ["Items", spans.filter((span) => isItem(span) && span.end > span.start)]];
  return rows.filter(([, own]) => own.length).map(([name, own]) => h("ul", { class: "legend", "aria-label": `Stages of the ${name.toLowerCase()}` },
    h("li", { class: "of" }, name),
    stageTimes(own).map(([each, sum]) => h("li", {}, h("span", { class: `swatch stage-${stage(each)}` }), `${title(each)} `, h("strong", {}, seconds(sum))))));
}

function allSpans(spans, total, titles) {
  const open = matchMedia("(min-width: 641px)").matches;
  return h("details", { open }, h("summary", { class: "soft small" }, `All ${spans.length} spans`), table(spans, total, titles));
}

function table(spans, total, titles) {
  const heads = [["Stage", ""], ["Where", "where"], ["Start", "number"], ["Time", "number"]];
  return h(
    "table", { class: "spans" },
    h("caption", { class: "offscreen" }, `${spans.length} spans of a request of ${seconds(total)}`),
    h("thead", {}, h("tr", {}, heads.map(([name, extra]) => h("th", { scope: "col", class: extra }, name)))),
    h("tbody", {}, spans.slice(0, MAX_ROWS).map((span) => spanRow(span, titles))),
  );
}

function itemTitle(span, titles) {
  if (!isItem(span)) return "";
  return isSummed(span) ? " (others)" : ` ${titles[span.item] || span.item + 1}`;
}

function spanRow(span, titles) {
  const where = (span.where ?? "") + (span.attempt > 1 ? ` (attempt ${span.attempt})` : "");
  const item = isItem(span);
  return h(
    "tr", { class: item ? "item" : "" },
    h("th", { scope: "row" },
      h("span", { class: `swatch stage-${stage(span.name)}` }), title(span.name) + itemTitle(span, titles),
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
