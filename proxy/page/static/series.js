// The time lines of the last 15 minutes: the server's history, continued by snapshots. Always the same length.

const LENGTH = 180;
const STEP = 5;

/** Where a snapshot has the value of each series. */
const READ = {
  in_flight: (now) => now.proxy.in_flight,
  queued: (now) => now.proxy.queued,
  requests: (now) => now.rates.requests,
  tokens: (now) => now.rates.tokens,
  items: (now) => now.rates.items,
  errors: (now) => now.rates.errors,
  hit_rate: (now) => now.rates.hit_rate,
  met: (now) => now.goodput.met,
  encoders: (now) => now.scaling.encoder.live,
  desired_encoders: (now) => now.scaling.encoder.desired,
  pd_workers: (now) => now.scaling.pd.live,
  kv_usage: (now) => highest(now.pd_workers, "kv_usage"),
};

function highest(workers, name) {
  const values = workers.map((worker) => worker[name]).filter((value) => value !== null);
  return values.length ? Math.max(...values) : null;
}

export class Series {
  constructor() {
    this.end = null;
    this.values = Object.fromEntries(Object.keys(READ).map((name) => [name, new Array(LENGTH).fill(null)]));
    this.sums = {};
  }

  setHistory({ end, series }) {
    this.end = end;
    this.sums = {};
    for (const name of Object.keys(READ)) {
      const given = (series[name] ?? []).slice(-LENGTH);
      this.values[name] = [...new Array(LENGTH - given.length).fill(null), ...given];
    }
  }

  /** Means of the snapshots of each step; a gap in time is a gap in the line. */
  add(snapshot) {
    this.end ??= snapshot.time;
    // The server's clock was set back: the line goes on from there.
    if (snapshot.time < this.end - STEP) this.end = snapshot.time;
    if (snapshot.time - this.end > LENGTH * STEP) this.end = snapshot.time - LENGTH * STEP;
    while (snapshot.time - this.end >= STEP) this.#shift();
    for (const [name, read] of Object.entries(READ)) {
      const value = read(snapshot);
      if (value === null || value === undefined) continue;
      const sum = (this.sums[name] ??= [0, 0]);
      sum[0] += value;
      sum[1] += 1;
    }
  }

  #shift() {
    for (const [name, values] of Object.entries(this.values)) {
      const [total, times] = this.sums[name] ?? [0, 0];
      values.push(times ? total / times : null);
      values.shift();
    }
    this.sums = {};
    this.end += STEP;
  }
}
