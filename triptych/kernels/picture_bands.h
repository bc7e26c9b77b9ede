// The passes over one band of rows, and the patches that it is written to; included as simd.h is.
#include "simd.h"

// Rows of the horizontal pass that share one loop over weights: a pixel takes four lanes.
constexpr int kRowsAtOnce = LANES / 4;

// Up to kRowsAtOnce rows, each resized to the job's width. Reads and writes one byte behind a row.
INLINE void Horizontal(const Job &job, const uint8_t *const *rows, int count, uint8_t *out) {
  const Taps &taps = *job.across;
  for (int x = 0; x < job.to_width; x++) {
    const int32_t *weights = taps.weights(x);
    size_t at = static_cast<size_t>(taps.first(x)) * kChannels;
    Sums sums = Splat(kHalf);
    for (int i = 0; i < taps.count(x); i++, at += kChannels) sums = AddPixels(sums, rows, at, Splat(weights[i]));
    uint8_t levels[LANES];
    StoreLevels(sums, levels);
    uint8_t *to = out + static_cast<size_t>(x) * kChannels;
    // The fourth byte is written again with the next pixel; behind a row's last pixel another row may begin.
    size_t bytes = x + 1 < job.to_width ? 4 : kChannels;
    for (int row = 0; row < count; row++, to += job.to_bytes()) memcpy(to, levels + 4 * row, bytes);
  }
}

INLINE void HorizontalRows(const Job &job, const uint8_t *in, int rows, uint8_t *out) {
  const uint8_t *last = job.pixels + (job.height - 1) * job.row_bytes();
  for (int y = 0; y < rows; y += kRowsAtOnce) {
    const uint8_t *several[kRowsAtOnce];
    int count = rows - y < kRowsAtOnce ? rows - y : kRowsAtOnce;
    for (int i = 0; i < kRowsAtOnce; i++) {
      several[i] = in + (y + (i < count ? i : 0)) * job.row_bytes();
      // No byte lies behind the picture's last row.
      if (several[i] == last) {
        memcpy(job.last, last, job.row_bytes());
        several[i] = job.last;
      }
    }
    Horizontal(job, several, count, out + y * job.to_bytes());
  }
}

// One output row of `bytes` bytes, of the `count` rows that begin at `in`.
INLINE void Vertical(const uint8_t *in, size_t bytes, uint8_t *out, int count, const int32_t *weights) {
  constexpr size_t kStep = 4 * LANES;
  size_t x = 0;
  for (; x + kStep <= bytes; x += kStep) {
    Sums a = Splat(kHalf), b = a, c = a, d = a;
    const uint8_t *from = in + x;
    for (int i = 0; i < count; i++, from += bytes) {
      Sums weight = Splat(weights[i]);
      a = Add(a, from, weight);
      b = Add(b, from + LANES, weight);
      c = Add(c, from + 2 * LANES, weight);
      d = Add(d, from + 3 * LANES, weight);
    }
    StoreLevels(a, out + x);
    StoreLevels(b, out + x + LANES);
    StoreLevels(c, out + x + 2 * LANES);
    StoreLevels(d, out + x + 3 * LANES);
  }
  for (; x < bytes; x++) {
    int32_t sum = kHalf;
    for (int i = 0; i < count; i++) sum += in[i * bytes + x] * weights[i];
    out[x] = Clip(sum);
  }
}

INLINE void VerticalRows(const Job &job, const uint8_t *in, int first, size_t bytes, int y, int rows, uint8_t *out) {
  const Taps &taps = *job.down;
  for (int i = y; i < y + rows; i++, out += bytes)
    Vertical(in + (taps.first(i) - first) * bytes, bytes, out, taps.count(i), taps.weights(i));
}

// Rows y … y + rows - 1 of the resized picture.
INLINE const uint8_t *Band(Job &job, int y, int rows) {
  if (!job.down) {
    const uint8_t *in = job.pixels + y * job.row_bytes();
    if (!job.across) return in;
    HorizontalRows(job, in, rows, job.band);
    return job.band;
  }
  if (!job.across || job.down_first) {
    VerticalRows(job, job.pixels, 0, job.row_bytes(), y, rows, job.across ? job.wide : job.band);
    if (job.across) HorizontalRows(job, job.wide, rows, job.band);
    return job.band;
  }
  int last = y + rows - 1, first = job.down->first(y), end = job.down->first(last) + job.down->count(last);
  int kept = job.wide_end > first ? job.wide_end - first : 0;
  size_t bytes = job.to_bytes();
  memmove(job.wide, job.wide + (kept ? first - job.wide_first : 0) * bytes, kept * bytes);
  HorizontalRows(job, job.pixels + (first + kept) * job.row_bytes(), end - first - kept, job.wide + kept * bytes);
  job.wide_first = first;
  job.wide_end = end;
  VerticalRows(job, job.wide, first, bytes, y, rows, job.band);
  return job.band;
}

// A row of a patch. A call for each of them would take longer than all else, so common widths are constants.
INLINE void CopyRow(uint8_t *to, const uint8_t *from, int width) {
  switch (width) {
    case 14: memcpy(to, from, 14); break;
    case 16: memcpy(to, from, 16); break;
    default: memcpy(to, from, width);
  }
}

// Writes row `y` of the resized picture into its patches.
INLINE void WriteRow(const Job &job, const uint8_t *row, int y) {
  const Order &order = job.order;
  size_t width = job.to_width;
  uint8_t *const planes[kChannels] = {job.planes, job.planes + width, job.planes + 2 * width};
  Split(row, job.to_width, planes);
  size_t side = static_cast<size_t>(order.patch_width) * order.patch_height, merge = order.merge;
  size_t columns = width / order.patch_width, patch_row = y / order.patch_height;
  size_t first = patch_row / merge * merge * columns + patch_row % merge * merge;
  uint8_t *levels = job.levels + static_cast<size_t>(y % order.patch_height) * order.patch_width;
  for (size_t column = 0; column < columns; column++) {
    uint8_t *to = levels + (first + column / merge * merge * merge + column % merge) * kChannels * side;
    for (int channel = 0; channel < kChannels; channel++, to += side)
      CopyRow(to, planes[channel] + column * order.patch_width, order.patch_width);
  }
}

void RunBands(Job &job) {
  for (int y = 0; y < job.to_height; y += kBandRows) {
    int rows = job.to_height - y < kBandRows ? job.to_height - y : kBandRows;
    const uint8_t *band = Band(job, y, rows);
    for (int i = 0; i < rows; i++) WriteRow(job, band + i * job.to_bytes(), y + i);
  }
}
