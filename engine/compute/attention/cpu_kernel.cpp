// Attention over the paged pool on a CPU. cpu_kernel.py loads or compiles it for a model's heads.
//
// A tile (tiles.py) is a few query rows over a range of keys. It has a lane for each of its rows
// and
// each of the heads that share a KV head. A vector register holds one number of several lanes. So
// scores, their maximum and their sum need no operation across a register. Each lane's arithmetic
// is
// the same whatever other lanes are in the tile.
//
// Three macros are given at compile time: HEAD_DIM, LANES (the most lanes of a tile) and ELEMENT
// (0:
// float, 1: bfloat16, 2: float16). The numbers of heads are read at run time, so one library serves
// many models.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

namespace {

#if defined(__AVX512F__)
constexpr int WIDTH = 16, UNROLL = 16;
#elif defined(__AVX__)
constexpr int WIDTH = 8, UNROLL = 8;
#else
constexpr int WIDTH = 4, UNROLL = 8;
#endif

#if ELEMENT == 0
using Element = float;
#elif ELEMENT == 1
using Element = uint16_t;
#elif defined(__ARM_FP16_FORMAT_IEEE)
using Element = __fp16;  // GCC 12 knows no _Float16 in C++ there
#else
using Element = _Float16;
#endif

typedef float Vec __attribute__((vector_size(WIDTH * 4)));
typedef float Channels __attribute__((vector_size(WIDTH * 4), may_alias));
typedef int32_t Ints __attribute__((vector_size(WIDTH * 4)));

constexpr int PADDED = (HEAD_DIM + UNROLL - 1) / UNROLL * UNROLL;
constexpr int CHUNKS = PADDED / WIDTH;
// The largest divisor of `number` that is at most `most`.
constexpr int part_of(int number, int most) {
  return number % most == 0 ? most : part_of(number, most - 1);
}
constexpr int AT_ONCE = part_of(CHUNKS, 8);  // chunks of channels that are summed up in registers
constexpr int VECTORS = (LANES + WIDTH - 1) / WIDTH;
constexpr int KEYS = 32;         // keys at a time: so many stay in the first cache
constexpr float LEAST = -1e30f;  // stands for minus infinity; finite, so that no difference is NaN

inline float to_float(Element number) {
#if ELEMENT == 1
  uint32_t bits = uint32_t(number) << 16;
  float result;
  std::memcpy(&result, &bits, 4);
  return result;
#else
  return float(number);
#endif
}

inline Element to_element(float number) {
#if ELEMENT == 1
  uint32_t bits;
  std::memcpy(&bits, &number, 4);
  if (number != number) return Element((bits >> 16) | 64);
  return Element((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);  // to the nearest, ties to even
#else
  return Element(number);
#endif
}

inline Vec all(float number) { return Vec{} + number; }

// e to the power of x, for x at most 0. The error is about one unit in the last place. Below -87
// the
// result is 0.
inline Vec power_of_e(Vec x) {
  const Vec magic = all(12582912.f);  // 1.5 x 2^23: adding it rounds to an integer
  Vec shifted = x * 1.44269504088896341f + magic;
  Vec count = shifted - magic;
  Vec rest = x - count * 0.693359375f;
  rest = rest + count * 2.12194440e-4f;
  Vec sum = all(1.9875691500e-4f);
  sum = sum * rest + 1.3981999507e-3f;
  sum = sum * rest + 8.3334519073e-3f;
  sum = sum * rest + 4.1665795894e-2f;
  sum = sum * rest + 1.6666665459e-1f;
  sum = sum * rest + 5.0000001201e-1f;
  sum = sum * rest * rest + rest + 1.f;
  Ints exponent = ((Ints)shifted << 23) + (127 << 23);
  return x > all(-87.f) ? sum * (Vec)exponent : Vec{};
}

inline Vec capped(Vec score, float softcap) {
  // The result is cap x tanh(score / cap). With t = e^(-2 |x|), tanh |x| is (1 - t) / (1 + t). Near
  // 0
  // this formula loses digits, and five terms of the series are exact.
  Vec x = score / softcap, square = x * x;
  Vec size = x < Vec{} ? -x : x;
  Vec t = power_of_e(size * -2.f);
  Vec far = (1.f - t) / (1.f + t);
  Vec near = all(62.f / 2835) * square - 17.f / 315;
  near = near * square + 2.f / 15;
  near = near * square - 1.f / 3;
  near = (near * square + 1.f) * size;
  Vec result = (size < all(0.25f) ? near : far) * softcap;
  return x < Vec{} ? -result : result;
}

struct Tile {
  int first_row, num_rows, table, begin, end, part;
};

// The lanes of a tile and their sums so far. In a tile with few lanes `output` is as in `fold_few`.
struct Lanes {
  Vec query[VECTORS][PADDED];
  Vec output[VECTORS][PADDED];
  Vec largest[VECTORS], total[VECTORS];
  Ints position[VECTORS];
};

// Some keys and values of one KV head, as floats.
struct Piece {
  alignas(64) float keys[KEYS][PADDED];
  alignas(64) float values[KEYS][PADDED];
  int begin, count;
};

inline void read(Piece &piece, const Element *keys, const Element *values, const int32_t *table,
                 int block_size, int64_t kv_heads, int64_t kv_head) {
  for (int i = 0; i < piece.count;) {
    int key = piece.begin + i, slot = key % block_size;
    int64_t block = table[key / block_size];
    int64_t place = ((block * block_size + slot) * kv_heads + kv_head) * HEAD_DIM;
    int end = std::min(i + block_size - slot, piece.count);
    for (; i < end; ++i, place += kv_heads * HEAD_DIM) {
      for (int d = 0; d < HEAD_DIM; ++d) piece.keys[i][d] = to_float(keys[place + d]);
      for (int d = 0; d < HEAD_DIM; ++d) piece.values[i][d] = to_float(values[place + d]);
    }
  }
}

// The scores of the keys, with the softcap. A key that a lane does not see gets minus infinity.
// `hides` says whether there is such a key.
inline void score(Vec *scores, const Vec *query, const Piece &piece, Ints position, bool hides,
                  float softcap, int window) {
  for (int first = 0; first < piece.count; first += UNROLL) {
    Vec sums[UNROLL] = {};
    for (int d = 0; d < HEAD_DIM; ++d) {
      Vec q = query[d];
#pragma GCC unroll 16
      for (int j = 0; j < UNROLL; ++j) sums[j] += q * piece.keys[first + j][d];
    }
#pragma GCC unroll 16
    for (int j = 0; j < UNROLL; ++j) scores[first + j] = sums[j];
  }
  if (softcap > 0)
    for (int i = 0; i < piece.count; ++i) scores[i] = capped(scores[i], softcap);
  if (!hides) return;
  for (int i = 0; i < piece.count; ++i) {
    Ints key = Ints{} + (piece.begin + i);
    Ints seen = key <= position;
    if (window > 0) seen &= key > position - window;
    scores[i] = seen ? scores[i] : all(-INFINITY);
  }
}

// Turn scores into weights, by the running maximum (arXiv 2205.14135). Return the factor by which
// earlier sums shrink.
inline Vec weigh(Vec *scores, Vec &largest, Vec &total, int count) {
  Vec most = largest;
  for (int i = 0; i < count; ++i) most = scores[i] > most ? scores[i] : most;
  Vec shrink = power_of_e(largest - most);
  Vec sum = Vec{};
  for (int i = 0; i < count; ++i) {
    scores[i] = power_of_e(scores[i] - most);
    sum += scores[i];
  }
  largest = most;
  total = total * shrink + sum;
  return shrink;
}

// Add the weighed values to `output`, which has a register for each channel.
inline void fold(const Vec *weights, Vec *output, Vec shrink, const Piece &piece) {
  for (int first = 0; first < PADDED; first += UNROLL) {
    Vec sums[UNROLL];
#pragma GCC unroll 16
    for (int j = 0; j < UNROLL; ++j) sums[j] = output[first + j] * shrink;
    for (int i = 0; i < piece.count; ++i) {
      Vec weight = weights[i];
#pragma GCC unroll 16
      for (int j = 0; j < UNROLL; ++j) sums[j] += weight * piece.values[i][first + j];
    }
#pragma GCC unroll 16
    for (int j = 0; j < UNROLL; ++j) output[first + j] = sums[j];
  }
}

// The same for few lanes. Here a register holds several channels of one lane, and `output` is
// (lanes, CHUNKS). Each number is the sum of the same products in the same order.
inline void fold_few(const Vec *weights, int num_lanes, Vec *output, Vec shrink,
                     const Piece &piece) {
  for (int lane = 0; lane < num_lanes; ++lane, output += CHUNKS) {
    float less = shrink[lane];
    for (int first = 0; first < CHUNKS; first += AT_ONCE) {
      Vec sums[AT_ONCE];
#pragma GCC unroll 16
      for (int j = 0; j < AT_ONCE; ++j) sums[j] = output[first + j] * less;
      for (int i = 0; i < piece.count; ++i) {
        float weight = weights[i][lane];
        const Channels *values = (const Channels *)piece.values[i] + first;
#pragma GCC unroll 16
        for (int j = 0; j < AT_ONCE; ++j) sums[j] += weight * values[j];
      }
#pragma GCC unroll 16
      for (int j = 0; j < AT_ONCE; ++j) output[first + j] = sums[j];
    }
  }
}

}  // namespace

// The data that all layers of one step share: the arrays of `Tiles`, the rows' positions, and
// memory for the parts' results, `outputs` (parts, heads, HEAD_DIM) and `log_sums` (parts, heads).
// `group` heads share a KV head.
struct Step {
  const int32_t *tiles, *rows, *table, *offsets, *parts, *positions;
  float *outputs, *log_sums;
  int32_t num_tiles, num_rows, threads, kv_heads, group;
};

// The data of one layer. `query` is (heads, rows, HEAD_DIM). Its strides for head and row are in
// elements, and its last stride is 1. `merged` is (rows, heads, HEAD_DIM). `sinks` is (heads), or
// null for a layer without sinks. `softcap` and `window` are 0 for a layer without them.
struct Layer {
  const Element *query, *keys, *values;
  const float *sinks;
  Element *merged;
  int64_t head_stride, row_stride;
  float scaling, softcap;
  int32_t window, block_size;
};

namespace {

void load(Lanes &lanes, const Tile &tile, const Step &step, const Layer &layer, int64_t kv_head) {
  int num_lanes = tile.num_rows * step.group, num_vectors = (num_lanes + WIDTH - 1) / WIDTH;
  for (int lane = 0; lane < num_vectors * WIDTH; ++lane) {
    int v = lane / WIDTH, w = lane % WIDTH;
    if (lane >= num_lanes) {
      for (int d = 0; d < HEAD_DIM; ++d) lanes.query[v][d][w] = 0;
      lanes.position[v][w] = INT32_MAX;
      continue;
    }
    int64_t row = step.rows[tile.first_row + lane / step.group];
    int64_t head = kv_head * step.group + lane % step.group;
    const Element *from = layer.query + head * layer.head_stride + row * layer.row_stride;
    for (int d = 0; d < HEAD_DIM; ++d) lanes.query[v][d][w] = to_float(from[d]) * layer.scaling;
    lanes.position[v][w] = step.positions[row];
  }
  for (int v = 0; v < num_vectors; ++v) {
    lanes.largest[v] = all(LEAST);
    lanes.total[v] = Vec{};
    for (int d = 0; d < PADDED; ++d) lanes.output[v][d] = Vec{};
  }
}

// Whether half of a register or more would be empty.
inline bool has_few(const Tile &tile, const Step &step) {
  return 2 * tile.num_rows * step.group <= WIDTH;
}

void store(const Lanes &lanes, const Tile &tile, const Step &step, int64_t kv_head) {
  int64_t group = step.group, heads = group * step.kv_heads;
  bool is_few = has_few(tile, step);
  for (int lane = 0; lane < tile.num_rows * group; ++lane) {
    int v = lane / WIDTH, w = lane % WIDTH;
    int64_t place = (tile.part + lane / group) * heads + kv_head * group + lane % group;
    float total = lanes.total[v][w];
    if (!(total > 0)) total = 1;
    step.log_sums[place] = lanes.largest[v][w] + std::log(total);
    float *to = step.outputs + place * HEAD_DIM;
    const Vec *few = lanes.output[0] + lane * CHUNKS;
    for (int d = 0; d < HEAD_DIM; ++d)
      to[d] = (is_few ? few[d / WIDTH][d % WIDTH] : lanes.output[v][d][w]) / total;
  }
}

// Merge one row's parts. Each part is weighed by the sum of its exponentials. A sink is one more
// part, without a value.
void merge(const Step &step, int64_t row, const float *sinks, Element *merged) {
  int begin = step.offsets[row], end = step.offsets[row + 1];
  int64_t heads = int64_t(step.kv_heads) * step.group;
  for (int64_t head = 0; head < heads; ++head) {
    float largest = sinks ? sinks[head] : LEAST, sum[HEAD_DIM] = {};
    for (int i = begin; i < end; ++i)
      largest = std::max(largest, step.log_sums[step.parts[i] * heads + head]);
    float total = sinks ? std::exp(sinks[head] - largest) : 0;
    for (int i = begin; i < end; ++i) {
      int64_t place = step.parts[i] * heads + head;
      float weight = std::exp(step.log_sums[place] - largest);
      total += weight;
      const float *own = step.outputs + place * HEAD_DIM;
      for (int d = 0; d < HEAD_DIM; ++d) sum[d] += own[d] * weight;
    }
    if (!(total > 0)) total = 1;  // a row without parts
    Element *to = merged + (row * heads + head) * HEAD_DIM;
    for (int d = 0; d < HEAD_DIM; ++d) to[d] = to_element(sum[d] / total);
  }
}

void attend_tile(const Tile &tile, const Step &step, const Layer &layer, Lanes &lanes, Piece &piece,
                 int64_t kv_head) {
  int earliest = INT32_MAX, latest = 0;
  for (int i = 0; i < tile.num_rows; ++i) {
    int position = step.positions[step.rows[tile.first_row + i]];
    earliest = std::min(earliest, position);
    latest = std::max(latest, position);
  }
  int end = std::min(tile.end, latest + 1), begin = tile.begin, window = layer.window;
  if (window > 0) begin = std::max(begin, (earliest - window + 1) / KEYS * KEYS);
  Vec scores[KEYS];
  bool is_few = has_few(tile, step);
  int num_vectors = (tile.num_rows * step.group + WIDTH - 1) / WIDTH;
  // Pieces begin at multiples of KEYS. So a row's sums do not depend on its tile.
  for (piece.begin = begin; piece.begin < end; piece.begin += piece.count) {
    piece.count = std::min(KEYS - piece.begin % KEYS, end - piece.begin);
    read(piece, layer.keys, layer.values, step.table + tile.table, layer.block_size, step.kv_heads,
         kv_head);
    int last = piece.begin + piece.count - 1;
    bool hides = last > earliest || (window > 0 && piece.begin <= latest - window);
    for (int v = 0; v < num_vectors; ++v) {
      score(scores, lanes.query[v], piece, lanes.position[v], hides, layer.softcap, window);
      Vec shrink = weigh(scores, lanes.largest[v], lanes.total[v], piece.count);
      if (is_few)
        fold_few(scores, tile.num_rows * step.group, lanes.output[v], shrink, piece);
      else
        fold(scores, lanes.output[v], shrink, piece);
    }
  }
}

}  // namespace

extern "C" void attend(const Step *step, const Layer *layer) {
  const int64_t num_works = int64_t(step->num_tiles) * step->kv_heads;
#pragma omp parallel num_threads(step->threads)
  {
    alignas(64) static thread_local Lanes lanes;
    alignas(64) static thread_local Piece piece;
#pragma omp for schedule(dynamic, 1)
    for (int64_t work = 0; work < num_works; ++work) {
      Tile tile;
      std::memcpy(&tile, step->tiles + work / step->kv_heads * 6, sizeof tile);
      int64_t kv_head = work % step->kv_heads;
      load(lanes, tile, *step, *layer, kv_head);
      attend_tile(tile, *step, *layer, lanes, piece, kv_head);
      store(lanes, tile, *step, kv_head);
    }
#pragma omp for schedule(static)
    for (int64_t row = 0; row < step->num_rows; ++row) merge(*step, row, layer->sinks, layer->merged);
  }
}
