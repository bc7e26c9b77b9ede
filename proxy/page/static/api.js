// The server's API: addresses relative to the page, the key, errors in plain words, server-sent events.

// The page is `PREFIX/` and the docs `PREFIX/docs`: both are resolved against the folder.
const BASE = new URL(".", document.baseURI);
const KEY = "triptych-api-key";
const listeners = new Set();

export function address(path) {
  return new URL(path, BASE);
}

export function apiKey() {
  try {
    return sessionStorage.getItem(KEY) ?? "";
  } catch {
    return memory;
  }
}

let memory = ""; // where the browser forbids storage

export function setApiKey(key) {
  memory = key;
  try {
    if (key) sessionStorage.setItem(KEY, key);
    else sessionStorage.removeItem(KEY);
  } catch {
    // The key is kept in memory.
  }
  for (const listener of listeners) listener();
}

export function onKeyChange(listener) {
  listeners.add(listener);
}

/** An answer that is not the one wanted: its status, OpenAI's message, and Retry-After in seconds. */
export class ApiError extends Error {
  constructor(status, message, retryAfter = null, type = "") {
    super(message);
    this.status = status;
    this.retryAfter = retryAfter;
    this.type = type;
  }
}

/** fetch with the key; ApiError for anything but 2xx. */
export async function call(path, options = {}) {
  const headers = { ...options.headers };
  const key = apiKey();
  // A header may hold only these: anything else is no key, and fetch would fail without a useful word.
  if (key && /^[\x21-\x7e]+$/.test(key)) headers.Authorization = `Bearer ${key}`;
  let reply;
  try {
    reply = await fetch(address(path), { ...options, headers, cache: "no-store", credentials: "same-origin" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, "The server cannot be reached. Is it running, and is this machine still connected to it?");
  }
  if (!reply.ok) throw await refusal(reply);
  return reply;
}

async function refusal(reply) {
  const text = (await reply.text().catch(() => "")).slice(0, 4000);
  let message = `The server answered with status ${reply.status}.`;
  let type = "";
  try {
    const body = JSON.parse(text);
    message = String(body.error?.message ?? body.detail ?? message);
    type = String(body.error?.type ?? "");
  } catch {
    // A gateway's own page: its HTML is nothing to show.
  }
  const wait = Number.parseFloat(reply.headers.get("retry-after") ?? "");
  return new ApiError(reply.status, message, Number.isFinite(wait) ? wait : null, type);
}

/**
 * The events of a text/event-stream as {event, data}. Ends with the stream; what is over MAX_ITEMS characters is an
 * error. `heard` is called whenever bytes arrive: on a slow line an event takes its time.
 */
export async function* events(reply, { most = 8 << 20, heard = () => {} } = {}) {
  const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      heard();
      rest += value;
      if (rest.length > most) throw new ApiError(0, "The server sent an event that is too large.");
      const blocks = rest.split(/\r?\n\r?\n/);
      rest = blocks.pop();
      for (const block of blocks) {
        const found = parseEvent(block);
        if (found) yield found;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

export function parseEvent(block) {
  let event = "message";
  const data = [];
  for (const line of block.split(/\r?\n/)) {
    if (line.startsWith("event:")) event = line.slice(6).trim();
    else if (line.startsWith("data:")) data.push(line.slice(5).replace(/^ /, ""));
  }
  return data.length ? { event, data: data.join("\n") } : null;
}
