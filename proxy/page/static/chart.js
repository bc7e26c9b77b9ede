// A small time line: an SVG drawing with a title, the newest value, and a reading at any point.

import { h, setAttr, setText, svg } from "./dom.js";

const [WIDTH, HEIGHT] = [360, 90];

/** `lines`: [{name, label, color, dashed}] of series; `format`: of a value; `top`: the scale's end where it is fixed. */
export class TimeChart {
  constructor({ title, lines, format, top = null, step = 5, span = "15 min ago" }) {
    Object.assign(this, { title, lines, format, top, step, span, at: null });
    this.paths = lines.map(({ color, dashed }) => svg("path", { class: `line ${color}${dashed ? " dashed" : ""}` }));
    this.area = svg("path", { class: `area ${lines[0].color}` });
    this.cursor = svg("line", { class: "cursor", y1: 0, y2: HEIGHT, visibility: "hidden" });
    this.picture = svg(
      "svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", "aria-hidden": "true" },
      ...[0.25, 0.5, 0.75].map((part) => svg("line", { class: "rule", x1: 0, x2: WIDTH, y1: HEIGHT * part, y2: HEIGHT * part })),
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
      onpointermove: (event) => this.#point(event), onpointerleave: () => this.#read(null),
      onkeydown: (event) => this.#key(event), onblur: () => this.#read(null),
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
    this.#read(this.at);
    setAttr(this.plot, "aria-label", this.#words());
  }

  #words() {
    const words = this.lines.map(({ label }, index) => {
      const seen = this.values[index].filter((value) => value !== null);
      if (!seen.length) return `${label}: no values`;
      return `${label}: now ${this.format(seen.at(-1))}, between ${this.format(Math.min(...seen))} and ${this.format(Math.max(...seen))}`;
    });
    return `${this.title}, since ${this.span}. ${words.join(". ")}. Arrow keys read single points.`;
  }

  #point(event) {
    const box = this.plot.getBoundingClientRect();
    this.#read(Math.round(((event.clientX - box.left) / box.width) * (this.values?.[0].length - 1)));
  }

  #key(event) {
    const moves = { ArrowLeft: -1, ArrowRight: 1, PageUp: -12, PageDown: 12 };
    if (!(event.key in moves) || !this.values) return;
    event.preventDefault();
    this.#read((this.at ?? this.values[0].length - 1) + moves[event.key]);
    setAttr(this.plot, "aria-label", `${this.moment.textContent}: ${this.readings.map((one) => one.node.textContent).join(", ")}`);
  }

  /** Shows the values at a point; null: the newest ones. */
  #read(at) {
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
      const shown = this.at === null ? this.values[index].findLast((one) => one !== null) : this.values[index][this.at];
      setText(value, this.format(shown));
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

function point(values, index, high) {
  const x = (index / (values.length - 1)) * WIDTH;
  const y = HEIGHT - 1 - (HEIGHT - 3) * Math.min(1, Math.max(0, values[index]) / high);
  return `${x.toFixed(1)} ${y.toFixed(1)}`;
}

/** A path with a gap wherever a value is missing. */
export function linePath(values, high) {
  let path = "";
  let open = false;
  values.forEach((value, index) => {
    if (value === null) {
      open = false;
      return;
    }
    path += `${open ? "L" : "M"}${point(values, index, high)}`;
    if (!open && (values[index + 1] ?? null) === null) path += "h0.1";
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
    path += `M${x(from)} ${HEIGHT}L${points.join("L")}L${x(to - 1)} ${HEIGHT}Z`;
    from = -1;
  };
  values.forEach((value, index) => {
    if (value === null) close(index);
    else if (from < 0) from = index;
  });
  close(values.length);
  return path;
}
