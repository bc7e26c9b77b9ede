// The time lines of the last hour: the server's history, continued by snapshots. Always the same length.

const LENGTH = 720;
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
  kv_usage: (now) => mean(now.pd_workers, "kv_usage"),
  encoder_busy: (now) => mean(now.encoders, "busy"),
  pd_busy: (now) => mean(now.pd_workers, "busy"),
};

function mean(workers, name) {
  const values = workers.map((worker) => worker[name]).filter((value) => value !== null && value !== undefined);
  return values.length ? values.reduce((sum, value) => sum + value, 0) / values.length : null;
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

  /** The last minutes of each series, with the step that has just begun as the newest point. */
  last(minutes) {
    const points = (60 * minutes) / STEP;
    return Object.fromEntries(Object.entries(this.values).map(([name, values]) => {
      const [total, times] = this.sums[name] ?? [0, 0];
      return [name, times ? [...values.slice(-points), total / times] : values.slice(-points - 1)];
    }));
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
