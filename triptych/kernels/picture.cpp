// Pictures of 8-bit RGB resized to the bits that Pillow gives, and written in the order of a tower's patches.
//
// Pillow resizes in two passes over weights of 22 fractional bits, each rounded to 8 bits. The order of the passes and
// the arithmetic of the weights are part of the result: compile with -ffp-contract=off.
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "export.h"

namespace {

constexpr int kBits = 22;
constexpr int32_t kHalf = 1 << (kBits - 1);
constexpr int kChannels = 3;
// Rows that are resized and put in order while they are in the cache.
constexpr int kBandRows = 16;

// An array on the heap; `data` is null where there is no memory for it.
template <typename T>
struct Buffer {
  T *data;
  explicit Buffer(size_t count) : data(static_cast<T *>(malloc((count ? count : 1) * sizeof(T)))) {}
  ~Buffer() { free(data); }
  Buffer(const Buffer &) = delete;
  Buffer &operator=(const Buffer &) = delete;
};

// The numbers are Pillow's.
enum Filter { kLanczos = 1, kBilinear = 2, kBicubic = 3, kBox = 4, kHamming = 5 };

double Sinc(double x) {
  if (x == 0.0) return 1.0;
  x = x * M_PI;
  return sin(x) / x;
}

double Weight(int filter, double x) {
  if (filter == kLanczos) return -3.0 <= x && x < 3.0 ? Sinc(x) * Sinc(x / 3) : 0.0;
  if (filter == kBox) return x > -0.5 && x <= 0.5 ? 1.0 : 0.0;
  if (x < 0.0) x = -x;
  if (filter == kBilinear) return x < 1.0 ? 1.0 - x : 0.0;
  if (filter == kHamming) {
    if (x == 0.0) return 1.0;
    if (x >= 1.0) return 0.0;
    x = x * M_PI;
    return sin(x) / x * (0.54f + 0.46f * cos(x));
  }
  if (x < 1.0) return (1.5 * x - 2.5) * x * x + 1;
  return x < 2.0 ? (((x - 5) * x + 8) * x - 4) * -0.5 : 0.0;
}

double Support(int filter) {
  switch (filter) {
    case kLanczos: return 3.0;
    case kBilinear: return 1.0;
    case kBicubic: return 2.0;
    case kBox: return 0.5;
    case kHamming: return 1.0;
    default: return 0.0;
  }
}

// Weights of one dimension: output i is the sum of inputs first[i] … first[i] + count[i] - 1.
class Taps {
 public:
  Taps(int in, int out, int filter)
      : scale_(static_cast<double>(in) / out),
        stretch_(scale_ < 1.0 ? 1.0 : scale_),
        support_(Support(filter) * stretch_),
        stride_(static_cast<int>(ceil(support_)) * 2 + 1),
        bounds_(2 * static_cast<size_t>(out)),
        weights_(static_cast<size_t>(out) * stride_),
        row_(stride_) {
    if (!ok()) return;
    for (int i = 0; i < out; i++) Fill(i, in, filter);
  }

  bool ok() const { return bounds_.data && weights_.data && row_.data; }
  int first(int i) const { return bounds_.data[2 * i]; }
  int count(int i) const { return bounds_.data[2 * i + 1]; }
  const int32_t *weights(int i) const { return weights_.data + static_cast<size_t>(i) * stride_; }

 private:
  void Fill(int i, int in, int filter) {
    double center = (i + 0.5) * scale_, inverse = 1.0 / stretch_, sum = 0.0;
    int low = static_cast<int>(center - support_ + 0.5), high = static_cast<int>(center + support_ + 0.5);
    if (low < 0) low = 0;
    if (high > in) high = in;
    int count = high - low;
    for (int x = 0; x < count; x++) sum += row_.data[x] = Weight(filter, (x + low - center + 0.5) * inverse);
    int32_t *out = weights_.data + static_cast<size_t>(i) * stride_;
    for (int x = 0; x < count; x++) {
      double weight = sum != 0.0 ? row_.data[x] / sum : row_.data[x];
      out[x] = static_cast<int32_t>((weight < 0 ? -0.5 : 0.5) + weight * (1 << kBits));
    }
    bounds_.data[2 * i] = low;
    bounds_.data[2 * i + 1] = count;
  }

  double scale_, stretch_, support_;
  int stride_;
  Buffer<int> bounds_;
  Buffer<int32_t> weights_;
  Buffer<double> row_;
};

INLINE uint8_t Clip(int32_t sum) {
  int32_t level = sum >> kBits;
  return static_cast<uint8_t>(level < 0 ? 0 : level > 255 ? 255 : level);
}

INLINE uint32_t Word(const uint8_t *from) {
  uint32_t word;
  memcpy(&word, from, sizeof word);
  return word;
}

// Bytes of three vectors of packed pixels that make one plane, channel by channel; 128: no byte of this vector.
struct Picks {
  alignas(16) uint8_t at[kChannels][kChannels][16];
  constexpr Picks() : at() {
    for (int channel = 0; channel < kChannels; channel++)
      for (int part = 0; part < kChannels; part++)
        for (int i = 0; i < 16; i++) {
          int byte = kChannels * i + channel - 16 * part;
          at[channel][part][i] = byte >= 0 && byte < 16 ? byte : 128;
        }
  }
};
[[maybe_unused]] constexpr Picks kPicks;

struct Order {
  int patch_width, patch_height, merge;
};

// One picture on its way: bands of rows are resized and written, so that what one pass writes is in the cache for the next.
struct Job {
  const uint8_t *pixels;
  int width, height, to_width, to_height;
  const Taps *across, *down;  // null: the dimension stays as it is
  bool down_first;
  Order order;
  uint8_t *wide, *band, *planes, *last;
  uint8_t *levels;
  int wide_first, wide_end;  // rows of the picture that `wide` has

  size_t row_bytes() const { return static_cast<size_t>(width) * kChannels; }
  size_t to_bytes() const { return static_cast<size_t>(to_width) * kChannels; }
};

#define LANES 4
namespace plain {
#include "picture_bands.h"
}
#undef LANES
#ifdef X86_VARIANTS
#pragma GCC push_options
#pragma GCC target("avx2")
#define LANES 8
namespace avx2 {
#include "picture_bands.h"
}
#undef LANES
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx512f")
#define LANES 16
namespace avx512 {
#include "picture_bands.h"
}
#undef LANES
#pragma GCC pop_options
#endif

// Rows of input that one band needs, at most.
int WideRows(const Taps &down, int height) {
  int rows = 0;
  for (int y = 0; y < height; y += kBandRows) {
    int last = y + kBandRows < height ? y + kBandRows - 1 : height - 1;
    int needed = down.first(last) + down.count(last) - down.first(y);
    if (needed > rows) rows = needed;
  }
  return rows;
}

// Widest instruction set of this CPU, no wider than `limit`: 0 plain, 1 AVX2, 2 AVX-512.
int InstructionSet([[maybe_unused]] int limit) {
#ifdef X86_VARIANTS
  if (limit >= 2 && __builtin_cpu_supports("avx512f")) return 2;
  if (limit >= 1 && __builtin_cpu_supports("avx2")) return 1;
#endif
  return 0;
}

void Run(Job &job, [[maybe_unused]] int limit) {
#ifdef X86_VARIANTS
  switch (InstructionSet(limit)) {
    case 2: return avx512::RunBands(job);
    case 1: return avx2::RunBands(job);
  }
#endif
  plain::RunBands(job);
}

}  // namespace

// The picture resized, as levels [patches, 3, patch_height, patch_width], merge x merge patches together.
// `instructions` limits the instruction set. 0; 1: no memory; 2: sizes that do not fit.
EXPORT int triptych_picture_levels(const uint8_t *pixels, int width, int height, int to_width, int to_height,
                                   int filter, int patch_width, int patch_height, int merge, int instructions,
                                   uint8_t *levels) {
  if (width < 1 || height < 1 || to_width < 1 || to_height < 1 || patch_width < 1 || patch_height < 1 || merge < 1 ||
      to_width % (patch_width * merge) || to_height % (patch_height * merge) || Support(filter) == 0.0)
    return 2;
  bool across = width != to_width, down = height != to_height;
  int shorter = height - to_height, narrower = width - to_width;
  bool down_first = shorter > 0 && shorter > 2 * static_cast<int64_t>(narrower);
  Taps columns(across ? width : 1, across ? to_width : 1, filter), rows(down ? height : 1, down ? to_height : 1, filter);
  if (!columns.ok() || !rows.ok()) return 1;
  size_t bytes = static_cast<size_t>(to_width) * kChannels, row_bytes = static_cast<size_t>(width) * kChannels;
  size_t wide_bytes = across && down ? (down_first ? row_bytes * kBandRows : bytes * WideRows(rows, to_height)) : 0;
  // A pixel is read and written as four bytes.
  Buffer<uint8_t> wide(wide_bytes + 1), band(bytes * kBandRows + 1), planes(bytes), last(row_bytes + 1);
  if (!wide.data || !band.data || !planes.data || !last.data) return 1;
  Job job = {pixels,     width,     height,     to_width,    to_height,
             across ? &columns : nullptr,       down ? &rows : nullptr,
             down_first, {patch_width, patch_height, merge},
             wide.data,  band.data, planes.data, last.data,  levels,    0, 0};
  Run(job, instructions);
  return 0;
}

namespace {

template <typename T>
INLINE void LookUp(const uint8_t *levels, size_t items, size_t channels, size_t side, size_t copies,
                            const T *table, T *out) {
  for (size_t item = 0; item < items; item++)
    for (size_t channel = 0; channel < channels; channel++, levels += side) {
      const T *values = table + 256 * channel;
      T *first = out;
      for (size_t i = 0; i < side; i++) first[i] = values[levels[i]];
      out += side;
      for (size_t copy = 1; copy < copies; copy++, out += side) memcpy(out, first, side * sizeof(T));
    }
}

}  // namespace

// Values of 2 or 4 bytes [items, channels, copies, side] for levels [items, channels, side], by table [channels, 256].
EXPORT int triptych_look_up(const uint8_t *levels, size_t items, size_t channels, size_t side, size_t copies,
                                     int value_bytes, const void *table, void *out) {
  if (value_bytes == 2)
    LookUp(levels, items, channels, side, copies, static_cast<const uint16_t *>(table), static_cast<uint16_t *>(out));
  else if (value_bytes == 4)
    LookUp(levels, items, channels, side, copies, static_cast<const uint32_t *>(table), static_cast<uint32_t *>(out));
  else
    return 2;
  return 0;
}
