// The API's description: its examples can be changed and run.

import { call } from "./api.js";
import { h, setText } from "./dom.js";
import { setUpTheme } from "./theme.js";

/** Characters of an answer that are shown. */
const MOST = 200_000;

function makeRunnable(example) {
  const { method, path, name } = example.dataset;
  const source = example.querySelector("pre");
  const text = source?.textContent ?? "";
  const editor = source && h("textarea", { class: "code", spellcheck: false, rows: Math.min(18, text.split("\n").length), value: text, "aria-label": `Body of the example ${name}` });
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

  example.replaceChildren(...[editor, h("div", { class: "row" }, run, state), output].filter(Boolean));
}

function optionsOf(method, body, signal) {
  if (method === "get") return { signal };
  return { method: "POST", headers: { "Content-Type": "application/json" }, body, signal };
}

/** The answer as it comes; JSON in one piece is laid out. */
async function show(reply, output) {
  if ((reply.headers.get("content-type") ?? "").startsWith("application/json")) {
    setText(output, JSON.stringify(await reply.json(), null, 2).slice(0, MOST));
    return;
  }
  const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  const letters = output.appendChild(document.createTextNode(""));
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    letters.appendData(value.slice(0, Math.max(0, MOST - letters.length)));
  }
}

const theme = document.getElementById("theme-button");
if (theme) theme.hidden = false;
setUpTheme();
for (const example of document.querySelectorAll(".example")) makeRunnable(example);
