// The processor's matrix unit (AMX), which always multiplies sixteen rows at a time.
//
// One instruction multiplies 16 rows of 32 bfloat16 with 32 x 16 bfloat16 and adds the products to 16 x 16 sums. A row's
// sums depend on that row alone, and the same instruction serves every number of rows: row invariance by construction.
// A single row is padded with fifteen rows of zeros. That costs little, because reading memory takes most of the time.
//
// The unit expects words of two adjacent bfloat16, as the other variants do, so weights, keys and values have the same
// layouts. Its sums are rounded differently from those of the vector instructions.
#pragma once

#include <cstdint>
#include <type_traits>

#if defined(__AMX_BF16__)

namespace longdraft::LONGDRAFT_VARIANT::amx {

constexpr int ROWS = 16;   // rows of a tile
constexpr int INNER = 32;  // bfloat16 of a row that one instruction sums over

// The tile registers: four sums, two left operands and one right operand.
enum Tile { SUM = 0, LEFT = 4, RIGHT = 6 };

// Configures the unit for this thread, and releases it: switching away from a thread with live tiles is expensive.
class Unit {
  public:
    Unit() {
        struct { uint8_t palette, start, reserved[14]; uint16_t bytes[16]; uint8_t rows[16]; } shape = {};
        shape.palette = 1;
        for (int t = 0; t < 8; t++) {
            shape.bytes[t] = 2 * INNER;
            shape.rows[t] = ROWS;
        }
        asm volatile("ldtilecfg %0" ::"m"(shape));
    }
    ~Unit() { asm volatile("tilerelease" ::: "memory"); }
    Unit(const Unit&) = delete;
};

// Strides are in bytes. A stride of 0 makes all rows of the tile the same row.
template <int TILE> void load(const void* from, long stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(TILE) : "memory");
}
template <int TILE> void store(void* to, long stride) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(TILE) : "memory");
}
template <int TILE> void zero() { asm volatile("tilezero %%tmm%c0" ::"i"(TILE)); }
template <int SUMS, int A, int B> void multiply() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(SUMS), "i"(A), "i"(B));
}

// Signed bytes of the left operand times unsigned bytes of the right one, added to int32.
template <int SUMS, int A, int B> void multiply_bytes() {
    asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(SUMS), "i"(A), "i"(B));
}

inline void prefetch(const uint32_t* from, int lines, long stride) {
    for (int i = 0; i < lines; i++) __builtin_prefetch(from + i * stride);
}

// Call f(std::integral_constant) for 0 .. WIDE - 1, unrolled at compile time.
template <int WIDE, class F> void each(F f) {
    if constexpr (WIDE > 1) each<WIDE - 1>(f);
    f(std::integral_constant<int, WIDE - 1>{});
}

}  // namespace

#endif
