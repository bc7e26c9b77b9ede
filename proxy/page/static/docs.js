// The API's description, made of the OpenAPI document beside the page; its examples can be changed and run.

import { call } from "./api.js";
import { h, setText } from "./dom.js";
import { setUpTheme } from "./theme.js";

/** Characters of an answer that are shown. */
const MAX_CHARACTERS = 200_000;
/** Its answer is what this page is made of. */
const DOCUMENT = "/openapi.json";
/** Groups of paths: each path is in the first that it fits. */
const GROUPS = [
  ["Answers", /^\/v1\/(chat|completions|responses|messages)/],
  ["Sound", /\/audio\//],
  ["Embeddings and ranking", /embeddings|rerank|score/],
  ["Tokens", /tokenize/],
  ["Server", /./],
];

function operation(api, path, method, { summary, requestBody, parameters, responses }) {
  const content = requestBody?.content ?? {};
  const examples = Object.entries(content).flatMap(([kind, { schema, examples }]) => [
    fields(resolved(api, schema)),
    ...Object.entries(examples).map(([name, { value }]) =>
      kind.includes("form") ? h("pre", { class: "code", tabindex: "0" }, shell(path, value)) : runnable("post", path, name, JSON.stringify(value, null, 2)),
    ),
  ]);
  if (!requestBody && !parameters && path !== DOCUMENT) examples.push(runnable("get", path));
  const replies = Object.entries(responses).map(([status, reply]) => `${status} (${reply.description.split(":")[0].toLowerCase()})`);
  return h(
    "section",
    { class: "card operation", id: anchor(path) },
    h("h2", {}, h("span", { class: `method ${method}` }, method.toUpperCase()), " ", h("code", {}, path)),
    h("p", {}, `${summary}.`),
    examples,
    h("p", { class: "soft small" }, `Replies: ${replies.join(", ")}.`),
  );
}

function anchor(path) {
  return path.replace(/^\/|\/$/g, "").replaceAll("/", "-");
}

/** A form as a command to paste, where the server is in a variable; a file's value begins with @. */
function shell(path, form) {
  return [`curl $TRIPTYCH_URL${path}`, ...Object.entries(form).map(([name, value]) => `-F ${name}=${value}`)].join(" ");
}

function resolved(api, schema) {
  return api.components.schemas[schema.$ref.split("/").at(-1)];
}

function fields({ properties, required = [] }) {
  const names = Object.keys(properties).sort((one, other) => required.includes(other) - required.includes(one));
  const rows = names.map((name) =>
    h(
      "tr",
      {},
      h("td", {}, h("code", {}, name), required.includes(name) ? " (required)" : ""),
      h("td", {}, typeOf(properties[name])),
      h("td", {}, properties[name].description ?? ""),
    ),
  );
  const head = h("tr", {}, ["field", "type", "meaning"].map((title) => h("th", {}, title)));
  return h("details", {}, h("summary", {}, `${names.length} fields`), h("div", { class: "wide" }, h("table", {}, head, rows)));
}

/** A schema in a few words; null goes without saying. */
function typeOf(schema) {
  if (schema.anyOf) return [...new Set(schema.anyOf.filter((kind) => kind.type !== "null").map(typeOf))].join(" or ");
  if (schema.$ref) return "object";
  if (schema.enum) return schema.enum.filter((value) => value !== null).map((value) => JSON.stringify(value)).join(", ");
  const kind = String(schema.type ?? "any");
  if (kind === "array" && schema.items) return `list of ${typeOf(schema.items)}`;
  const low = schema.minimum ?? schema.exclusiveMinimum;
  // 64-bit limits, which no number here holds exactly, say nothing to people.
  const exact = [low, schema.maximum].every((limit) => Math.abs(limit) <= Number.MAX_SAFE_INTEGER);
  return exact ? `${kind}, ${low} to ${schema.maximum}` : kind;
}

/** An example with its button: `text` is its body, none for a GET. */
function runnable(method, route, name = "", text = null) {
  const path = route.slice(1);
  const editor = text === null ? null : h("textarea", { class: "code", spellcheck: "false", rows: Math.min(18, text.split("\n").length), value: text, "aria-label": `Body of the example ${name}` });
  const output = h("pre", { class: "code output", tabindex: "0", role: "region", "aria-label": "Answer", "aria-live": "polite", hidden: true });
  const state = h("span", { class: "soft small", role: "status" });
  const run = h("button", { type: "button", class: "primary small", onclick: () => (running ? running.abort() : start()) }, "Run");
  let running = null;

  async function start() {
    running = new AbortController();
    setText(run, "Stop");
    setText(state, "Running …");
    output.hidden = false;
    output.classList.remove("bad");
    setText(output, "");
    const begun = performance.now();
    try {
      const reply = await call(path, optionsOf(method, editor?.value, running.signal));
      await show(reply, output);
      setText(state, `${reply.status} after ${Math.round(performance.now() - begun)} ms`);
    } catch (error) {
      output.classList.toggle("bad", error.name !== "AbortError");
      setText(state, error.name === "AbortError" ? "Stopped" : error.status ? `Refused with ${error.status}` : "Failed");
      if (error.name !== "AbortError") setText(output, error.status === 401 ? `${error.message}\n\nThe page's "API key" button keeps one for this tab.` : error.message);
    } finally {
      running = null;
      setText(run, "Run");
    }
  }

  return h("div", { class: "example", "data-method": method, "data-name": name }, editor, h("div", { class: "row" }, run, state), output);
}

function optionsOf(method, body, signal) {
  if (method === "get") return { signal };
  return { method: "POST", headers: { "Content-Type": "application/json" }, body, signal };
}

/** The answer as it comes; JSON in one piece is laid out. */
async function show(reply, output) {
  if ((reply.headers.get("content-type") ?? "").startsWith("application/json")) {
    setText(output, JSON.stringify(await reply.json(), null, 2).slice(0, MAX_CHARACTERS));
    return;
  }
  const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  const letters = output.appendChild(document.createTextNode(""));
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    letters.appendData(value.slice(0, Math.max(0, MAX_CHARACTERS - letters.length)));
  }
}

const api = await (await fetch("page/openapi.json")).json();
setText(document.getElementById("description"), api.info.description);
const paths = new Set(Object.keys(api.paths));
for (const [title, pattern] of GROUPS) {
  const links = [...paths].filter((path) => pattern.test(path)).map((path) => paths.delete(path) && h("a", { href: `#${anchor(path)}` }, path));
  if (links.length) document.querySelector(".contents").append(h("p", {}, h("span", { class: "soft small" }, title), links));
}
for (const [path, methods] of Object.entries(api.paths)) {
  for (const [method, each] of Object.entries(methods)) document.querySelector("main").append(operation(api, path, method, each));
}
call("v1/models").then((reply) => reply.json()).then(({ data: [first] }) => {
  if (!first) return;
  for (const field of document.querySelectorAll(".example textarea")) field.value = field.value.replace('"MODEL"', () => JSON.stringify(first.id));
  for (const command of document.querySelectorAll("pre.code:not(.output)")) setText(command, command.textContent.replace("=MODEL", () => `=${first.id}`));
}, () => {});
// The sections came after the address was read.
if (location.hash) document.getElementById(decodeURIComponent(location.hash.slice(1)))?.scrollIntoView();
const theme = document.getElementById("theme-button");
if (theme) theme.hidden = false;
setUpTheme();
