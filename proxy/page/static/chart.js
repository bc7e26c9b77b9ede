// A small time line: an SVG drawing with a title, the newest value, and a reading at any point.

import { h, setAttr, setText, svg } from "./dom.js";

/** The drawing's size, and the lines of value 0 and of the scale's end: no line touches the edge or the label. */
const [WIDTH, HEIGHT, FLOOR, CEILING] = [360, 90, 88, 15];

/** Charts with one time axis: a point read in one of them is read in all. */
export class ChartGroup {
  constructor() {
    this.charts = [];
  }

  read(at) {
    for (const chart of this.charts) chart.read(at);
  }
}

/** `lines`: [{name, label, color, dashed}] of series; `format`: of a value; `top`: the scale's end where it is fixed. */
export class TimeChart {
  constructor({ title, lines, format, top = null, step = 5, span = "15 min ago", group = new ChartGroup() }) {
    Object.assign(this, { title, lines, format, top, step, span, group, at: null });
    group.charts.push(this);
    this.paths = lines.map(({ color, dashed }) => svg("path", { class: `line ${color}${dashed ? " dashed" : ""}` }));
    this.area = svg("path", { class: `area ${lines[0].color}` });
    this.cursor = svg("line", { class: "cursor", y1: 0, y2: HEIGHT, visibility: "hidden" });
    this.picture = svg(
      "svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", "aria-hidden": "true" },
      ...[0.5, 1].map((part) => svg("line", { class: "rule", x1: 0, x2: WIDTH, y1: height(part), y2: height(part) })),
      this.area, ...this.paths, this.cursor,
    );
    this.max = h("span", { class: "max" });
    this.moment = h("span", {}, span);
    this.readings = lines.map(({ label, color, dashed }) => {
      const value = h("strong", {}, "–");
      return { value, node: h("span", { class: "reading" }, h("span", { class: `key ${color}${dashed ? " dashed" : ""}` }), value, ` ${label}`) };
    });
    this.plot = h("div", {
      class: "plot", tabindex: "0", role: "img",
      onpointermove: (event) => this.#point(event), onpointerleave: () => this.group.read(null),
      onkeydown: (event) => this.#key(event), onblur: () => this.group.read(null),
    }, this.picture, this.max);
    this.node = h("figure", { class: "chart" },
      h("figcaption", {}, h("span", { class: "title" }, title), h("span", { class: "readings" }, this.readings.map((one) => one.node))),
      this.plot, h("div", { class: "axis", "aria-hidden": "true" }, this.moment, h("span", {}, "now")));
  }

  /** `values`: arrays by the series' names. */
  update(values) {
    this.values = this.lines.map(({ name }) => values[name]);
    const seen = this.values.flat().filter((value) => value !== null);
    const high = this.top ?? niceTop(Math.max(0, ...seen));
    this.paths.forEach((path, index) => setAttr(path, "d", linePath(this.values[index], high)));
    setAttr(this.area, "d", areaPath(this.values[0], high));
    setText(this.max, this.format(high));
    this.read(this.at);
    setAttr(this.plot, "aria-label", this.#description());
  }

  #description() {
    const parts = this.lines.map(({ label }, index) => {
      const seen = this.values[index].filter((value) => value !== null);
      if (!seen.length) return `${label}: no values`;
      return `${label}: now ${this.format(seen.at(-1))}, between ${this.format(Math.min(...seen))} and ${this.format(Math.max(...seen))}`;
    });
    return `${this.title}, since ${this.span}. ${parts.join(". ")}. Arrow keys read single points.`;
  }

  #point(event) {
    const box = this.plot.getBoundingClientRect();
    this.group.read(Math.round(((event.clientX - box.left) / box.width) * (this.values?.[0].length - 1)));
  }

  #key(event) {
    const moves = { ArrowLeft: -1, ArrowRight: 1, PageUp: -12, PageDown: 12 };
    if (!(event.key in moves) || !this.values) return;
    event.preventDefault();
    this.group.read((this.at ?? this.values[0].length - 1) + moves[event.key]);
    setAttr(this.plot, "aria-label", `${this.moment.textContent}: ${this.readings.map((one) => one.node.textContent).join(", ")}`);
  }

  /** Shows the values at a point; null: the newest ones. */
  read(at) {
    if (!this.values) return;
    const last = this.values[0].length - 1;
    this.at = at === null ? null : Math.max(0, Math.min(last, at));
    setAttr(this.cursor, "visibility", this.at === null ? "hidden" : "visible");
    if (this.at !== null) {
      const x = (this.at / last) * WIDTH;
      setAttr(this.cursor, "x1", x);
      setAttr(this.cursor, "x2", x);
    }
    setText(this.moment, this.at === null ? this.span : ago((last - this.at) * this.step));
    this.readings.forEach(({ value }, index) => {
      setText(value, this.format(this.values[index][this.at ?? last]));
    });
  }
}

function ago(seconds) {
  if (seconds < 60) return `${seconds} s ago`;
  return `${Math.floor(seconds / 60)} min ${seconds % 60} s ago`;
}

/** The smallest of 1, 2, 5 times a power of ten that is not below the value. */
export function niceTop(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((one) => one * power).find((one) => one >= value * 0.999);
}

/** Where a share of the scale is drawn. */
function height(share) {
  return FLOOR - (FLOOR - CEILING) * Math.min(1, Math.max(0, share));
}

function point(values, index, high) {
  const x = (index / (values.length - 1)) * WIDTH;
  return `${x.toFixed(1)} ${height(values[index] / high).toFixed(1)}`;
}

/** A path with a gap wherever a value is missing; a value alone between gaps is a line as long as its step. */
export function linePath(values, high) {
  let path = "";
  let open = false;
  values.forEach((value, index) => {
    if (value === null) {
      open = false;
      return;
    }
    path += `${open ? "L" : "M"}${point(values, index, high)}`;
    const step = WIDTH / (values.length - 1);
    if (!open && (values[index + 1] ?? null) === null) path += `h${(index ? -step : step).toFixed(1)}`;
    open = true;
  });
  return path;
}

function areaPath(values, high) {
  let path = "";
  let from = -1;
  const close = (to) => {
    if (from < 0) return;
    const x = (index) => ((index / (values.length - 1)) * WIDTH).toFixed(1);
    const points = [];
    for (let index = from; index < to; index += 1) points.push(point(values, index, high));
    path += `M${x(from)} ${FLOOR}L${points.join("L")}L${x(to - 1)} ${FLOOR}Z`;
    from = -1;
  };
  values.forEach((value, index) => {
    if (value === null) close(index);
    else if (from < 0) from = index;
  });
  close(values.length);
  return path;
}
