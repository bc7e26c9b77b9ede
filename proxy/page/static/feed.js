// The live data: one stream of server-sent events that comes back by itself.

import { ApiError, call, events, onKeyChange } from "./api.js";

/** Snapshots come once a second: after so long without a byte the connection is taken for dead. */
const SILENCE_MS = 8000;
const FIRST_DELAY = 0.5;
const LONGEST_DELAY = 20;

/** Seconds before the next try: doubled each time, with a random part so that pages do not return all at once. */
export function retryDelay(attempt, random = Math.random()) {
  return Math.min(LONGEST_DELAY, FIRST_DELAY * 2 ** Math.min(attempt, 10)) * (0.75 + random / 2);
}

/**
 * `on`: history(data), snapshot(data), state(name, words). States: connecting, live, waiting, key, absent, paused.
 */
export class Feed {
  #on;
  #wanted = false;
  #abort = null;
  #timer = null;
  #attempt = 0;

  constructor(on) {
    this.#on = on;
    onKeyChange(() => this.#wanted && this.#connect());
    document.addEventListener("visibilitychange", () => this.#visible());
  }

  start() {
    if (this.#wanted) return;
    this.#wanted = true;
    this.#connect();
  }

  stop() {
    this.#wanted = false;
    this.#end();
    this.#on.state("paused", "Paused");
  }

  /** A tab that nobody sees takes no listener's place; the history fills the gap when it is back. */
  #visible() {
    if (!this.#wanted) return;
    if (!document.hidden) return this.#abort ? undefined : this.#connect();
    this.#end();
    this.#on.state("paused", "Paused while the tab is hidden");
  }

  #end() {
    clearTimeout(this.#timer);
    this.#abort?.abort();
    this.#abort = null;
  }

  async #connect() {
    this.#end();
    const abort = (this.#abort = new AbortController());
    const current = () => this.#abort === abort && this.#wanted;
    this.#on.state("connecting", "Connecting …");
    let silence = setTimeout(() => abort.abort(), SILENCE_MS);
    let failure = new ApiError(0, "The connection ended.");
    try {
      const reply = await call("cluster/events", { signal: abort.signal, headers: { Accept: "text/event-stream" } });
      const heard = () => {
        clearTimeout(silence);
        silence = setTimeout(() => abort.abort(), SILENCE_MS);
      };
      for await (const { event, data } of events(reply, { heard })) {
        if (!current()) return;
        this.#take(event, data);
      }
    } catch (error) {
      if (error.name !== "AbortError") failure = error;
      else failure = new ApiError(0, "Nothing was heard for a while.");
    } finally {
      clearTimeout(silence);
      abort.abort();
    }
    if (current()) this.#failed(failure);
  }

  #take(event, data) {
    if (event === "history") this.#on.history(JSON.parse(data));
    else if (event === "snapshot") {
      this.#attempt = 0;
      this.#on.snapshot(JSON.parse(data));
      this.#on.state("live", "Live");
    }
  }

  #failed(error) {
    this.#abort = null;
    if (error.status === 401) return this.#on.state("key", error.message);
    if (error.status === 404) {
      return this.#on.state("absent", "This server gives no live data: it was started with --no-page, or a gateway does not pass /cluster on.");
    }
    const delay = Math.max(error.retryAfter ?? 0, retryDelay(this.#attempt));
    this.#attempt += 1;
    this.#on.state("waiting", `${error.message} Next try in ${Math.ceil(delay)} s.`);
    this.#timer = setTimeout(() => this.#connect(), 1000 * delay);
  }
}
