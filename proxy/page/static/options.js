// The parameters of a request: fields, their ranges, and JSON that is checked while it is typed.

import { h, setAttr, setText } from "./dom.js";

const NUMBERS = [
  { name: "temperature", label: "Temperature", step: "0.1", min: "0", max: "2", value: "0" },
  { name: "max_tokens", label: "Max tokens", step: "1", min: "1", value: "256", whole: true },
  { name: "seed", label: "Seed", step: "1", min: "0", whole: true },
  { name: "top_p", label: "Top p", step: "0.05", min: "0", max: "1" },
  { name: "top_k", label: "Top k", step: "1", min: "0", whole: true },
  { name: "frequency_penalty", label: "Frequency penalty", step: "0.1", min: "-2", max: "2" },
];

const TOOLS_EXAMPLE = `[{"type": "function", "function": {"name": "report", "parameters": {"type": "object", "properties": {"shapes": {"type": "integer", "minimum": 0, "maximum": 9}}, "required": ["shapes"], "additionalProperties": false}}}]`;
const SCHEMA_EXAMPLE = `{"type": "object", "properties": {"shapes": {"type": "integer", "minimum": 0, "maximum": 9}}, "required": ["shapes"], "additionalProperties": false}`;

/** The fields below the question. `changed` is called after each edit. */
export class Options {
  constructor(changed) {
    this.numbers = NUMBERS.map((field) => ({ ...field, input: numberInput(field, changed) }));
    this.system = h("textarea", { rows: 2, placeholder: "none", oninput: changed });
    this.language = h("input", { type: "text", maxLength: 40, placeholder: "detected", oninput: changed });
    this.choice = h("select", { onchange: changed }, ["auto", "required", "none"].map((one) => h("option", { value: one }, one)));
    // With "auto" a small model may answer in words: the example shows a call.
    this.tools = new JsonBox("Tools", "a list of functions", TOOLS_EXAMPLE, changed, Array.isArray, () => (this.choice.value = "required"));
    this.tools.node.append(field("Tool choice", this.choice));
    this.schema = new JsonBox("Answer's JSON schema", "an object", SCHEMA_EXAMPLE, changed, isObject);
    this.chatOnly = [field("System prompt", this.system, "wide")];
    this.speechOnly = [field("Language", this.language)];
    this.node = h(
      "div", { class: "options" },
      h("details", {}, h("summary", {}, "Parameters"),
        h("div", { class: "grid" }, ...this.numbers.map(({ label, input }) => field(label, input)), ...this.speechOnly, ...this.chatOnly)),
      (this.structure = h("details", {}, h("summary", {}, "Tools and JSON schema"),
        h("div", { class: "grid two" }, this.tools.node, this.schema.node))),
    );
  }

  /** Shows the fields that a mode has. */
  show(mode) {
    for (const one of this.chatOnly) one.hidden = mode !== "chat";
    for (const one of this.speechOnly) one.hidden = mode !== "speech";
    this.structure.hidden = mode === "speech";
    this.tools.node.hidden = mode !== "chat";
    for (const { name, input } of this.numbers) input.closest(".field").hidden = mode === "speech" && !["temperature", "seed"].includes(name);
  }

  /** What `makeRequest` takes; an Error names the field that is wrong. */
  read() {
    const sampling = {};
    for (const { name, label, whole, input } of this.numbers) {
      if (input.validity.badInput) throw new Error(`${label} must be a number.`);
      if (input.value === "") continue;
      const value = Number(input.value);
      if (whole && !Number.isSafeInteger(value)) throw new Error(`${label} must be a whole number.`);
      sampling[name] = value;
    }
    const schema = this.schema.read();
    return {
      sampling,
      system: this.system.value.trim(),
      language: this.language.value.trim(),
      tools: this.tools.read(),
      tool_choice: this.choice.value,
      response_format: schema && { type: "json_schema", json_schema: { name: "answer", schema } },
    };
  }
}

function numberInput({ step, min, max, value }, changed) {
  const input = h("input", { type: "number", step, min, value: value ?? "", placeholder: "model's own", oninput: changed });
  if (max !== undefined) input.max = max;
  return input;
}

function field(label, input, extra = "") {
  return h("label", { class: `field ${extra}` }, label, input);
}

function isObject(value) {
  return value !== null && typeof value === "object" && !Array.isArray(value);
}

/** A text box for JSON; what is no JSON is marked at once. */
class JsonBox {
  constructor(label, kind, example, changed, fits, taken = () => {}) {
    this.label = label;
    this.kind = kind;
    this.fits = fits;
    const id = `json-${label.toLowerCase().replace(/\W+/g, "-")}`;
    this.error = h("p", { class: "error small", id, role: "status" });
    this.input = h("textarea", {
      rows: 4, class: "code", spellcheck: "false", placeholder: "none", "aria-describedby": id,
      oninput: () => (this.check(), changed()),
    });
    this.node = h("div", { class: "field" },
      h("label", { class: "field" }, label, this.input), this.error,
      h("button", { type: "button", class: "quiet small", onclick: () => ((this.input.value = example), taken(), this.check(), changed()) }, "Example"));
  }

  check() {
    try {
      this.read();
      setText(this.error, "");
      setAttr(this.input, "aria-invalid", null);
    } catch (error) {
      setText(this.error, error.message);
      setAttr(this.input, "aria-invalid", "true");
    }
  }

  read() {
    const text = this.input.value.trim();
    if (!text) return null;
    let value;
    try {
      value = JSON.parse(text);
    } catch {
      throw new Error(`${this.label}: this is no JSON yet.`);
    }
    if (!this.fits(value)) throw new Error(`${this.label} must be ${this.kind}.`);
    return value;
  }
}
