// The lines that send the same request from a shell and from Python.

import { Media } from "./request.js";

/** A `curl` command. Pictures are read from files of their names; `keyed`: the server asks for a key. */
export function curlLines(base, request, keyed) {
  const head = [`curl ${quoted(base + request.path)}`, ...(keyed ? ['-H "Authorization: Bearer $API_KEY"'] : [])];
  if (request.form) {
    const fields = Object.entries(request.form).map(
      ([name, value]) => `-F ${value instanceof Media ? quoted(`${name}=@${value.name}`) : quoted(`${name}=${value}`)}`,
    );
    return [...head, ...fields].join(" \\\n  ");
  }
  const lines = [...head, '-H "Content-Type: application/json"', "-d @- <<END"];
  return `${lines.join(" \\\n  ")}\n${shellJson(request.body)}\nEND`;
}

/** A program for the `openai` package. */
export function pythonLines(base, request, keyed) {
  const media = [];
  const own = request.path.replace("v1/", "");
  const call = own.replaceAll("/", ".");
  const text = (value, depth) => literal(value, depth, media);
  const lines = ["from openai import OpenAI", "", `client = OpenAI(base_url=${JSON.stringify(`${base}v1`)}, api_key="${keyed ? "YOUR_KEY" : "none"}")`];
  const { named, extra } = split(request.form ?? request.body, own);
  const parameters = Object.entries(named).map(([name, value]) => `    ${name}=${keyword(name, value, text)},`);
  if (Object.keys(extra).length) parameters.push(`    extra_body=${text(extra, 1)},`);
  lines.push(`stream = client.${call}.create(`, ...parameters, ")", "for event in stream:", `    ${printing(own)}`);
  return (media.length ? [...lines.slice(0, 1), ...READER, ...lines.slice(1)] : lines).join("\n");
}

const READER = [
  "from base64 import b64encode",
  "from pathlib import Path",
  "",
  "",
  "def data_url(path, media_type):",
  '    return f"data:{media_type};base64,{b64encode(Path(path).read_bytes()).decode()}"',
  "",
];

/** Fields that the `openai` package has no parameter for go into extra_body. */
const FOREIGN = new Set(["top_k", "min_p", "repetition_penalty", "min_tokens", "ignore_eos", "multi_modal_data", "cache_salt"]);

/** Likewise, of one path's methods. */
const FOREIGN_THERE = { audio: "seed", completions: "response_format" };

function split(fields, own) {
  const named = {};
  const extra = {};
  const there = FOREIGN_THERE[own.split("/")[0]];
  for (const [name, value] of Object.entries(fields)) (FOREIGN.has(name) || name === there ? extra : named)[name] = value;
  return { named, extra };
}

function keyword(name, value, text) {
  if (value instanceof Media) return `open(${JSON.stringify(value.name)}, "rb")`;
  if (name === "stream") return "True";
  if (value !== "" && (name === "temperature" || name === "seed")) return String(value);
  return text(value, 1);
}

function printing(own) {
  if (own.startsWith("audio")) return 'print(getattr(event, "delta", ""), end="", flush=True)';
  const piece = own.startsWith("chat") ? "event.choices[0].delta.content" : "event.choices[0].text";
  return `print(event.choices and ${piece} or "", end="", flush=True)`;
}

/** JSON for a here-document that the shell expands: a picture is the output of base64. */
function shellJson(body) {
  const media = [];
  const mark = `file-${Math.random().toString(36).slice(2)}-`;
  // Marks in place of the files: with these it would be made of all their bytes, at every letter that is typed.
  const marked = JSON.stringify(
    body,
    function (key, value) {
      return this[key] instanceof Media ? `${mark}${media.push(this[key]) - 1}` : value;
    },
    2,
  );
  const text = marked.replace(/[\\$`]/g, (letter) => `\\${letter}`);
  return text.replace(new RegExp(`"${mark}(\\d+)"`, "g"), (_, index) => {
    const { type, name } = media[index];
    return `"data:${type};base64,$(base64 -w0 ${name})"`;
  });
}

/** A Python literal. */
function literal(value, depth, media) {
  if (value instanceof Media) {
    media.push(value);
    return `data_url(${JSON.stringify(value.name)}, ${JSON.stringify(value.type)})`;
  }
  if (value === null || value === undefined) return "None";
  if (value === true) return "True";
  if (value === false) return "False";
  if (typeof value !== "object") return JSON.stringify(value);
  const list = Array.isArray(value);
  const parts = list
    ? value.map((one) => literal(one, depth + 1, media))
    : Object.entries(value).map(([name, one]) => `${JSON.stringify(name)}: ${literal(one, depth + 1, media)}`);
  const [open, close] = list ? "[]" : "{}";
  const inline = open + parts.join(", ") + close;
  if (inline.length <= 76 && !inline.includes("\n")) return inline;
  const indent = "    ".repeat(depth + 1);
  return `${open}\n${parts.map((part) => `${indent}${part},\n`).join("")}${"    ".repeat(depth)}${close}`;
}

/** A word for the shell. */
function quoted(word) {
  return /^[\w@%+=:,./[\]-]+$/.test(word) ? word : `'${word.replaceAll("'", "'\\''")}'`;
}
