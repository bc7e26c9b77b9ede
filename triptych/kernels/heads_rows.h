// Norm and rotary positions of one token's heads.
//
// No include guard: instruction_sets.h includes this once for each instruction set, after vectors.h.

template <typename T, typename Angle>
INLINE void RotateHead(T *x, const Angle *cos, const Angle *sin, const T *norm, int dim, float epsilon) {
  float scale = 1;
  if (norm) {
    Vec sum = {};
    int i = 0;
    for (; i + LANES <= dim; i += LANES) {
      Vec part = Load(x + i);
      sum = Fma(part, part, sum);
    }
    float squares = Sum(sum);
    for (; i < dim; i++) squares += ToFloat(x[i]) * ToFloat(x[i]);
    scale = 1.0f / sqrtf(squares / dim + epsilon);
  }
  int half = dim / 2, i = 0;
  for (; i + LANES <= half; i += LANES) {
    Vec low = Load(x + i) * scale, high = Load(x + half + i) * scale;
    if (norm) low *= Load(norm + i), high *= Load(norm + half + i);
    Store(x + i, low * Load(cos + i) + high * Load(sin + i));
    Store(x + half + i, high * Load(cos + half + i) + low * Load(sin + half + i));
  }
  for (; i < half; i++) {
    float low = ToFloat(x[i]) * scale, high = ToFloat(x[half + i]) * scale;
    if (norm) low *= ToFloat(norm[i]), high *= ToFloat(norm[half + i]);
    FromFloat(low * ToFloat(cos[i]) + high * ToFloat(sin[i]), x + i);
    FromFloat(high * ToFloat(cos[half + i]) + low * ToFloat(sin[half + i]), x + half + i);
  }
}

template <typename T, typename Angle>
INLINE void RotateToken(const RotaryCall &call, int64_t token) {
  T *x = static_cast<T *>(call.x) + token * call.x_token;
  const Angle *cos = static_cast<const Angle *>(call.cos) + token * call.dim, *sin = static_cast<const Angle *>(call.sin) + token * call.dim;
  for (int head = 0; head < call.heads; head++) {
    const T *norm = call.norm ? static_cast<const T *>(call.norm) + static_cast<int64_t>(head) * call.dim : nullptr;
    RotateHead<T, Angle>(x + static_cast<int64_t>(head) * call.dim, cos, sin, norm, call.dim, call.epsilon);
  }
}

void RotateTokens(const RotaryCall &call, int64_t first, int64_t last) {
  for (int64_t token = first; token < last; token++)
    if (call.bytes == 4)
      RotateToken<float, float>(call, token);
    else if (call.angle_bytes == 4)
      RotateToken<uint16_t, float>(call, token);
    else
      RotateToken<uint16_t, uint16_t>(call, token);
}
